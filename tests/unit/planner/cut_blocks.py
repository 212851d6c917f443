"""A matrix of 400 × 200, published by rows that are cut anywhere, and a reader of its fp8 values and scales."""

from itertools import pairwise

from tensorhub_common.layout.layout import Layout, TensorEntry, layout_digest, layout_of
from tensorhub_common.layout.parts import Part
from tensorhub_common.layout.quantized import DERIVED

SHAPE = (400, 200)
"""4 × 2 blocks."""


def sources(*edges: int) -> dict[str, Layout]:
    """Return the layouts of shards of rows that end there."""
    layouts = (
        layout_of([TensorEntry("w", "bfloat16", 2, (b - a, SHAPE[1]), SHAPE, (a, 0))])
        for a, b in pairwise([0, *edges, SHAPE[0]])
    )
    return {layout_digest(each): each for each in layouts}


def reader(name: str = "fp8", scheme: str = "fp8-block-128") -> Layout:
    """Return the layout of all values and all scales; by its names it may be another one than another reader's."""
    entries = []
    for kind in (DERIVED[f"{scheme}:values"], DERIVED[f"{scheme}:scales"]):
        whole = kind.shape(SHAPE)
        part = Part("w", SHAPE, (0, 0), whole, (0, 0), whole, kind.name)
        entries.append(TensorEntry(f"{name}.{kind.name}", kind.dtype, kind.itemsize, whole, whole, (0, 0), (part,)))
    return layout_of(entries)
