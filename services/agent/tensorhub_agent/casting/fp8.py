"""fp8 with scales: float8_e4m3fn values and a float32 scale for each block, by an engine's own formula.

Three steps, because a block's largest magnitude (`amax`) may have to be put together from parts that different sources
hold: `fold_amax` over each part, then `fill_scales`, then `fill_values` over each part. `quantise` is all three for a
box that is here whole. docs/design/casts.md has the formula of each scheme, and its origin.

Arrays are [..., rows, columns]: values and source of one shape, `amax` and scales with one element for each block, as
`Fp8Scheme.scales_shape` says. A box begins with a whole block in each dimension; only its last blocks may be smaller,
and only because the global tensor ends there.

Invariant: all arithmetic is IEEE float32, one rounding for each operation, in the scheme's order; a block that holds
an infinity or a NaN comes out as the formula has it, which no engine can use, and spoils no other block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tensorhub_agent.casting.floats import Bits, bits_of
from tensorhub_agent.casting.kernels import BLOCK_ELEMENTS_MAX, SCRATCH, Kernel, kernel, room
from tensorhub_common.layout.casts import FP8_DTYPE, FP8_LARGEST, Fp8Scheme, ScaleOrder, tiles
from tensorhub_common.layout.parts import Shape

Floats = npt.NDArray[np.float32]

_LARGEST: Final = np.float32(FP8_LARGEST)
_ONE: Final = np.float32(1)
_NAN: Final = np.float32(np.nan)
_MANTISSA: Final = 0x7FFFFF
_MANTISSA_BITS: Final = 23


def quantise(source: Bits, from_dtype: str, scheme: Fp8Scheme, values: Bits, scales: Floats) -> None:
    """Fill values and scales of a box of whole blocks.

    Raises `LayoutMismatch` when the scheme doesn't take the source, and ValueError for arrays that don't fit together.
    """
    amax = np.zeros(scheme.scales_shape(source.shape), np.float32)
    fold_amax(source, from_dtype, scheme, amax)
    fill_scales(amax, scheme, scales)
    fill_values(source, from_dtype, amax, scheme, values)


def fold_amax(source: Bits, from_dtype: str, scheme: Fp8Scheme, amax: Floats) -> None:
    """Raise `amax`, zeros at first, to the largest magnitudes of the blocks; a NaN is larger than any number."""
    _check(source, from_dtype, scheme, amax)
    # Without their signs floats are in the order of their bits, and a NaN is above infinity.
    magnitude_bits = source.dtype.type(np.iinfo(source.dtype).max >> 1)
    with np.errstate(all="ignore"):
        for tile in _all_tiles(source.shape, scheme):
            magnitudes = room(SCRATCH.words.view(source.dtype), tile.shape)
            np.bitwise_and(tile.of(source), magnitude_bits, out=magnitudes)
            # Rows first: whole rows are compared with one another at once.
            largest = np.maximum.reduce(magnitudes, axis=0, keepdims=True) if tile.within_one else magnitudes
            here = amax[tile.blocks]
            np.maximum(here, _as_floats(np.maximum.reduce(largest, axis=2), from_dtype), out=here)


def fill_scales(amax: Floats, scheme: Fp8Scheme, scales: Floats) -> None:
    """Compute the scales, which an engine multiplies values with, from the blocks' largest magnitudes."""
    with np.errstate(all="ignore"):
        if scheme.order is ScaleOrder.RECIPROCAL:
            np.divide(_ONE, _factors(amax, scheme), out=scales)
        else:
            np.copyto(scales, _scales(amax, scheme))
        # Which one of several NaN is the largest depends on how the box was cut, and its scale must not.
        np.copyto(scales, np.float32(np.nan), where=np.isnan(scales))


def fill_values(source: Bits, from_dtype: str, amax: Floats, scheme: Fp8Scheme, values: Bits) -> None:
    """Scale and round a box of whole blocks whose largest magnitudes are known."""
    _check(source, from_dtype, scheme, amax)
    if values.shape != source.shape or values.dtype != np.uint8:
        raise ValueError(f"values of shape {values.shape} and {values.dtype} do not take uint8 of {source.shape}")
    to_fp8 = kernel("float32", FP8_DTYPE)
    with np.errstate(all="ignore"):
        factors = _factors(amax, scheme)
        how = _Factors(factors, ~((factors > 0) & (factors < np.inf) & (amax < np.inf)))
        for tile in _all_tiles(source.shape, scheme):
            _tile_values(tile, source, from_dtype, how, scheme, values, to_fp8)


def _tile_values(
    tile: "_Tile",
    source: Bits,
    from_dtype: str,
    how: "_Factors",
    scheme: Fp8Scheme,
    values: Bits,
    to_fp8: Kernel,
) -> None:
    scaled = room(SCRATCH.products, tile.shape)
    factor = how.factors[tile.blocks][..., np.newaxis]
    operation = np.divide if scheme.order is ScaleOrder.DIVIDE else np.multiply
    operation(_as_floats(tile.of(source), from_dtype), factor, out=scaled)
    if np.any(how.are_odd[tile.blocks]):
        # The conversion cuts off as well. Which sign another NaN has depends on the loop that an element falls to: it
        # gets none.
        np.copyto(scaled, _LARGEST if scheme.saturate else _NAN, where=np.isnan(scaled))
    to_fp8(scaled.view(np.uint32), tile.of(values))


