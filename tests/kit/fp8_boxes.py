"""Boxes of fp8 values, scales and largest magnitudes, with what the host makes of them."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from tests.unit.agent.casting.torch_fp8 import weight

from tensorhub_agent.casting.conversion import by_amax, converter_of
from tensorhub_agent.casting.fp8 import fold_amax
from tensorhub_common.layout.casts import CASTABLE, FP8_SOURCES
from tensorhub_common.layout.quantized import AMAX_KINDS, DERIVED
from tensorhub_common.programs.regions import Blocks, StridedForm

Array = np.ndarray[Any, np.dtype[Any]]

SHAPES = ((300, 260), (3, 129, 64), (2, 2, 40, 1500), (1, 1))
KINDS = {**DERIVED, **AMAX_KINDS}
CASES = [(dtype, name, shape) for dtype, name, shape in itertools.product(FP8_SOURCES, sorted(KINDS), SHAPES)]
BEFORE = 0xAB


class Box(NamedTuple):
    """A box of a source array, and where it goes: `to` bytes behind the beginning of the destination."""

    form: StridedForm
    amax: bytes
    source: Array
    to: int
    before: Array
    """The destination, bytes."""
    after: Array


def boxes(dtype: str, name: str, shape: tuple[int, ...]) -> Iterator[Box]:
    """Yield a whole box, and of values one within it and one by largest magnitudes that come with it."""
    kind, cast = KINDS[name], f"{dtype}>{name}"
    # Within a wider array, so that rows lie apart.
    wide = weight((*shape[:-1], shape[-1] + 5), dtype, seed=len(cast) + sum(shape))
    if wide.size > 4:
        # An infinity and a NaN, each in a row of its own.
        wide[..., 0, 1] = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}[dtype]
        wide[..., shape[-2] - 1, 2] = {"float32": 0xFFC00001, "bfloat16": 0xFFC1, "float16": 0xFE01}[dtype]
    source = wide[..., : shape[-1]]
    size = CASTABLE[dtype]
    whole = kind.shape(shape)
    yield _box(
        StridedForm(whole, (), source.strides, size, kind.itemsize, cast, Blocks(shape, (0,) * len(shape))), source
    )
    if kind.is_scales:
        return
    skip = tuple(min(each // 3, each - 1) for each in shape)
    inside = tuple(max(1, (each - lead) // 2) for each, lead in zip(shape, skip, strict=True))
    yield _box(StridedForm(inside, (), source.strides, size, 1, cast, Blocks(shape, skip)), source)
    amax = np.zeros(kind.scheme.scales_shape(shape), np.float32)
    fold_amax(source, dtype, kind.scheme, amax)
    yield _box(StridedForm(shape, (), source.strides, size, 1, cast), source, amax.tobytes())


def _box(form: StridedForm, source: Array, amax: bytes = b"") -> Box:
    """Lay the box out in the middle of an array that is wider, and have the host fill it."""
    size = form.to_itemsize
    wide = np.full((*form.shape[:-1], (form.shape[-1] + 3) * size), BEFORE, np.uint8)
    there = wide.view(f"u{size}")[..., 1 : 1 + form.shape[-1]]
    form = StridedForm(form.shape, there.strides, form.origin_strides, form.itemsize, size, form.cast, form.blocks)
    after = wide.copy()
    here = after.view(f"u{size}")[..., 1 : 1 + form.shape[-1]]
    (by_amax(form, amax) if amax else converter_of(form))(here, source)
    return Box(form, amax, source, size, wide, after)
