"""A mixture of experts of 10^12 parameters, cut as trainers and engines cut it: layouts for `planning`.

61 layers as DeepSeek-V3 has them, one dense and 60 of 256 experts, in Hugging Face's names; an expert's middle is 3072
wide instead of 2048, which makes 10^12 parameters of it.
"""

from collections.abc import Iterator
from typing import Final

from tensorhub_common.layout.layout import Layout, TensorEntry, layout_of
from tensorhub_common.layout.parts import Shape

LAYERS: Final = 61
EXPERTS: Final = 256
HIDDEN: Final = 7168
EXPERT: Final = 3072
DENSE: Final = 18432
HEADS: Final = 128
VOCABULARY: Final = 129_280
Q_LORA, KV_LORA, ROPE, NOPE, VALUE = 1536, 512, 64, 128, 128

ROWS, COLUMNS, WHOLE = "rows", "columns", "whole"
"""How tensor parallelism cuts a tensor."""


def attention(layer: int) -> Iterator[tuple[str, Shape, str]]:
    """Yield name, shape and cut of a layer's tensors beside its MLP."""
    at = f"model.layers.{layer}"
    yield f"{at}.self_attn.q_a_proj.weight", (Q_LORA, HIDDEN), WHOLE
    yield f"{at}.self_attn.q_a_layernorm.weight", (Q_LORA,), WHOLE
    yield f"{at}.self_attn.q_b_proj.weight", (HEADS * (NOPE + ROPE), Q_LORA), ROWS
    yield f"{at}.self_attn.kv_a_proj_with_mqa.weight", (KV_LORA + ROPE, HIDDEN), WHOLE
    yield f"{at}.self_attn.kv_a_layernorm.weight", (KV_LORA,), WHOLE
    yield f"{at}.self_attn.kv_b_proj.weight", (HEADS * (NOPE + VALUE), KV_LORA), ROWS
    yield f"{at}.self_attn.o_proj.weight", (HIDDEN, HEADS * VALUE), COLUMNS
    yield f"{at}.input_layernorm.weight", (HIDDEN,), WHOLE
    yield f"{at}.post_attention_layernorm.weight", (HIDDEN,), WHOLE


def mlp(at: str, width: int) -> Iterator[tuple[str, Shape, str]]:
    """Yield name, shape and cut of a gated MLP's three tensors."""
    yield f"{at}.gate_proj.weight", (width, HIDDEN), ROWS
    yield f"{at}.up_proj.weight", (width, HIDDEN), ROWS
    yield f"{at}.down_proj.weight", (HIDDEN, width), COLUMNS


def shared(layer: int) -> Iterator[tuple[str, Shape, str]]:
    """Yield what of a layer is not an expert's."""
    yield from attention(layer)
    at = f"model.layers.{layer}.mlp"
    if layer == 0:
        yield from mlp(at, DENSE)
        return
    yield f"{at}.gate.weight", (EXPERTS, HIDDEN), WHOLE
    yield f"{at}.gate.e_score_correction_bias", (EXPERTS,), WHOLE
    yield from mlp(f"{at}.shared_experts", EXPERT)


def edges() -> Iterator[tuple[str, Shape, str]]:
    """Yield what stands before and behind the layers."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN), ROWS
    yield "model.norm.weight", (HIDDEN,), WHOLE
    yield "lm_head.weight", (VOCABULARY, HIDDEN), ROWS


def box(name: str, shape: Shape, dim: int, part: int, parts: int) -> TensorEntry:
    """Return part number `part` of a tensor that is cut along a dimension into so many."""
    step = -(-shape[dim] // parts)
    begin, end = min(shape[dim], part * step), min(shape[dim], (part + 1) * step)
    local = (*shape[:dim], end - begin, *shape[dim + 1 :])
    return TensorEntry(name, "bfloat16", 2, local, shape, (*(0,) * dim, begin, *(0,) * (len(shape) - dim - 1)))


def cut(name: str, shape: Shape, how: str, rank: int, ranks: int) -> TensorEntry:
    """Return a rank's part of a tensor by tensor parallelism."""
    if how == WHOLE:
        return box(name, shape, 0, 0, 1)
    return box(name, shape, 0 if how == ROWS else 1, rank, ranks)


def expert_names(layer: int, expert: int) -> Iterator[tuple[str, Shape, str]]:
    """Yield one expert's tensors."""
    yield from mlp(f"model.layers.{layer}.mlp.experts.{expert}", EXPERT)


def stack(name: str, shape: Shape) -> tuple[str, Shape]:
    """Return name and shape of the tensor in which this tensor of all experts is stacked."""
    return name.replace(".0.", ".stack."), (EXPERTS, *shape)


def by_stages(pipeline: int, experts: int, tensor: int, *, stacked: bool = False) -> list[Layout]:
    """Cut by layers (PP), experts (EP) and, what is not an expert's, by rows and columns (TP), as Megatron does.

    There are `pipeline * experts` ranks; those of a stage hold the rest `experts / tensor` times. `stacked`: a rank's
    experts of a layer are one tensor.
    """
    ranks = [(stage, rank) for stage in range(pipeline) for rank in range(experts)]
    return [_stage(stage, pipeline, rank, experts, tensor, stacked=stacked) for stage, rank in ranks]


def _stage(stage: int, stages: int, rank: int, ranks: int, tensor: int, *, stacked: bool) -> Layout:
    entries = []
    for layer in range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages):
        entries += [cut(*each, rank % tensor, tensor) for each in shared(layer)]
        if layer and stacked:
            entries += [box(*stack(name, shape), 0, rank, ranks) for name, shape, _ in expert_names(layer, 0)]
        elif layer:
            mine = range(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
            per = max(1, ranks // EXPERTS)
            owned = mine or range(rank // per, rank // per + 1)
            entries += [cut(*each, rank % per, per) for expert in owned for each in expert_names(layer, expert)]
    first, last = stage == 0, stage == stages - 1
    for name, shape, how in edges():
        if (first and "embed" in name) or (last and "embed" not in name):
            entries.append(cut(name, shape, how, rank % tensor, tensor))
    return layout_of(entries)


def fully_sharded(ranks: int, *, stacked: bool) -> list[Layout]:
    """Cut every tensor by rows over all ranks, as FSDP2 does; `stacked`: the experts of a layer are one tensor."""
    return [layout_of(_rows(rank, ranks, stacked=stacked)) for rank in range(ranks)]


def _rows(rank: int, ranks: int, *, stacked: bool) -> Iterator[TensorEntry]:
    for layer in range(LAYERS):
        for name, shape, _ in shared(layer):
            yield box(name, shape, 0, rank, ranks)
        if not layer:
            continue
        for expert in range(1 if stacked else EXPERTS):
            for name, shape, _ in expert_names(layer, expert):
                yield box(*(stack(name, shape) if stacked else (name, shape)), 0, rank, ranks)
    for name, shape, _ in edges():
        yield box(name, shape, 0, rank, ranks)
