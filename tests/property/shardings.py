"""Random models, cut in every way that trainers and engines cut them, and numpy's answer to what stands where."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from tensorhub_common.layout.layout import Layout, TensorEntry, layout_of, placements, segment_bytes
from tensorhub_common.layout.parts import Part, Shape
from tensorhub_common.programs.regions import StridedCopies

DTYPES = {"uint8": 1, "bfloat16": 2, "float32": 4, "complex128": 16}


@dataclass(frozen=True)
class Tensor:
    """A global tensor and its elements, each of `itemsize` bytes: a byte array of one dimension more."""

    name: str
    dtype: str
    values: np.ndarray

    @property
    def shape(self) -> Shape:
        return self.values.shape[:-1]

    def entry(self, start: Shape, stop: Shape) -> TensorEntry:
        shape = tuple(b - a for a, b in zip(start, stop, strict=True))
        return TensorEntry(self.name, self.dtype, DTYPES[self.dtype], shape, self.shape, start)


Model = tuple[Tensor, ...]
Cutting = tuple[Layout, ...]
"""One layout for each shard of a replica."""


@st.composite
def models(draw: st.DrawFn, tensors_max: int = 4, size_max: int = 9) -> Model:
    """Draw a few tensors of up to three dimensions, scalars and empty ones among them."""
    count = draw(st.integers(1, tensors_max))
    seed = draw(st.integers(0, 2**32 - 1))
    chance = np.random.default_rng(seed)
    tensors = []
    for number in range(count):
        shape = tuple(draw(st.lists(st.integers(0 if draw(st.integers(0, 9)) == 0 else 1, size_max), max_size=3)))
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        values = chance.integers(0, 256, (*shape, DTYPES[dtype]), dtype=np.uint8)
        tensors.append(Tensor(f"layer.{number}.weight", dtype, values))
    return tuple(tensors)


@st.composite
def cuttings(draw: st.DrawFn, model: Model, shards_max: int = 4, *, overlap: bool = True) -> Cutting:
    """Cut a model into shards: FSDP, TP by rows or columns, a mesh of both, PP, EP, replicated, uneven, mixed.

    Without `overlap` every element stands in one shard alone.
    """
    shards = draw(st.integers(1, shards_max))
    entries: list[list[TensorEntry]] = [[] for _ in range(shards)]
    for tensor in model:
        how = draw(st.sampled_from([*(["replicated"] if overlap else []), "owned", "along", "uneven", "mesh"]))
        if how == "owned" or not tensor.shape:
            # By layers or by experts: one shard has it, or, of a scalar, perhaps all.
            owners = range(shards) if how == "replicated" else [draw(st.integers(0, shards - 1))]
            for shard in owners:
                entries[shard].append(tensor.entry((0,) * len(tensor.shape), tensor.shape))
            continue
        boxes = _boxes(draw, tensor.shape, shards, how)
        for shard, (start, stop) in enumerate(boxes):
            if draw(st.booleans()) or 0 not in (b - a for a, b in zip(start, stop, strict=True)):
                entries[shard].append(tensor.entry(start, stop))
    return tuple(layout_of(each) for each in entries)


def _boxes(draw: st.DrawFn, shape: Shape, shards: int, how: str) -> list[tuple[Shape, Shape]]:
    whole = [((0,) * len(shape), shape)] * shards
    if how == "replicated":
        return whole
    dim = draw(st.integers(0, len(shape) - 1))
    if how == "mesh" and shards % 2 == 0 and len(shape) > 1:
        other = (dim + 1) % len(shape)
        first, second = _edges(draw, shape[dim], shards // 2, uneven=False), _edges(draw, shape[other], 2, uneven=True)
        return [_box(shape, {dim: first[n // 2], other: second[n % 2]}) for n in range(shards)]
    edges = _edges(draw, shape[dim], shards, uneven=how == "uneven")
    return [_box(shape, {dim: each}) for each in edges]


def _edges(draw: st.DrawFn, size: int, parts: int, *, uneven: bool) -> list[tuple[int, int]]:
    if uneven:
        inner = sorted(draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1)))
    else:
        # As torch chunks: the last ones may be short, or empty.
        step = -(-size // parts)
        inner = [min(size, step * n) for n in range(1, parts)]
    return list(zip([0, *inner], [*inner, size], strict=True))


def _box(shape: Shape, cut: dict[int, tuple[int, int]]) -> tuple[Shape, Shape]:
    spans = [cut.get(dim, (0, size)) for dim, size in enumerate(shape)]
    return tuple(a for a, _ in spans), tuple(b for _, b in spans)


def fused(layout: Layout, chance: np.random.Generator) -> Layout:
    """Let tensors of one rank, dtype and inner shape stand fused along the first dimension, under a name of its own."""
    groups: dict[tuple[object, ...], list[TensorEntry]] = {}
    for entry in layout.tensors:
        key = (entry.dtype, entry.shape[1:]) if entry.shape else (entry.name,)
        groups.setdefault(key, []).append(entry)
    entries = []
    for number, group in enumerate(groups.values()):
        # An empty tensor is no part of another one.
        some = [entry for entry in group if entry.shape and 0 not in entry.shape]
        if len(some) < 2:
            entries += group
            continue
        entries += [entry for entry in group if 0 in entry.shape]
        order = [some[n] for n in chance.permutation(len(some))]
        rows, parts = 0, []
        for entry in order:
            start = (rows, *(0,) * (len(entry.shape) - 1))
            parts.append(Part(entry.name, entry.global_shape, entry.offset, entry.shape, start, entry.shape))
            rows += entry.shape[0]
        shape = (rows, *order[0].shape[1:])
        whole = (0,) * len(shape)
        entries.append(
            TensorEntry(f"fused.{number}", order[0].dtype, order[0].itemsize, shape, shape, whole, tuple(parts))
        )
    return layout_of(entries)


def memory(model: Model, layout: Layout) -> np.ndarray:
    """Return what a segment of this layout holds of the model, byte by byte; what is between tensors is zero."""
    known = {tensor.name: tensor for tensor in model}
    segment = np.zeros(segment_bytes(layout), np.uint8)
    for entry, at in zip(layout.tensors, placements(layout), strict=True):
        local = np.zeros((*entry.shape, entry.itemsize), np.uint8)
        whole = Part(entry.name, entry.global_shape, entry.offset, entry.shape, (0,) * len(entry.shape), entry.shape)
        for part in entry.parts or (whole,):
            box = tuple(slice(a, a + n) for a, n in zip(part.offset, part.extent, strict=True))
            here = tuple(slice(a, a + n) for a, n in zip(part.start, part.shape, strict=True))
            local[here] = known[part.name].values[box].reshape(*part.shape, entry.itemsize)
        segment[at : at + entry.nbytes] = local.reshape(-1)
    return segment


def carry_out(regions: StridedCopies, source: np.ndarray, destination: np.ndarray, written: np.ndarray) -> None:
    """Copy regions as a transport does, and count how often each byte of the destination was written."""
    for to, origin, form in zip(regions.to, regions.origin, regions.form, strict=True):
        assert to + form.span_bytes <= len(destination)
        assert origin + form.origin_span_bytes <= len(source)
        there = _view(source, origin, form.shape, form.origin_strides, form.itemsize)
        _view(destination, to, form.shape, form.to_strides, form.to_itemsize)[...] = there
        count = _view(written, to, form.shape, form.to_strides, form.to_itemsize)
        count += 1


def _view(data: np.ndarray, at: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> np.ndarray:
    assert math.prod(shape) > 0
    return np.lib.stride_tricks.as_strided(data[at:], (*shape, itemsize), (*strides, 1))
