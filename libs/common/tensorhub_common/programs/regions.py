"""Boxes that lie strided in a source segment and belong strided into a destination segment, in bytes. Pure.

What a transport has to know to bring boxes between unlike layouts, and nothing of tensors. Many boxes are alike but for
where they begin, so what they have in common is a `StridedForm`, kept once.

Invariants of a form: `shape`, `to_strides` and `origin_strides` are of one length, which may be 0 (one element); every
size is at least 1; strides are in bytes, and not negative. Elements of different index are in different bytes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

Sizes = tuple[int, ...]
Dim = tuple[int, int, int]
"""A dimension: how many elements, and how far they lie apart in the destination and in the source."""

DIMS_MAX: Final = 16
"""Limit of a box's dimensions once those are joined that can be; tensors have five or six."""


class Blocks(msgspec.Struct, frozen=True, array_like=True):
    """Of what a box is made whose elements depend on whole blocks: a box of the source that consists of such."""

    shape: Sizes
    """Its elements, in as many dimensions as the box has."""
    skip: Sizes
    """Where a box of values begins in it; of scales zeros."""


class StridedForm(msgspec.Struct, frozen=True, array_like=True):
    """The shape of a box in elements, and how far its elements lie apart at both ends."""

    shape: Sizes
    to_strides: Sizes
    origin_strides: Sizes
    itemsize: int
    """Bytes of an element in the source."""
    to_itemsize: int
    """Bytes of an element in the destination."""
    cast: str = ""
    """How an element is converted, as "float32>bfloat16"; empty: it is taken as it is."""
    blocks: Blocks | None = None
    """What it is made of where that is another box than `shape`; `origin_strides` are that one's."""

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def origin_shape(self) -> Sizes:
        """How many elements it is made of in each dimension."""
        return self.shape if self.blocks is None else self.blocks.shape

    @property
    def nbytes(self) -> int:
        """Bytes of its elements in the destination."""
        return self.elements * self.to_itemsize

    @property
    def origin_nbytes(self) -> int:
        """Bytes of its elements in the source."""
        return math.prod(self.origin_shape) * self.itemsize

    @property
    def is_packed_here(self) -> bool:
        """Whether its elements follow one another in the destination, in the order of their indices."""
        return _is_packed(self.shape, self.to_strides, self.to_itemsize)

    @property
    def is_packed_there(self) -> bool:
        """Whether its elements follow one another in the source, in the order of their indices."""
        return _is_packed(self.origin_shape, self.origin_strides, self.itemsize)

    @property
    def span_bytes(self) -> int:
        """From its first byte in the destination to behind its last one."""
        return _span(self.shape, self.to_strides, self.to_itemsize)

    @property
    def origin_span_bytes(self) -> int:
        """From its first byte in the source to behind its last one."""
        return _span(self.origin_shape, self.origin_strides, self.itemsize)


@dataclass(frozen=True, slots=True)
class StridedCopies:
    """Boxes by column: box i, of form `form[i]`, goes from byte `origin[i]` there to byte `to[i]` here."""

    to: Sequence[int]
    origin: Sequence[int]
    form: Sequence[StridedForm]
    amax: Sequence[bytes] = ()
    """Of box i what its source can't know, where it has only a part of its blocks: their largest magnitudes, as float32
    in the order of the blocks. Empty for all other boxes, and where there are no such boxes at all."""


def joined_dims(dims: Iterable[Dim]) -> list[Dim]:
    """Return dimensions with those joined that continue each other at both ends, and without those of one element."""
    found: list[Dim] = []
    for size, to, origin in dims:
        if size == 1:
            continue
        if found and found[-1][1] == size * to and found[-1][2] == size * origin:
            size *= found.pop()[0]  # noqa: PLW2901 (the two are one dimension)
        found.append((size, to, origin))
    return found


def _is_packed(shape: Sizes, strides: Sizes, itemsize: int) -> bool:
    expected = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _span(shape: Sizes, strides: Sizes, itemsize: int) -> int:
    return itemsize + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
