"""How elements are converted on their way into another layout: by the name of the cast, as "float32>bfloat16".

The names are `tensorhub_common.casts`'s and the arithmetic is `casting`'s. A form that names a cast which this version
does not have is refused before a byte moves, at whichever end converts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy.typing as npt

from tensorhub_agent.casting.values import cast
from tensorhub_common.casts import check_value_cast, dtypes_of
from tensorhub_common.errors import LayoutMismatch, TensorHubError

Convert = Callable[[npt.NDArray[Any], npt.NDArray[Any]], None]
"""Writes into its first argument the elements of the second. Both have one shape and any strides; their elements are
the bits of numbers, as unsigned integers of that size. It runs in a thread of the copy pool, so it lets go of the GIL.
"""


class CastUnknown(TensorHubError):
    """A form names a cast that this version does not have."""


CONVERTERS: Final[dict[str, Convert]] = {}
"""Those that were asked for. There are not many pairs of dtypes."""


def converter(name: str) -> Convert:
    """Return what converts elements by the name of the cast. Raises `CastUnknown`."""
    known = CONVERTERS.get(name)
    if known is None:
        try:
            from_dtype, to_dtype = dtypes_of(name)
            check_value_cast(from_dtype, to_dtype)
        except LayoutMismatch as why:
            raise CastUnknown(
                f"elements were to be converted as {name!r}, which is not in this version of tensorhub: {why}"
            ) from None
        known = CONVERTERS[name] = partial(_converted, from_dtype, to_dtype)
    return known


def _converted(from_dtype: str, to_dtype: str, here: npt.NDArray[Any], there: npt.NDArray[Any]) -> None:
    cast(there, from_dtype, here, to_dtype)
