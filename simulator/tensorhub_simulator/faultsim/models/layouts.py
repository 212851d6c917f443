"""Layouts of a simulated world, and the bytes that numpy computes for them.

A world's shards have real layouts of a few bytes. A publisher writes random values into its shards. The same version in
another layout follows from those values, tensor by tensor, by slices. Numpy does this, and no production code is asked.

`quantised_cuttings` draws worlds in which rollouts read fp8 of what trainers publish, from shards that cut through
blocks. The matrices have few bytes, so a block of 128 × 128 is all of a matrix, or nearly all of it. A matrix has
several rows that are blocks of their own. The fp8 values and scales come from the agent's `quantise`.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from random import Random
from typing import Final

import numpy as np

from tensorhub_agent.casting.fp8 import quantise
from tensorhub_common.layout.layout import (
    Layout,
    TensorEntry,
    layout_of,
    placements,
    segment_bytes,
)
from tensorhub_common.layout.parts import Part, Shape
from tensorhub_common.layout.quantized import DERIVED, QuantizedKind, quantized_kind
from tensorhub_simulator.faultsim.config import Cutting, Cuttings

Values = Mapping[str, np.ndarray]
"""Global tensors by name: bytes, of one dimension more than the tensor."""

FP8_SOURCE_OF: Final = {2: "bfloat16", 4: "float32"}
"""What a tensor of elements of this many bytes is here, where something is computed of it."""

SHARDS_MAX: Final = 3
TENSORS_MAX: Final = 4
ALIKE: Final = 0.5
"""This many rollouts are cut as a trainer is, or as a rollout before them."""


def equal_cutting(shards: int, sizes: Iterable[int]) -> Cutting:
    """Return shards of which each has tensors of its own."""
    every = tuple(sizes)
    return tuple(layout_of(_whole(f"{n}.{i:02}", (size,)) for i, size in enumerate(every)) for n in range(shards))


def _whole(name: str, shape: tuple[int, ...]) -> TensorEntry:
    return TensorEntry(name, "uint8", 1, shape, shape, (0,) * len(shape))


def unlike_cuttings(rng: Random, trainers: int, rollouts: int) -> Cuttings:
    """Draw a few matrices, and cut them by rows for one replica, by columns for another, or not at all."""
    shapes = {f"m{n}": (rng.randint(1, 6), rng.randint(1, 6)) for n in range(rng.randint(1, TENSORS_MAX))}
    publish = tuple(_cut(rng, shapes, by_owner=True) for _ in range(trainers))
    read: list[Cutting] = []
    for _ in range(rollouts):
        alike = rng.random() < ALIKE
        read.append(rng.choice([*publish, *read]) if alike else _cut(rng, shapes, by_owner=False))
    return Cuttings(publish, tuple(read))


def _cut(rng: Random, shapes: Mapping[str, tuple[int, int]], *, by_owner: bool) -> Cutting:
    """Cut each matrix by rows, columns or whole tensors; who owns nothing twice may publish."""
    shards, dim = rng.randint(1, SHARDS_MAX), rng.choice((0, 1, 2))
    entries: list[list[TensorEntry]] = [[] for _ in range(shards)]
    for number, (name, shape) in enumerate(shapes.items()):
        if dim == len(shape):
            owners = range(shards) if not by_owner and rng.random() < 0.3 else (number % shards,)  # noqa: PLR2004 (odds)
            for owner in owners:
                entries[owner].append(_whole(name, shape))
            continue
        inner = sorted(rng.randint(0, shape[dim]) for _ in range(shards - 1))
        for shard, (begin, end) in enumerate(pairwise([0, *inner, shape[dim]])):
            box = [(0, shape[0]), (0, shape[1])]
            box[dim] = (begin, end)
            if end > begin:
                lengths = tuple(stop - start for start, stop in box)
                entries[shard].append(TensorEntry(name, "uint8", 1, lengths, shape, tuple(start for start, _ in box)))
    return tuple(layout_of(each) for each in entries)


def values_of(shards: Iterable[tuple[Layout, bytes]]) -> Values:
    """Return the tensors that shards hold together."""
    found: dict[str, np.ndarray] = {}
    for layout, data in shards:
        for part, itemsize, local in _parts(layout, np.frombuffer(data, np.uint8).copy()):
            whole = found.setdefault(part.name, np.zeros((*part.global_shape, itemsize), np.uint8))
            whole[_box(part.offset, part.extent)] = local.reshape(*part.extent, itemsize)
    return found


def bytes_of(layout: Layout, values: Values) -> bytes | None:
    """Return what a shard of this layout holds of them; None where they lack something."""
    segment = np.zeros(segment_bytes(layout), np.uint8)
    computed: dict[tuple[str, str], np.ndarray] = {}
    for part, _, local in _parts(layout, segment):
        whole = values.get(part.name)
        if whole is None or whole.shape[:-1] != part.global_shape:
            return None
        if part.cast:
            key = part.name, part.cast
            whole = computed[key] = computed[key] if key in computed else _quantised(whole, part.cast)
        local[...] = whole[_box(part.offset, part.extent)].reshape(local.shape)
    return segment.tobytes()


def _quantised(whole: np.ndarray, cast: str) -> np.ndarray:
    """Return fp8 values or scales of a whole tensor, as bytes of one dimension more."""
    kind, itemsize = quantized_kind(cast), whole.shape[-1]
    bits = np.ascontiguousarray(whole).view(np.dtype(f"u{itemsize}"))[..., 0]
    made, scales = np.zeros(bits.shape, np.uint8), np.zeros(kind.scheme.scales_shape(bits.shape), np.float32)
    quantise(bits, FP8_SOURCE_OF[itemsize], kind.scheme, made, scales)
    found = scales if kind.is_scales else made
    return found.view(np.uint8).reshape(*found.shape, kind.itemsize)


def _parts(layout: Layout, segment: np.ndarray) -> Iterable[tuple[Part, int, np.ndarray]]:
    """Yield each named box of a segment, as a view of it."""
    for entry, at in zip(layout.tensors, placements(layout), strict=True):
        tensor = segment[at : at + entry.nbytes].reshape(*entry.shape, entry.itemsize)
        whole = Part(entry.name, entry.global_shape, entry.offset, entry.shape, (0,) * len(entry.shape), entry.shape)
        for part in entry.parts or (whole,):
            if part.name and 0 not in part.shape:
                yield part, entry.itemsize, tensor[_box(part.start, part.shape)]


def _box(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


SCHEMES: Final = ("fp8-block-128", "fp8-block-128-nemo", "fp8-channel", "fp8-tensor")
QUANTISED_ALIKE: Final = 0.6
"""This many rollouts are cut as the one before them."""


def _edges(rng: Random, size: int, shards: int) -> list[tuple[int, int]]:
    """Cut a dimension anywhere; some parts may be empty."""
    return list(pairwise([0, *sorted(rng.randint(0, size) for _ in range(shards - 1)), size]))


def _trainer(rng: Random, shapes: Mapping[str, Shape], itemsize: int) -> Cutting:
    """Return shards by rows or columns, of any edges."""
    shards = rng.randint(2, 3)
    entries: list[list[TensorEntry]] = [[] for _ in range(shards)]
    for name, shape in shapes.items():
        dim = rng.choice((0, 1))
        for shard, (begin, end) in enumerate(_edges(rng, shape[dim], shards)):
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


def _boxes(rng: Random, name: str, kind: QuantizedKind, shape: Shape, shards: int) -> list[TensorEntry | None]:
    whole, dim = kind.shape(shape), rng.choice((0, 1))
    found: list[TensorEntry | None] = []
    for begin, end in _edges(rng, whole[dim], shards):
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
        alike = read and rng.random() < QUANTISED_ALIKE
        read.append(read[-1] if alike else _rollout(rng, shapes, rng.choice(SCHEMES)))
    return Cuttings(published, tuple(read))
