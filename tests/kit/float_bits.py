"""Bits of numbers that show where a cast goes wrong."""

import random
from typing import Any

import numpy as np

from tensorhub_agent.casting.floats import bits_of
from tensorhub_common.layout.casts import CASTABLE


def numbers(dtype: str, count: int) -> "np.ndarray[Any, Any]":
    """Return bits of all kinds of numbers: random ones, the edges of exponents and of what is rounded away, and NaN."""
    size, some = CASTABLE[dtype], random.Random(dtype)
    edges = [
        sign << (8 * size - 1) | (exponent << shift) + offset
        for sign in (0, 1)
        for shift in ({8: (52, 29), 4: (23, 16, 13), 2: (10, 7), 1: (3, 2)}[size])
        for exponent in range(min(1 << (8 * size - 1 - shift), 1 << 11))
        for offset in (-1, 0, 1)
        if 0 <= (exponent << shift) + offset < 1 << (8 * size - 1)
    ]
    found = edges + [some.getrandbits(8 * size) for _ in range(count)]
    some.shuffle(found)
    return np.asarray(found[:count] if len(found) > count * 4 else found, bits_of(dtype))
