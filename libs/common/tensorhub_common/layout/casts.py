"""Which dtype may become which on the way, and which elements a cast has to see: what a planner knows about casts.

There are two kinds. A *value cast* makes each element from one element, so a box needs the same box of its source:
float32 becomes bfloat16. *fp8 with scales* makes two tensors of one: values in float8_e4m3fn and a float32 scale for
each block of them. A value depends on the largest magnitude of its whole block, so a box of values, or of scales,
needs a box of whole blocks (`values_need`, `scales_need`).

The arithmetic is in the agent's `casting`, which has numpy. This module is geometry alone, because the planner runs on
hosts without numpy. docs/design/casts.md says how exact all of it is, and whose formula each scheme is.

Always true of a scheme: blocks are counted from index 0 of the global tensor, over its last two dimensions; the
dimensions before them (experts) count one by one. The last block of a row or column may be smaller.
"""

import enum
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.parts import Shape

CASTABLE: Final[dict[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
}
"""Torch's dtypes whose elements a value cast takes and makes, with the bytes of one element."""

FP8_DTYPE: Final = "float8_e4m3fn"
SCALE_DTYPE: Final = "float32"
FP8_LARGEST: Final = 448.0
"""The largest value of `FP8_DTYPE`; a block's largest magnitude is scaled to it."""

FP8_SOURCES: Final = ("float32", "bfloat16", "float16")
"""What fp8 with scales is made of: what the engines' own code takes."""

Span = tuple[Shape, Shape]
"""A box in global index space: its first indices, and the first ones after it."""


def check_value_cast(from_dtype: str, to_dtype: str) -> None:
    """Raise `LayoutMismatch` when a value cast would lose what the numbers mean; the caller names the tensor."""
    if from_dtype == to_dtype or (from_dtype in CASTABLE and to_dtype in CASTABLE):
        return
    raise LayoutMismatch(
        f"{from_dtype} can't become {to_dtype} on the way: casts are possible between {', '.join(CASTABLE)}; "
        "register it with the dtype that its holders have"
    )


def cast_name(from_dtype: str, to_dtype: str) -> str:
    """Return the name of a value cast in a transfer program; empty where nothing is to be converted."""
    return "" if from_dtype == to_dtype else f"{from_dtype}>{to_dtype}"


def dtypes_of(name: str) -> tuple[str, str]:
    """Return from what to what a cast of this name converts. Raises `LayoutMismatch` for what is no such name."""
    from_dtype, arrow, to_dtype = name.partition(">")
    if not arrow:
        raise LayoutMismatch(f"{name!r} is no name of a cast")
    return from_dtype, to_dtype


class ScaleOrder(enum.Enum):
    """In which order a scheme computes: mathematically the same, and different in the last bit."""

    MULTIPLY = enum.auto()
    """scale = amax / 448; value = x · (1 / scale)."""
    DIVIDE = enum.auto()
    """scale = amax / 448; value = x / scale."""
    RECIPROCAL = enum.auto()
    """f = (1 / amax) · 448, which is what torch makes of 448 / amax, or 1 where amax is 0 or infinite; value = x · f;
    scale = 1 / f."""


_SQUARE: Final = (128, 128)


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """How fp8 values and their scales come from a weight of [..., rows, columns]."""

    name: str
    block: tuple[int | None, int | None]
    """Rows and columns that share a scale; None is the whole dimension."""
    order: ScaleOrder
    amax_min: float = 0.0
    """A block's largest magnitude counts as at least this, so that a block of zeros has a scale."""
    scale_min: float = 0.0
    power_of_two: bool = False
    """The scale is rounded up to a power of two (ue8m0), and kept as float32 all the same."""
    saturate: bool = False
    """Values beyond ±448 become ±448, and a NaN becomes 448, as fmin and fmax on a GPU have it."""

    @property
    def suffix(self) -> str:
        """What engines and checkpoints append to a weight's name to call its scales."""
        return "_scale_inv" if self.block == _SQUARE else "_scale"

    def check_source(self, shape: Shape, dtype: str) -> None:
        """Raise `LayoutMismatch` when a global tensor of this shape and dtype can't be a source; it goes unnamed."""
        if dtype not in FP8_SOURCES:
            raise LayoutMismatch(f"{dtype} can't become {self.name}: it is made of {', '.join(FP8_SOURCES)}")
        if len(shape) < 2:  # noqa: PLR2004 (rows and columns)
            raise LayoutMismatch(f"shape {shape} can't become {self.name}: blocks need rows and columns")

    def scales_shape(self, shape: Shape) -> Shape:
        """Return the global shape of the scales of a global tensor: [..., blocks of rows, blocks of columns]."""
        *batch, rows, columns = shape
        steps = self.steps(shape)
        return (*batch, *(-(-size // step) for size, step in zip((rows, columns), steps, strict=True)))

    def values_need(self, start: Shape, stop: Shape, shape: Shape) -> Span:
        """Return the box of the source that a box of values is made of: the whole blocks that it touches."""
        return self.scales_need(*self.scales_of(start, stop, shape), shape)

    def scales_of(self, start: Shape, stop: Shape, shape: Shape) -> Span:
        """Return the box of the scales whose blocks a box of values touches."""
        steps = self.steps(shape)
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            first = (*start[:-2], *(a // step for a, step in zip(start[-2:], steps, strict=True)))
            return first, first
        return (
            (*start[:-2], *(a // step for a, step in zip(start[-2:], steps, strict=True))),
            (*stop[:-2], *(-(-b // step) for b, step in zip(stop[-2:], steps, strict=True))),
        )

    def scales_need(self, start: Shape, stop: Shape, shape: Shape) -> Span:
        """Return the box of the source that a box of scales is made of."""
        sizes = shape[-2:]
        steps = self.steps(shape)
        return (
            (*start[:-2], *(min(a * step, size) for a, step, size in zip(start[-2:], steps, sizes, strict=True))),
            (*stop[:-2], *(min(b * step, size) for b, step, size in zip(stop[-2:], steps, sizes, strict=True))),
        )

    def steps(self, shape: Shape) -> Shape:
        """Return how many rows and columns share a scale in a global tensor of this shape."""
        # An empty dimension has no block, and still needs a step that can be divided by.
        sizes = shape[-2:]
        return tuple(max(1, size if step is None else step) for size, step in zip(sizes, self.block, strict=True))


_SCHEMES: Final = (
    Fp8Scheme("fp8-block-128", (128, 128), ScaleOrder.MULTIPLY, amax_min=1e-4),
    Fp8Scheme("fp8-block-128-ue8m0", (128, 128), ScaleOrder.MULTIPLY, amax_min=1e-4, power_of_two=True),
    Fp8Scheme("fp8-block-128-slime", (128, 128), ScaleOrder.MULTIPLY, amax_min=1e-10),
    Fp8Scheme("fp8-block-128-nemo", (128, 128), ScaleOrder.RECIPROCAL),
    Fp8Scheme("fp8-channel", (1, None), ScaleOrder.DIVIDE, scale_min=1 / (FP8_LARGEST * 512), saturate=True),
    Fp8Scheme("fp8-tensor", (None, None), ScaleOrder.MULTIPLY, saturate=True),
)

FP8_SCHEMES: Final[dict[str, Fp8Scheme]] = {scheme.name: scheme for scheme in _SCHEMES}
"""The schemes by name. A name's formula never changes: another formula is another name."""


def fp8_scheme(name: str) -> Fp8Scheme:
    """Return the scheme of this name. Raises `LayoutMismatch` when there is none."""
    scheme = FP8_SCHEMES.get(name)
    if scheme is None:
        raise LayoutMismatch(f"there is no fp8 scheme {name!r:.40}; possible are {', '.join(FP8_SCHEMES)}")
    return scheme


def tiles(size: int, step: int) -> list[tuple[int, int]]:
    """Cut `size` indices into runs of `step`, the last of which may be shorter."""
    return list(pairwise([*range(0, size, step), size])) if size else []
