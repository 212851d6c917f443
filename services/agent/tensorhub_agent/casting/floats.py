"""The float formats as bits, and the slow rules that say what a cast is: the measure of all that is fast.

Elements are in numpy arrays of unsigned integers, because numpy has neither bfloat16 nor float8; `bits_of` names the
integer of a dtype. All casts go by way of float32, as torch's own do: it holds every narrower dtype exactly, and a
float64 is rounded twice on its way to anything narrower.

Invariant: rounding is to nearest, ties to even; what is too large after rounding becomes infinity where the format
has one, 448 in float8_e4m3fn, and NaN in the two formats without signed zero. Torch 2.13 does the same.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensorhub_common.layout.casts import CASTABLE

Bits = npt.NDArray[np.unsignedinteger[Any]]
"""Elements of any shape and stride, as unsigned integers of their itemsize."""

_UNSIGNED: Final[dict[int, np.dtype[np.unsignedinteger[Any]]]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}


def bits_of(dtype: str) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the unsigned integer that holds one element of a castable dtype."""
    return _UNSIGNED[CASTABLE[dtype]]


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """An 8-bit float: a sign, `8 - 1 - mantissa_bits` bits of exponent, and the mantissa."""

    mantissa_bits: int
    bias: int
    overflow: int
    """What is too large becomes this code, and so does infinity."""
    nan: int
    signed_zero: bool = True
    """Without one, the code of -0 is the only NaN, and has no sign."""


FP8_FORMATS: Final[dict[str, Fp8Format]] = {
    # Its largest number, as torch 2.13 has it; older ones made NaN of what rounds to more than 448.
    "float8_e4m3fn": Fp8Format(mantissa_bits=3, bias=7, overflow=0x7E, nan=0x7F),
    "float8_e5m2": Fp8Format(mantissa_bits=2, bias=15, overflow=0x7C, nan=0x7F),
    "float8_e4m3fnuz": Fp8Format(mantissa_bits=3, bias=8, overflow=0x80, nan=0x80, signed_zero=False),
    "float8_e5m2fnuz": Fp8Format(mantissa_bits=2, bias=16, overflow=0x80, nan=0x80, signed_zero=False),
}

FP8_NAN_AS_F32: Final[dict[str, dict[int, int]]] = {
    "float8_e4m3fn": {0x7F: 0x7FF00000, 0xFF: 0xFFF00000},
    "float8_e5m2": {
        sign | code: sign << 24 | bits
        for sign in (0x00, 0x80)
        for code, bits in ((0x7C, 0x7F800000), (0x7D, 0x7FE00000), (0x7E, 0x7FC00000), (0x7F, 0x7FE00000))
    },
    "float8_e4m3fnuz": {0x80: 0x7F800001},
    "float8_e5m2fnuz": {0x80: 0x7F800001},
}
"""Codes that are no finite number, and the float32 that torch makes of each."""


@cache
def _magnitudes(format_: Fp8Format) -> npt.NDArray[np.float64]:
    """Return the values of the codes 0 to 0x80 as if all were finite numbers: the last one only bounds the others."""
    codes = np.arange(0x81)
    exponent, mantissa = codes >> format_.mantissa_bits, codes & ((1 << format_.mantissa_bits) - 1)
    # A subnormal has the exponent of the smallest normal and no leading one.
    leading = np.where(exponent > 0, 1 << format_.mantissa_bits, 0)
    scale = np.maximum(exponent, 1) - format_.bias - format_.mantissa_bits
    magnitudes: npt.NDArray[np.float64] = np.ldexp((leading + mantissa).astype(np.float64), scale)
    return magnitudes


def fp8_to_f32(dtype: str) -> npt.NDArray[np.uint32]:
    """Return the float32 of each of the 256 codes, as bits."""
    values = _magnitudes(FP8_FORMATS[dtype])[:0x80].astype(np.float32)
    bits = np.concatenate((values, -values)).view(np.uint32)
    for code, nan in FP8_NAN_AS_F32[dtype].items():
        bits[code] = nan
    return bits


def f32_to_fp8(dtype: str, source: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Round float32 to the nearest code by looking for it among all of them."""
    format_ = FP8_FORMATS[dtype]
    magnitudes = _magnitudes(format_)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    with np.errstate(invalid="ignore"):
        magnitude = np.abs(source.astype(np.float64))
    # As many middles as are below the value lie between it and zero. On a middle, the even code wins.
    code = np.searchsorted(middles, magnitude, side="left")
    tie = magnitude == middles[np.minimum(code, len(middles) - 1)]
    code = np.minimum(code + (tie & (code % 2 == 1)), format_.overflow)
    code = np.where(np.isnan(source), format_.nan, code)
    negative = np.signbit(source)
    signed = code | np.where(negative, 0x80, 0)
    result = signed if format_.signed_zero else np.where(code == 0, 0, signed)
    return result.astype(np.uint8)


def f16_to_f32(source: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint32]:
    """Widen float16; a NaN keeps sign and payload and becomes a quiet one."""
    with np.errstate(invalid="ignore"):
        bits = source.view(np.float16).astype(np.float32).view(np.uint32)
    wide = source.astype(np.uint32)
    nan = (wide & 0x8000) << 16 | 0x7FC00000 | (wide & 0x3FF) << 13
    return np.where((wide & 0x7FFF) > 0x7C00, nan, bits).astype(np.uint32)  # noqa: PLR2004 (float16's infinity)
