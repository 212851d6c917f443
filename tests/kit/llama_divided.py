"""What a tensor-parallel rank of the small Llama holds of the trainer's whole tensors, by numpy alone."""

from typing import Any

import numpy as np
import torch
from tests.kit.llama import HEAD_DIM, HEADS, INTERMEDIATE, KV_HEADS, LAYERS, VOCABULARY

Array = np.ndarray[Any, Any]


def bits(tensor: torch.Tensor) -> Array:
    """Return the elements as whole numbers, which have no rounding and no NaN."""
    size = {2: torch.int16, 4: torch.int32}[tensor.itemsize]
    return tensor.contiguous().view(size).numpy()


def divided(whole: dict[str, Array], rank: int, ranks: int) -> dict[str, Array]:
    """Return what a rank of the engine must hold, by numpy alone."""

    def rows(name: str, count: int) -> Array:
        each = count // ranks
        return whole[name][rank * each : (rank + 1) * each]

    def columns(name: str, count: int) -> Array:
        each = count // ranks
        return whole[name][:, rank * each : (rank + 1) * each]

    each = -(-VOCABULARY // ranks)
    expected = {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        padded = np.zeros((ranks * each, whole[name].shape[1]), whole[name].dtype)
        padded[:VOCABULARY] = whole[name]
        expected[name] = padded[rank * each : (rank + 1) * each]
    for number in range(LAYERS):
        at = f"model.layers.{number}"
        for kind in ("weight", "bias"):
            heads = {"q_proj": HEADS, "k_proj": KV_HEADS, "v_proj": KV_HEADS}
            qkv = [rows(f"{at}.self_attn.{name}.{kind}", count * HEAD_DIM) for name, count in heads.items()]
            expected[f"{at}.self_attn.qkv_proj.{kind}"] = np.concatenate(qkv)
        gate_up = [rows(f"{at}.mlp.{name}.weight", INTERMEDIATE) for name in ("gate_proj", "up_proj")]
        expected[f"{at}.mlp.gate_up_proj.weight"] = np.concatenate(gate_up)
        expected[f"{at}.self_attn.o_proj.weight"] = columns(f"{at}.self_attn.o_proj.weight", HEADS * HEAD_DIM)
        expected[f"{at}.mlp.down_proj.weight"] = columns(f"{at}.mlp.down_proj.weight", INTERMEDIATE)
    return {**{name: array for name, array in whole.items() if "norm" in name}, **expected}
