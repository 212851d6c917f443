"""How elements are converted on their way into another layout: by the name of the cast, as "float32>bfloat16".

This version knows none. A form that names one is refused before a byte moves, at whichever end converts.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy.typing as npt

from tensorhub_common.errors import TensorHubError

Convert = Callable[[npt.NDArray[Any], npt.NDArray[Any]], None]
"""Writes into its first argument the elements of the second. Both have one shape and any strides; their elements are
the bits of numbers, as unsigned integers of that size. It runs in a thread of the copy pool, so it lets go of the GIL.
"""

CONVERTERS: Final[dict[str, Convert]] = {}


class CastUnknown(TensorHubError):
    """A form names a cast that this version does not have."""


def converter(cast: str) -> Convert:
    """Return what converts elements by the name of the cast. Raises `CastUnknown`."""
    try:
        return CONVERTERS[cast]
    except KeyError:
        raise CastUnknown(
            f"elements were to be converted as {cast!r}, which is not in this version of tensorhub: register "
            "tensors of one dtype at both ends"
        ) from None
