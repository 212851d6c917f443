"""What a registered tensor may be that is computed of a global one: fp8 values, or their scales. Pure.

A part of a tensor names it in `Part.cast`, as "fp8-block-128:values" or "fp8-block-128:scales"; `casts` has the
schemes. Values are counted like the elements of the global tensor, scales like its blocks.

Always true: whole blocks of the source, from its element 0 on, decide what a derived element is; so two readers have
the same whatever they were filled from, and a box is made of a box of whole blocks (`need`).
"""

from dataclasses import dataclass
from typing import Final

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.casts import FP8_DTYPE, FP8_SCHEMES, FP8_SOURCES, SCALE_DTYPE, Fp8Scheme, Span
from tensorhub_common.layout.parts import Part, Shape

BLOCK_BYTES_MAX: Final = 4 * 1024 * 1024
"""A block of the source is so long at most: it is looked at for each box that has some of it."""

LARGEST_SOURCE_ITEMSIZE: Final = 4
"""The size in bytes of the largest element that fp8 is made of."""


@dataclass(frozen=True, slots=True)
class QuantizedKind:
    """Values or scales by a scheme."""

    name: str
    scheme: Fp8Scheme
    is_scales: bool
    is_amax: bool = False
    """Instead of scales, what they are made of: the largest magnitude in each block, or in what is there of it."""

    @property
    def dtype(self) -> str:
        """Of its elements."""
        return SCALE_DTYPE if self.is_scales else FP8_DTYPE

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 4 if self.is_scales else 1

    def shape(self, source: Shape) -> Shape:
        """Return how many elements a global tensor of this shape gives, in each dimension."""
        return self.scheme.scales_shape(source) if self.is_scales else source

    def steps(self, source: Shape) -> Shape:
        """Return how many elements of the source one of these is made of, in each dimension."""
        return self.block(source) if self.is_scales else (1,) * len(source)

    def grain(self, source: Shape) -> Shape:
        """Return how many of these belong to one block, in each dimension."""
        return (1,) * len(source) if self.is_scales else self.block(source)

    def block(self, source: Shape) -> Shape:
        """Return the sizes of a block of a global tensor of this shape, one for each dimension."""
        return (1,) * (len(source) - 2) + self.scheme.steps(source)

    def need(self, start: Shape, stop: Shape, source: Shape) -> Span:
        """Return the box of the source that a box of these is made of."""
        return (self.scheme.scales_need if self.is_scales else self.scheme.values_need)(start, stop, source)

    def given(self, start: Shape, stop: Shape, source: Shape) -> Span:
        """Return the box of these whose blocks lie whole in a box of the source: empty where none does."""
        block = self.block(source)
        first = tuple(-(-a // step) for a, step in zip(start, block, strict=True))
        last = tuple(
            -(-b // step) if b == size else b // step for b, step, size in zip(stop, block, source, strict=True)
        )
        last = tuple(max(a, b) for a, b in zip(first, last, strict=True))
        return (first, last) if self.is_scales else self.scheme.scales_need(first, last, source)


DERIVED: Final[dict[str, QuantizedKind]] = {
    (name := f"{scheme.name}:{kind}"): QuantizedKind(name, scheme, kind == "scales")
    for scheme in FP8_SCHEMES.values()
    for kind in ("values", "scales")
}
"""All there are, by name."""

AMAX_KINDS: Final[dict[str, QuantizedKind]] = {
    (name := f"{scheme.name}:amax"): QuantizedKind(name, scheme, is_scales=True, is_amax=True)
    for scheme in FP8_SCHEMES.values()
}
"""What only transfer programs name, and no tensor is registered as."""


def amax_kind(scheme: str) -> QuantizedKind:
    """Return what the scales and values of a scheme are folded of."""
    return AMAX_KINDS[f"{scheme}:amax"]


def quantized_kind(name: str) -> QuantizedKind:
    """Return what a part's `cast` names. Raises `LayoutMismatch` when there is no such thing."""
    known = DERIVED.get(name)
    if known is None:
        raise LayoutMismatch(f"there is no cast {name!r:.60}; possible are {', '.join(DERIVED)}")
    return known


def check_derived(part: Part, dtype: str) -> None:
    """Check a part that is computed of its global tensor, in a tensor of this dtype.

    Raises `LayoutMismatch` with the end of a sentence about the part.
    """
    kind = quantized_kind(part.cast)
    if dtype != kind.dtype:
        raise LayoutMismatch(f"is {part.cast} in a tensor of {dtype}: register it as {kind.dtype}")
    kind.scheme.check_source(part.global_shape, FP8_SOURCES[0])
    whole = kind.shape(part.global_shape)
    if any(begin + size > limit for begin, size, limit in zip(part.offset, part.extent, whole, strict=True)):
        raise LayoutMismatch(
            f"of extent {part.extent} at {part.offset} does not fit into {part.cast} of global shape "
            f"{part.global_shape}, which are {whole}"
        )
    rows, columns = kind.scheme.steps(part.global_shape)
    if rows * columns * LARGEST_SOURCE_ITEMSIZE > BLOCK_BYTES_MAX:
        raise LayoutMismatch(
            f"is {part.cast} with blocks of {rows} × {columns} elements, which is not in this version: a block may "
            f"have {BLOCK_BYTES_MAX // LARGEST_SOURCE_ITEMSIZE}. Take another scheme, or read it as it was published "
            "and quantise it where it is used"
        )
