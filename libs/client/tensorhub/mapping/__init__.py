"""Mappings: what fused, divided and stacked tensors of an engine or a trainer consist of, in the model's own names.

    from tensorhub import mapping
    hub.register("policy", model, replica="rollout-3", shard=rank, shards=2,
                 mapping=mapping.llama("path/to/model", "vllm", tp_rank=rank, tp_size=2))

There are ready ones for families of models, and a small language to build others from: a `Mapping` has `Rule`s, and a
rule says by a name's pattern what such a tensor consists of: `tensor`, `concat`, `Stack`, `Padding` or `LEFT_OUT`.
Nothing here imports torch.
"""

from tensorhub.mapping.cuts import Cut, Padded, chunk, share
from tensorhub.mapping.families import FAMILIES, deepseek_v3, for_model, llama, qwen2, qwen3, qwen3_moe
from tensorhub.mapping.fp8 import Fp8, fp8
from tensorhub.mapping.nodes import AS_IT_IS, Concat, Padding, Stack, Tensor, concat, tensor
from tensorhub.mapping.rules import LEFT_OUT, LeftOut, Mapping, Numbers, Rule

__all__ = [
    "AS_IT_IS",
    "FAMILIES",
    "LEFT_OUT",
    "Concat",
    "Cut",
    "Fp8",
    "LeftOut",
    "Mapping",
    "Numbers",
    "Padded",
    "Padding",
    "Rule",
    "Stack",
    "Tensor",
    "chunk",
    "concat",
    "deepseek_v3",
    "for_model",
    "fp8",
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "share",
    "tensor",
]