def _scales(amax: Floats, scheme: Fp8Scheme) -> Floats:
    divided = np.divide(np.maximum(amax, np.float32(scheme.amax_min)), _LARGEST)
    scales: Floats = np.maximum(divided, np.float32(scheme.scale_min))
    if not scheme.power_of_two:
        return scales
    bits = scales.view(np.uint32)
    exponents = (bits >> _MANTISSA_BITS & 0xFF) + (bits & _MANTISSA != 0)
    powers: npt.NDArray[np.uint32] = np.clip(exponents, 1, 254).astype(np.uint32) << np.uint32(_MANTISSA_BITS)
    return powers.view(np.float32)


def _factors(amax: Floats, scheme: Fp8Scheme) -> Floats:
    """Return what the source is multiplied with, or divided by."""
    if scheme.order is ScaleOrder.RECIPROCAL:
        return np.where((amax == 0) | (amax == np.inf), _ONE, _ONE / amax * _LARGEST)
    scales = _scales(amax, scheme)
    return scales if scheme.order is ScaleOrder.DIVIDE else _ONE / scales


@dataclass(frozen=True, slots=True)
class _Factors:
    """What each block's values are multiplied with, or divided by."""

    factors: Floats
    are_odd: npt.NDArray[np.bool_]
    """Some of the block's values may be NaN."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """A part of a box that fits into scratch: some rows, by some blocks of columns, by the columns of each."""

    index: tuple[int | slice, ...]
    shape: Shape
    blocks: tuple[int | slice, ...]
    """The blocks that the tile lies in."""
    within_one: bool
    """All its rows are of one block of rows, and not each of its own."""

    def of(self, array: Bits) -> Bits:
        # To split a dimension in two never copies, so what is written here is written there.
        return array[self.index].reshape(self.shape)


def _all_tiles(shape: Shape, scheme: Fp8Scheme) -> Iterator[_Tile]:
    *batch, rows, columns = shape
    if 0 in shape:
        return
    tile_list = list(_tiles(rows, columns, scheme))
    for outer in np.ndindex(*batch):
        for tile in tile_list:
            yield _Tile((*outer, *tile.index), tile.shape, (*outer, *tile.blocks), tile.within_one)


def _tiles(rows: int, columns: int, scheme: Fp8Scheme) -> Iterator[_Tile]:
    block_rows, block_columns = scheme.block[0] or rows, min(scheme.block[1] or columns, columns)
    within_one = block_rows > 1
    # As wide as can be, so that a source that is whole is read in the order of memory.
    for run, (left, right) in _column_runs(columns, block_columns, BLOCK_ELEMENTS_MAX):
        height_max = max(1, BLOCK_ELEMENTS_MAX // (right - left))
        for block, (top, bottom) in enumerate(tiles(rows, block_rows) if within_one else [(0, rows)]):
            for first, last in ((top + a, top + b) for a, b in tiles(bottom - top, height_max)):
                yield _Tile(
                    (slice(first, last), slice(left, right)),
                    (last - first, run.stop - run.start, (right - left) // (run.stop - run.start)),
                    (slice(block, block + 1) if within_one else slice(first, last), run),
                    within_one,
                )


def _column_runs(columns: int, block_columns: int, columns_max: int) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Cut columns into runs of equally wide blocks, or a block that is too wide into parts."""
    if block_columns > columns_max:
        for block, (left, right) in enumerate(tiles(columns, block_columns)):
            for a, b in tiles(right - left, columns_max):
                yield slice(block, block + 1), (left + a, left + b)
        return
    whole = columns // block_columns
    for first, last in tiles(whole, columns_max // block_columns):
        yield slice(first, last), (first * block_columns, last * block_columns)
    if columns % block_columns:
        yield slice(whole, whole + 1), (whole * block_columns, columns)


def _as_floats(tile: Bits, from_dtype: str) -> Floats:
    if from_dtype == "float32":
        return tile.view(np.float32)
    floats = room(SCRATCH.floats, tile.shape)
    kernel(from_dtype, "float32")(tile, floats.view(np.uint32))
    return floats


def _check(source: Bits, from_dtype: str, scheme: Fp8Scheme, amax: Floats) -> None:
    scheme.check_source(source.shape, from_dtype)
    if source.dtype != bits_of(from_dtype):
        raise ValueError(f"elements of {from_dtype} are taken as {bits_of(from_dtype)}, not as {source.dtype}")
    if amax.shape != scheme.scales_shape(source.shape) or amax.dtype != np.float32:
        raise ValueError(
            f"amax of shape {amax.shape} and {amax.dtype} is not float32 of {scheme.scales_shape(source.shape)}"
        )
