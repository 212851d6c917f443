"""Ready mappings against transformers' own models, element by element; and what docs/reference/layouts.md says."""

import re
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
from tensorhub.mapping.families import FAMILIES, Options
from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import TensorEntry, layout_of, segment_bytes

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "layouts.md").read_text()

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


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_has_the_names_and_values_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    model: Any = made(name)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    described = describe(model, mapping.for_model(tmp_path, "hf"))
    standing = bind(described, bytearray(segment_bytes(described.layout)))
    wholes = {key: torch.full_like(tensor, torch.nan) for key, tensor in saved.items()}
    for entry in described.layout.tensors:
        if not entry.parts:
            assert (entry.shape, entry.offset) == (entry.global_shape, (0,) * len(entry.shape))
            wholes[entry.name] = standing[entry.name]
        for part in entry.parts:
            if not part.is_padding:
                here = tuple(slice(at, at + size) for at, size in zip(part.offset, part.extent, strict=True))
                wholes[part.name][here] = box_of(part, standing[entry.name]).reshape(part.extent)
    assert wholes.keys() == saved.keys()
    for key, tensor in saved.items():
        assert torch.equal(wholes[key], tensor), key
    # Tables of positions are each side's own: the module keeps them, where they were.
    assert not [key for key in standing if "rotary" in key]
    assert model.model.rotary_emb.inv_freq.isfinite().all()


def entry(name: str, *shape: int) -> TensorEntry:
    return TensorEntry(name, "float32", 4, shape, shape, (0,) * len(shape))


def parts(names: mapping.Mapping, name: str, *shape: int) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    found = names.entry(entry(name, *shape))
    assert found is not None
    return [(part.name, part.offset, part.shape) for part in found.parts]


def test_a_tied_head_is_the_embedding_and_the_configuration_may_be_the_models_own_object() -> None:
    config = made("qwen3_moe").config
    assert mapping.for_model(config).rules == mapping.qwen3_moe(vars(config) | {"num_experts": 4}).rules
    assert mapping.for_model(config).title == "qwen3_moe for vllm, one rank"
    tied = mapping.llama({**SMALL, "tie_word_embeddings": True}, tp_rank=1, tp_size=2)
    of_embedding = ("model.embed_tokens.weight", (64, 0), (36, 32))
    assert parts(tied, "lm_head.weight", 64, 32) == [("", (), (28, 32)), of_embedding]


def test_vllms_own_tables_are_left_out() -> None:
    names = mapping.qwen3_moe({**MOE, "num_experts": 4})
    for name in ("rotary_emb.cos_sin_cache", "attn._k_scale"):
        assert names.entry(entry(f"model.layers.0.self_attn.{name}", 4)) is None
    for name in ("_expert_map", "routed_experts.expert_map"):
        assert names.entry(entry(f"model.layers.0.mlp.experts.{name}", 4)) is None


def test_options_about_experts() -> None:
    """The router's correction may stand with them; shared ones may be whole on each rank; others placed by hand."""
    latent = mapping.deepseek_v3({**LATENT, "q_lora_rank": 12})
    for place in ("experts", "experts.routed_experts"):
        ((name, *_),) = parts(latent, f"model.layers.1.mlp.{place}.e_score_correction_bias", 4)
        assert name == "model.layers.1.mlp.gate.e_score_correction_bias"
    shared = "model.layers.1.mlp.shared_experts.gate_up_proj.weight"
    whole = mapping.deepseek_v3(LATENT, tp_rank=1, tp_size=2, shared_experts_divided=False)
    assert [offset for _, offset, _ in parts(whole, shared, 64, 32)] == [(0, 0), (0, 0)]
    with pytest.raises(LayoutMismatch, match=r"has 64 elements in dimension 0, and should have 16 \+ 16"):
        parts(mapping.deepseek_v3(LATENT, tp_rank=1, tp_size=2), shared, 64, 32)
    divided: Any = {"expert_tp_rank": 1, "expert_tp_size": 4}
    by_hand = mapping.qwen3_moe({**MOE, "num_experts": 4}, local_experts=[3, 0, 3], **divided)
    found = parts(by_hand, "model.layers.1.mlp.experts.w2_weight", 3, 32, 4)
    assert [(name.split(".")[5], offset) for name, offset, _ in found] == [(n, (0, 4)) for n in ("3", "0", "3")]


def test_a_stage_refuses_layers_of_another_may_count_from_zero_and_may_have_none() -> None:
    """Only the embedding, or only the head; an empty range is not none at all."""
    config = {**SMALL, "num_hidden_layers": 5}
    norm = "model.layers.{}.input_layernorm.weight"
    last = mapping.llama(config, pp_rank=1, pp_size=2)
    assert last.entry(entry(norm.format(4), 32)) == entry(norm.format(4), 32)
    counted = mapping.llama(config, "hf", layers=range(2, 5), layers_from_zero=True)
    assert parts(counted, norm.format(0), 32)[0][0] == norm.format(2)
    none = mapping.llama(config, layers=range(0))
    assert none.entry(entry("model.norm.weight", 32)) is not None
    for names, layer, said in ((last, 2, "layer 2.* 3 to 4"), (counted, 3, "layer 5.* 2 to 4"), (none, 0, "has none")):
        with pytest.raises(LayoutMismatch, match=said):
            names.entry(entry(norm.format(layer), 32))


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


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ({}, {"tp_size": 3}, "num_attention_heads of 4 can't be divided equally among 3 ranks"),
        ({"num_attention_heads": 8, "num_key_value_heads": 3}, {"tp_size": 2}, "num_key_value_heads of 3 can't be"),
        ({"num_attention_heads": 8, "num_key_value_heads": 3}, {"tp_size": 4}, "heads can't be divided equally among"),
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


def test_the_example_of_a_mapping_of_ones_own() -> None:
    [code] = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "Mapping(" in block]
    known: dict[str, Any] = {"tp_rank": 1, "tp_size": 4, "my_experts": (3, 5)}
    exec(compile(code, "docs/reference/layouts.md", "exec"), known)  # noqa: S102 (our own page)
    names: mapping.Mapping = known["names"]
    given = [
        entry("blocks.2.attn.qkv.weight", 3072, 8),
        entry("blocks.2.attn.qkv.bias", 3072),
        entry("blocks.2.mlp.out.weight", 8, 2752),
        entry("blocks.2.experts", 2, 24, 8),
        *(entry(name, 8) for name in ("blocks.2.norm.weight", "model.norm.weight", "blocks.2.cache")),
    ]
    found = [names.entry(each) for each in given]
    assert found[-1] is None
    layout = layout_of(each for each in found if each is not None)
    of = {part.name.removeprefix("model.layers.18."): part for each in layout.tensors for part in each.parts}
    assert of["self_attn.k_proj.weight"].offset == (1024, 0)
    assert of["mlp.down_proj.weight"].offset == (0, 2752)
    assert of["mlp.experts.5.up_proj.weight"].start == (1, 0, 0)
    assert of["input_layernorm.weight"].shape == (8,)
    assert [each.name for each in layout.tensors if not each.parts] == ["model.norm.weight"]


def test_every_family_and_option_is_told() -> None:
    for family, function in FAMILIES.items():
        assert f"`{family}`" in PAGE
        assert f"`mapping.{function.__name__}`" in PAGE
    for option in Options.__annotations__:
        assert f"`{option}`" in PAGE
