"""What the shards of a replica consist of, told as whole tensors in the model's own names."""

import pytest
import torch
from tests.unit.client.test_mapping_families import SMALL

from tensorhub import mapping
from tensorhub._tensors.description import describe
from tensorhub.specs import TensorSpec, whole_tensors

LLAMA = {"model_type": "llama", **SMALL, "num_key_value_heads": 2}
Q, KV, HIDDEN = 32, 16, 32


def test_boxes_of_a_tensor_are_told_as_the_whole_of_it() -> None:
    halves = [
        describe({"w": TensorSpec((4, 8), "float32", (8, 8), (4 * rank, 0)), "b": TensorSpec((8,), "bfloat16")}).layout
        for rank in range(2)
    ]
    assert whole_tensors(halves) == {"w": TensorSpec((8, 8), "float32"), "b": TensorSpec((8,), "bfloat16")}


@pytest.mark.parametrize("ranks", [1, 2])
def test_parts_of_fused_tensors_are_told_under_the_models_own_names(ranks: int) -> None:
    layouts = []
    for rank in range(ranks):
        names = mapping.for_model(LLAMA, "vllm", tp_rank=rank, tp_size=ranks)
        fused = {"model.layers.0.self_attn.qkv_proj.weight": torch.zeros((Q + 2 * KV) // ranks, HIDDEN)}
        layouts.append(describe(fused, names).layout)
    at = "model.layers.0.self_attn"
    assert whole_tensors(layouts) == {
        f"{at}.{name}_proj.weight": TensorSpec((rows, HIDDEN), "float32")
        for name, rows in (("q", Q), ("k", KV), ("v", KV))
    }


def test_what_was_computed_of_a_tensor_and_padding_are_no_tensors() -> None:
    names = mapping.for_model(LLAMA, "vllm", quantise=mapping.fp8("fp8-block-128"))
    at = "model.layers.0.mlp.down_proj"
    tensors = {
        f"{at}.weight": TensorSpec((32, 48), "float8_e4m3fn"),
        f"{at}.weight_scale_inv": TensorSpec((1, 1), "float32"),
        "model.norm.weight": TensorSpec((32,), "float32"),
        "model.embed_tokens.weight": TensorSpec((128, 32), "float32"),
    }
    found = whole_tensors([describe(tensors, names).layout])
    assert found == {
        "model.norm.weight": TensorSpec((32,), "float32"),
        "model.embed_tokens.weight": TensorSpec((100, 32), "float32"),
    }
