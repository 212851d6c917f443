"""Casts of one block: few enough elements that all passes over them but the first find them in the core's cache.

A kernel takes and fills views of unsigned integers, of one shape and any strides. It works in arrays of its thread's
own (`SCRATCH`), 1.25 MiB, so nothing is allocated for a block. numpy lets go of the GIL within each pass, and so does
ml_dtypes; passes are few and blocks as long as the cache allows, because each pass must win the GIL back.

Invariant: a NaN becomes a NaN, the same one at every place. torch's depends on the loop that an element falls to
where float32 or float64 becomes bfloat16, and where float16 becomes float32 (docs/design/casts.md).
"""

import math
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tensorhub_agent.casting.floats import Bits, bits_of
from tensorhub_agent.casting.tables import narrowed, odd_to_fp8
from tensorhub_common.layout.parts import Shape

BLOCK_ELEMENTS_MAX: Final = 64 * 1024
"""The most elements of a block: long enough to pay for the calls, and 256 KiB of float32 fit into an L2."""

_BF16_NAN: Final = 0x7FC0
_BF16_NEGATIVE_INFINITY: Final = 0xFF80

Kernel = Callable[[Bits, Bits], None]


class _Scratch(threading.local):
    """A thread's arrays, kept for its life. One kernel uses each at a time."""

    def __init__(self) -> None:
        self.words = np.empty(BLOCK_ELEMENTS_MAX, np.uint32)
        self.floats = np.empty(BLOCK_ELEMENTS_MAX, np.float32)
        self.products = np.empty(BLOCK_ELEMENTS_MAX, np.float32)
        self.index = np.empty(BLOCK_ELEMENTS_MAX, np.intp)


SCRATCH: Final = _Scratch()


def room(array: npt.NDArray[Any], shape: Shape) -> npt.NDArray[Any]:
    """Return the beginning of a scratch array in the shape of a block."""
    return array[: math.prod(shape)].reshape(shape)


@cache
def kernel(from_dtype: str, to_dtype: str) -> Kernel:
    """Return what casts a block between two different castable dtypes."""
    if from_dtype == "float64":
        return _f64_to_f32 if to_dtype == "float32" else _by_f32(kernel("float32", to_dtype))
    if from_dtype == "float32":
        return _FROM_F32[to_dtype] if to_dtype in _FROM_F32 else _lookup_odd(odd_to_fp8(to_dtype))
    if (from_dtype, to_dtype) == ("bfloat16", "float32"):
        return _bf16_to_f32
    return _lookup(table_of(from_dtype, to_dtype))


@cache
def table_of(from_dtype: str, to_dtype: str) -> Bits:
    """Return what each code of a dtype of one or two bytes becomes."""
    return narrowed(from_dtype, lambda bits: _all(bits, to_dtype))


def _all(bits: npt.NDArray[np.uint32], to_dtype: str) -> Bits:
    """Cast float32 of any number, in blocks."""
    if to_dtype == "float32":
        return bits.copy()
    out = np.empty(bits.shape, bits_of(to_dtype))
    narrow = kernel("float32", to_dtype)
    with np.errstate(all="ignore"):
        for first in range(0, len(bits), BLOCK_ELEMENTS_MAX):
            narrow(bits[first : first + BLOCK_ELEMENTS_MAX], out[first : first + BLOCK_ELEMENTS_MAX])
    return out


def _f32_to_bf16(source: Bits, out: Bits) -> None:
    np.copyto(out.view(ml_dtypes.bfloat16), source.view(np.float32), casting="unsafe")
    # A negative NaN is all that comes out above negative infinity, and torch gives no NaN a sign there.
    if np.maximum.reduce(out, axis=None, initial=0) > _BF16_NEGATIVE_INFINITY:
        np.copyto(out, out.dtype.type(_BF16_NAN), where=out > _BF16_NEGATIVE_INFINITY)


def _f32_to_f16(source: Bits, out: Bits) -> None:
    floats = source.view(np.float32)
    np.copyto(out.view(np.float16), floats, casting="unsafe")
    # The largest of numbers one of which is NaN is NaN: one pass, and no array of answers.
    if np.isnan(np.maximum.reduce(floats, axis=None, initial=-np.inf)):
        # numpy keeps a signalling NaN signalling, and torch makes it quiet as processors do.
        nan = (source >> 16 & 0x8000) | 0x7E00 | (source >> 13 & 0x3FF)
        np.copyto(out, nan, casting="unsafe", where=np.isnan(floats))


def _f32_to_f64(source: Bits, out: Bits) -> None:
    np.copyto(out.view(np.float64), source.view(np.float32))


def _f64_to_f32(source: Bits, out: Bits) -> None:
    np.copyto(out.view(np.float32), source.view(np.float64), casting="unsafe")


def _bf16_to_f32(source: Bits, out: Bits) -> None:
    np.copyto(out.view(np.float32), source.view(ml_dtypes.bfloat16))


_FROM_F32: Final[dict[str, Kernel]] = {
    "bfloat16": _f32_to_bf16,
    "float16": _f32_to_f16,
    "float64": _f32_to_f64,
}


def _by_f32(narrow: Kernel) -> Kernel:
    def cast_f64(source: Bits, out: Bits) -> None:
        floats = room(SCRATCH.floats, source.shape)
        np.copyto(floats, source.view(np.float64), casting="unsafe")
        narrow(floats.view(np.uint32), out)

    return cast_f64


def _lookup_odd(table: npt.NDArray[np.uint8]) -> Kernel:
    def cast_f32(source: Bits, out: Bits) -> None:
        words, index = room(SCRATCH.words, source.shape), room(SCRATCH.index, source.shape)
        # Any of the lower 16 bits carries into bit 16 here, which then stays set.
        np.bitwise_and(source, 0xFFFF, out=words)
        np.add(words, 0xFFFF, out=words)
        np.bitwise_or(words, source, out=words)
        np.right_shift(words, 16, out=words)
        np.copyto(index, words, casting="unsafe")
        np.take(table, index, out=out, mode="clip")

    return cast_f32


def _lookup(table: Bits) -> Kernel:
    def cast_narrow(source: Bits, out: Bits) -> None:
        index = room(SCRATCH.index, source.shape)
        np.copyto(index, source, casting="unsafe")
        np.take(table, index, out=out, mode="clip")

    return cast_narrow
