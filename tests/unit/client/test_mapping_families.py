"""Ready mappings against transformers' own models: their names, their checkpoints' names, and every element."""

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from tensorhub import mapping
from tensorhub._tensors.description import bind, box_of, describe
from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import Layout, TensorEntry, segment_bytes

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
MOE: dict[str, Any] = {**SMALL, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    **MOE,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
}
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SMALL, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**SMALL, "head_dim": 8}),
    "llama, tied": ("LlamaForCausalLM", "LlamaConfig", {**SMALL, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", SMALL),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**SMALL, "head_dim": 12, "attention_bias": True}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**MOE, "num_experts": 4, "mlp_only_layers": [0]}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**LATENT, "q_lora_rank": 12, "attention_bias": True}),
    "deepseek_v3, full rank": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**LATENT, "q_lora_rank": None}),
}


def made(name: str) -> nn.Module:
    model, config, values = MODELS[name]
    found: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**values))
    with torch.no_grad():
        for tensor in found.parameters():
            tensor.normal_()
    return found


def brought_together(layouts: list[Layout], standing: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the global tensors that the shards of a replica have, whole; NaN where none has an element."""
    wholes: dict[str, torch.Tensor] = {}
    for layout, tensors in zip(layouts, standing, strict=True):
        for entry in layout.tensors:
            tensor = tensors[entry.name]
            if not entry.parts:
                _put(wholes, entry.name, entry.global_shape, entry.offset, tensor)
            for part in entry.parts:
                if not part.is_padding:
                    box = box_of(part, tensor).reshape(part.extent)
                    _put(wholes, part.name, part.global_shape, part.offset, box)
    return wholes


def _put(
    wholes: dict[str, torch.Tensor], name: str, shape: tuple[int, ...], offset: tuple[int, ...], box: torch.Tensor
) -> None:
    whole = wholes.setdefault(name, torch.full(shape, torch.nan, dtype=box.dtype))
    whole[tuple(slice(at, at + size) for at, size in zip(offset, box.shape, strict=True))] = box


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_has_the_names_and_values_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    model: Any = made(name)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    described = describe(model, mapping.for_model(tmp_path, "hf"))
    standing = bind(described, bytearray(segment_bytes(described.layout)))
    found = brought_together([described.layout], [standing])
    assert found.keys() == saved.keys()
    for key, tensor in saved.items():
        assert torch.equal(found[key], tensor), key
    # Tables of positions are each side's own: the module keeps them, where they were.
    assert not [key for key in standing if "rotary" in key]
    assert model.model.rotary_emb.inv_freq.isfinite().all()


def test_the_configuration_may_be_the_models_own_object() -> None:
    config = made("qwen3_moe").config
    assert mapping.for_model(config).rules == mapping.qwen3_moe(vars(config) | {"num_experts": 4}).rules
    assert mapping.for_model(config).title == "qwen3_moe for vllm, one rank"


def entry(name: str, *shape: int) -> TensorEntry:
    return TensorEntry(name, "float32", 4, shape, shape, (0,) * len(shape))


def test_a_tied_head_is_the_embedding() -> None:
    names = mapping.llama({**SMALL, "tie_word_embeddings": True}, tp_rank=1, tp_size=2)
    found = names.entry(entry("lm_head.weight", 64, 32))
    assert found is not None
    assert [(part.name, part.offset, part.shape) for part in found.parts] == [
        ("", (), (28, 32)),
        ("model.embed_tokens.weight", (64, 0), (36, 32)),
    ]


def test_vllms_own_tables_are_left_out() -> None:
    names = mapping.qwen3_moe({**MOE, "num_experts": 4})
    for name in (
        "model.layers.0.self_attn.rotary_emb.cos_sin_cache",
        "model.layers.0.self_attn.attn._k_scale",
        "model.layers.0.mlp.experts._expert_map",
        "model.layers.0.mlp.experts.routed_experts.expert_map",
    ):
        assert names.entry(entry(name, 4)) is None


def test_the_routers_correction_may_stand_with_the_experts() -> None:
    names = mapping.deepseek_v3({**LATENT, "q_lora_rank": 12})
    for place in ("experts", "experts.routed_experts"):
        found = names.entry(entry(f"model.layers.1.mlp.{place}.e_score_correction_bias", 4))
        assert found is not None
        assert found.parts[0].name == "model.layers.1.mlp.gate.e_score_correction_bias"


def test_shared_experts_may_be_whole_on_each_rank() -> None:
    whole = mapping.deepseek_v3(LATENT, tp_rank=1, tp_size=2, shared_experts_divided=False)
    found = whole.entry(entry("model.layers.1.mlp.shared_experts.gate_up_proj.weight", 64, 32))
    assert found is not None
    assert [part.offset for part in found.parts] == [(0, 0), (0, 0)]
    divided = mapping.deepseek_v3(LATENT, tp_rank=1, tp_size=2)
    with pytest.raises(LayoutMismatch, match=r"has 64 elements in dimension 0, and should have 16 \+ 16"):
        divided.entry(entry("model.layers.1.mlp.shared_experts.gate_up_proj.weight", 64, 32))


def test_a_stage_refuses_layers_of_another_and_may_count_from_zero() -> None:
    config = {**SMALL, "num_hidden_layers": 5}
    norm = "model.layers.{}.input_layernorm.weight"
    last = mapping.llama(config, pp_rank=1, pp_size=2)
    assert last.entry(entry(norm.format(4), 32)) == entry(norm.format(4), 32)
    with pytest.raises(LayoutMismatch, match="is of layer 2, and this rank has 3 to 4"):
        last.entry(entry(norm.format(2), 32))
    counted = mapping.llama(config, "hf", layers=range(2, 5), layers_from_zero=True)
    found = counted.entry(entry(norm.format(0), 32))
    assert found is not None
    assert found.parts[0].name == norm.format(2)
    with pytest.raises(LayoutMismatch, match="is of layer 5, and this rank has 2 to 4"):
        counted.entry(entry(norm.format(3), 32))


def test_a_stage_may_have_no_layer() -> None:
    """Only the embedding, or only the head; an empty range is not none at all."""
    names = mapping.llama({**SMALL, "num_hidden_layers": 5}, layers=range(0))
    with pytest.raises(LayoutMismatch, match="is of layer 0, and this rank has none"):
        names.entry(TensorEntry("model.layers.0.input_layernorm.weight", "float32", 4, (32,), (32,), (0,)))
    assert names.entry(TensorEntry("model.norm.weight", "float32", 4, (32,), (32,), (0,))) is not None


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_each_layer_is_of_one_stage(stages: int) -> None:
    takes: list[int] = []
    for rank in range(stages):
        names = mapping.llama({**SMALL, "num_hidden_layers": 7}, pp_rank=rank, pp_size=stages)
        for layer in range(9):
            with suppress(LayoutMismatch):
                assert names.entry(entry(f"model.layers.{layer}.mlp.gate_up_proj.weight", 96, 32))
                takes.append(layer)
    assert takes == list(range(7))


def test_experts_may_be_placed_by_hand_and_be_divided_otherwise() -> None:
    divided: Any = {"expert_tp_rank": 1, "expert_tp_size": 4}
    names = mapping.qwen3_moe({**MOE, "num_experts": 4}, local_experts=[3, 0, 3], **divided)
    found = names.entry(entry("model.layers.1.mlp.experts.w2_weight", 3, 32, 4))
    assert found is not None
    assert [(part.name.split(".")[5], part.offset) for part in found.parts] == [
        ("3", (0, 4)),
        ("0", (0, 4)),
        ("3", (0, 4)),
    ]


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ({}, {"tp_size": 3}, "num_attention_heads of 4 can't be divided equally among 3 ranks"),
        ({"num_attention_heads": 8, "num_key_value_heads": 3}, {"tp_size": 2}, "num_key_value_heads of 3 can't be"),
        (
            {"num_attention_heads": 8, "num_key_value_heads": 3},
            {"tp_size": 4},
            "heads can't be divided equally among 4",
        ),
        ({"intermediate_size": 47}, {"tp_size": 2}, "intermediate_size of 47 can't be divided"),
        ({}, {"tp_rank": 2, "tp_size": 2}, "tp_rank is 2 of 2"),
        ({}, {"layers": range(1, 3)}, r"layers are range\(1, 3\); they follow one another, from 0 to 1"),
        ({}, {"layers": range(0, 2, 2)}, "they follow one another"),
        ({}, {"engine": "sglang"}, "engine is 'sglang'; possible are 'vllm' and 'hf'"),
    ],
)
def test_what_does_not_go_together_is_refused(change: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        mapping.llama({**SMALL, **change}, **options)


def test_unknown_options_and_families_are_named() -> None:
    with pytest.raises(TypeError, match="there is no option 'tp'; possible are tp_rank, tp_size"):
        mapping.llama(SMALL, tp=2)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="models of type 'gpt2'; there are those for deepseek_v2, "):
        mapping.for_model(SimpleNamespace(model_type="gpt2"))
    with pytest.raises(ValueError, match="models of type None"):
        mapping.for_model({})
