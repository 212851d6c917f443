"""Worlds in which rollouts read fp8 of what trainers publish, out of shards that cut through blocks.

Matrices are of few bytes, so a block of 128 × 128 is all of one, or nearly; rows that are blocks of their own there are
several of.
"""

from collections.abc import Mapping
from itertools import pairwise
from random import Random
from typing import Final

from tensorhub_common.layout.layout import TensorEntry, layout_of
from tensorhub_common.layout.parts import Part, Shape
from tensorhub_common.layout.quantized import DERIVED, Derived
from tensorhub_simulator.faultsim.models.layouts import FP8_SOURCE_OF, Cutting, Cuttings

SCHEMES: Final = ("fp8-block-128", "fp8-block-128-nemo", "fp8-channel", "fp8-tensor")
ALIKE: Final = 0.6
"""So many rollouts are cut as the one before them."""


def _cut(rng: Random, size: int, shards: int) -> list[tuple[int, int]]:
    """Cut a dimension anywhere; some parts may be empty."""
    return list(pairwise([0, *sorted(rng.randint(0, size) for _ in range(shards - 1)), size]))


def _trainer(rng: Random, shapes: Mapping[str, Shape], itemsize: int) -> Cutting:
    """Return shards by rows or columns, of any edges."""
    shards = rng.randint(2, 3)
    entries: list[list[TensorEntry]] = [[] for _ in range(shards)]
    for name, shape in shapes.items():
        dim = rng.choice((0, 1))
        for shard, (begin, end) in enumerate(_cut(rng, shape[dim], shards)):
            box = [(0, shape[0]), (0, shape[1])]
            box[dim] = (begin, end)
            if end > begin:
                own = tuple(b - a for a, b in box)
                start = tuple(a for a, _ in box)
                entries[shard].append(TensorEntry(name, FP8_SOURCE_OF[itemsize], itemsize, own, shape, start))
    return tuple(layout_of(each) for each in entries)


def _rollout(rng: Random, shapes: Mapping[str, Shape], scheme: str) -> Cutting:
    """Return one shard or two, with a box of values and of scales of each tensor."""
    shards = rng.choice((1, 2))
    entries: list[list[TensorEntry]] = [[] for _ in range(shards)]
    for name, shape in shapes.items():
        for kind in (DERIVED[f"{scheme}:values"], DERIVED[f"{scheme}:scales"]):
            for shard, entry in enumerate(_boxes(rng, name, kind, shape, shards)):
                if entry is not None:
                    entries[shard].append(entry)
    return tuple(layout_of(each) for each in entries)


def _boxes(rng: Random, name: str, kind: Derived, shape: Shape, shards: int) -> list[TensorEntry | None]:
    whole, dim = kind.shape(shape), rng.choice((0, 1))
    found: list[TensorEntry | None] = []
    for begin, end in _cut(rng, whole[dim], shards):
        start, stop = [0, 0], list(whole)
        start[dim], stop[dim] = begin, end
        extent = tuple(b - a for a, b in zip(start, stop, strict=True))
        part = Part(name, shape, tuple(start), extent, (0, 0), extent, kind.name)
        own = f"{name}.{kind.name}"
        made = TensorEntry(own, kind.dtype, kind.itemsize, extent, extent, (0, 0), (part,))
        found.append(made if end > begin else None)
    return found


def quantised_cuttings(rng: Random, trainers: int, rollouts: int) -> Cuttings:
    """Draw trainers whose shards cut through blocks, and rollouts in fp8, of one scheme or several."""
    shapes = {f"w{n}": (rng.choice((2, 5, 130)), rng.choice((1, 3, 4))) for n in range(rng.randint(1, 2))}
    itemsize = rng.choice((2, 4))
    published = tuple(_trainer(rng, shapes, itemsize) for _ in range(trainers))
    read: list[Cutting] = []
    for _ in range(rollouts):
        alike = read and rng.random() < ALIKE
        read.append(read[-1] if alike else _rollout(rng, shapes, rng.choice(SCHEMES)))
    return Cuttings(published, tuple(read))
