"""How elements are converted on their way into another layout: by the name of the cast, as "float32>bfloat16".

The names are those of `tensorhub_common.layout.casts`, the arithmetic is `casting`. A form that names a cast which this
version does not have is refused before a byte moves, at whichever end converts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensorhub_agent.casting.fp8 import fill_scales, fill_values, fold_amax
from tensorhub_agent.casting.values import cast
from tensorhub_agent.primitives.block_forms import derivation_of, needs_amax
from tensorhub_common.errors import LayoutMismatch, TensorHubError
from tensorhub_common.layout.casts import check_value_cast, dtypes_of
from tensorhub_common.layout.quantized import QuantizedKind
from tensorhub_common.programs.regions import Sizes, StridedForm

Convert = Callable[[npt.NDArray[Any], npt.NDArray[Any]], None]
"""Writes into its first argument the elements of the second. Both have any strides, and one shape unless something is
computed of blocks; their elements are the bits of numbers, as unsigned integers of that size. It runs in a thread of
the copy pool, so it lets go of the GIL.
"""


class CastUnknown(TensorHubError):
    """A form names a cast that this version does not have."""


CONVERTERS: Final[dict[str, Convert]] = {}
"""Those that were asked for. There are not many pairs of dtypes."""


def converter_of(form: StridedForm) -> Convert:
    """Return what converts the elements of a good form that nothing comes with. Raises `CastUnknown`."""
    if form.blocks is None:
        return converter(form.cast)
    found = derivation_of(form)
    assert found is not None
    return partial(_computed, *found, form.blocks.skip)


def check_cast(form: StridedForm) -> None:
    """Raise `CastUnknown` when a good form names a cast that this version does not have."""
    if not needs_amax(form):
        converter_of(form)


def by_amax(form: StridedForm, amax: bytes) -> Convert:
    """Return what computes values of a good form by the largest magnitudes of its blocks."""
    found = derivation_of(form)
    assert found is not None
    from_dtype, kind = found
    largest = np.frombuffer(amax, np.float32).reshape(kind.scheme.scales_shape(form.shape))

    def convert(here: npt.NDArray[Any], there: npt.NDArray[Any]) -> None:
        fill_values(there, from_dtype, largest, kind.scheme, here)

    return convert


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


def _computed(
    from_dtype: str, kind: QuantizedKind, skip: Sizes, here: npt.NDArray[Any], there: npt.NDArray[Any]
) -> None:
    """Fill scales, or values from `skip` on, of whole blocks."""
    scheme = kind.scheme
    amax = np.zeros(scheme.scales_shape(there.shape), np.float32)
    fold_amax(there, from_dtype, scheme, amax)
    if kind.is_amax:
        np.copyto(here.view(np.float32), amax)
    elif kind.is_scales:
        fill_scales(amax, scheme, here.view(np.float32))
    elif here.shape == there.shape:
        fill_values(there, from_dtype, amax, scheme, here)
    else:
        # At the edges of a shard alone: all between them is whole blocks.
        whole = np.empty(there.shape, np.uint8)
        fill_values(there, from_dtype, amax, scheme, whole)
        np.copyto(here, whole[tuple(slice(a, a + size) for a, size in zip(skip, here.shape, strict=True))])
