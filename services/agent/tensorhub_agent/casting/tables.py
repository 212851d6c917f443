"""Tables that casts are looked up in, made from the slow rules of `floats.py` when first used.

- From a dtype of one or two bytes to any other: its 256 or 65,536 codes.
- From float32 to fp8: float32 is first *rounded to odd* to its upper 16 bits, which is to cut off the lower ones and to
  set the last bit if any of them was. 16 bits so rounded have at least two bits more than any fp8 mantissa, and so the
  second rounding comes out as one rounding of the whole would: it sees on which side of each middle the value lay.

Invariant: a table is made once for a process, takes at most 512 KiB, and is read-only.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from tensorhub_agent.casting.floats import FP8_FORMATS, Bits, bits_of, f16_to_f32, f32_to_fp8, fp8_to_f32
from tensorhub_common.layout.casts import CASTABLE

Narrow = Callable[[npt.NDArray[np.uint32]], Bits]
"""Float32 as bits to another dtype as bits."""


@cache
def widening(dtype: str) -> npt.NDArray[np.uint32]:
    """Return the float32 of each code of a dtype of one or two bytes, as bits."""
    codes = np.arange(1 << 8 * CASTABLE[dtype], dtype=np.uint32)
    if dtype == "bfloat16":
        table = np.left_shift(codes, 16, dtype=np.uint32)
    elif dtype == "float16":
        table = f16_to_f32(codes.astype(np.uint16))
    else:
        table = fp8_to_f32(dtype)
    table.flags.writeable = False
    return table


def narrowed(from_dtype: str, narrow: Narrow) -> Bits:
    """Return what each code of a dtype of one or two bytes becomes by way of float32."""
    table = narrow(widening(from_dtype))
    table.flags.writeable = False
    return table


@cache
def odd_to_fp8(to_dtype: str) -> npt.NDArray[np.uint8]:
    """Return the fp8 code for the upper 16 bits of a float32 that was rounded to odd."""
    assert to_dtype in FP8_FORMATS
    assert bits_of(to_dtype) == np.uint8
    odd = np.arange(1 << 16, dtype=np.uint32) << 16
    table = f32_to_fp8(to_dtype, odd.view(np.float32))
    table.flags.writeable = False
    return table
