"""The value cast: each element of a view becomes an element of another view, as torch's `.to()` would have it.

Invariant: what `out` doesn't cover is not written; memory beside the two views is the thread's scratch alone; and an
element comes out the same whatever is beside it, so a box may be cut and cast in any parts.
"""

import math
from collections.abc import Iterator

import numpy as np

from tensorhub_agent.casting.floats import Bits, bits_of
from tensorhub_agent.casting.kernels import BLOCK_ELEMENTS_MAX, kernel
from tensorhub_common.layout.casts import check_value_cast
from tensorhub_common.layout.parts import Shape


def view_bits(memory: memoryview, dtype: str, shape: Shape, offset: int = 0, strides: Shape | None = None) -> Bits:
    """Return the elements in memory from byte `offset` on, aligned or not; strides count bytes."""
    return np.ndarray(shape, bits_of(dtype), memory, offset, strides)


def cast(source: Bits, from_dtype: str, out: Bits, to_dtype: str) -> None:
    """Cast every element of `source` into its place in `out`, which has the same shape and other memory.

    Both are views of elements as unsigned integers of their itemsize (`view_bits`), of any strides. Raises
    `LayoutMismatch` for a pair of dtypes that isn't possible, and ValueError for views that don't belong together.
    """
    check_value_cast(from_dtype, to_dtype)
    if source.shape != out.shape:
        raise ValueError(f"a source of shape {source.shape} does not fill {out.shape}")
    if from_dtype == to_dtype:
        np.copyto(out, source, casting="no")
        return
    for view, dtype in ((source, from_dtype), (out, to_dtype)):
        if view.dtype != bits_of(dtype):
            raise ValueError(f"elements of {dtype} are taken as {bits_of(dtype)}, not as {view.dtype}")
    if source.flags.c_contiguous and out.flags.c_contiguous:
        source, out = source.reshape(-1), out.reshape(-1)
    convert = kernel(from_dtype, to_dtype)
    # An overflow, a NaN and a subnormal are results here, and no warnings.
    with np.errstate(all="ignore"):
        for block in blocks(source.shape, BLOCK_ELEMENTS_MAX):
            convert(source[block], out[block])


def blocks(shape: Shape, elements_max: int) -> Iterator[tuple[slice | int, ...]]:
    """Cut a box into blocks of at most `elements_max`, as indices; together they are every element once."""
    if 0 in shape:
        return
    # The cut dimension is the first one whose single slice fits; those before it are walked one index at a time.
    dim, slice_elements = 0, math.prod(shape)
    for dim, size in enumerate(shape):  # noqa: B007 (the last value is wanted after the loop)
        slice_elements //= size
        if slice_elements <= elements_max:
            break
    if not shape:
        yield (...,)  # type: ignore[misc]
        return
    rows = max(1, elements_max // slice_elements)
    for outer in np.ndindex(*shape[:dim]):
        for first in range(0, shape[dim], rows):
            yield (*outer, slice(first, first + rows))
