"""Models that are built from a configuration, and how long their sequences may be."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kit.tiny_engines import CONFIGS, CONTEXT
from transformers import AutoConfig, AutoModelForCausalLM

from tensorhub_runner.engines.models import build, computed_buffers, context_tokens

CONFIG: dict[str, Any] = {"model_type": "qwen2", **CONFIGS["qwen2"]}


def test_a_folder_a_file_and_their_content_make_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "dtype": "bfloat16"}))
    models = [build(tmp_path), build(tmp_path / "config.json"), build(CONFIG, torch.bfloat16)]
    shapes = [{name: (each.shape, each.dtype) for name, each in model.named_parameters()} for model in models]
    assert shapes[0] == shapes[1] == shapes[2]
    assert not any(model.training for model in models)


@pytest.mark.parametrize(
    "config",
    ["nowhere", {"model_type": "no such"}, {"vocab_size": 3}, {**CONFIG, "head_dim": "x"}],
)
def test_what_is_no_causal_language_model_is_refused(config: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="transformers makes no causal language model of"):
        build(tmp_path / config if isinstance(config, str) else config)


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({}, CONTEXT),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, CONTEXT),
        ({"rope_parameters": {**LONG, "original_max_position_embeddings": 16}}, 16),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}, CONTEXT),
    ],
)
def test_a_context_ends_where_angles_would_depend_on_the_batch(changes: dict[str, Any], longest: int) -> None:
    assert context_tokens(build({**CONFIG, **changes})) == longest


def test_a_model_whose_weights_are_tied_has_them_once_as_its_trainer_has() -> None:
    tied = build(CONFIG)
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight
    assert "lm_head.weight" not in dict(tied.named_parameters())
    alone = build({**CONFIG, "tie_word_embeddings": False})
    assert "lm_head.weight" in dict(alone.named_parameters())


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_no_state_dict_has_is_computed_as_transformers_does(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    config = {"model_type": family, **CONFIGS[family]}
    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    whole.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    model = build(config, dtype)
    computed = computed_buffers(model)
    assert computed.isdisjoint(model.state_dict())
    assert {*model.state_dict()} | computed == {
        *(name for name, _ in model.named_parameters(remove_duplicate=False)),
        *(name for name, _ in model.named_buffers()),
    }
    assert bool(computed) == (family != "gpt2")
    for name in computed:
        own = model.get_buffer(name)
        for theirs in (whole.get_buffer(name), loaded.get_buffer(name)):
            assert own.dtype == theirs.dtype
            assert torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (own, theirs))), name


def test_a_buffer_of_a_state_dict_is_not_computed() -> None:
    model = build(CONFIG)
    before = computed_buffers(model)
    model.register_buffer("sent", torch.ones(1))
    model.register_buffer("own", torch.ones(1), persistent=False)
    assert computed_buffers(model) == before | {"own"}
