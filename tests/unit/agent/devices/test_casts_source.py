"""The kernels that cast, compiled for the CPU: every pair of dtypes has the host's bits, aligned and strided."""

import ctypes
import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.kit.compiled_kernels import compiled
from tests.kit.float_bits import numbers

from tensorhub_agent.casting.floats import bits_of
from tensorhub_agent.casting.values import cast
from tensorhub_agent.devices.boxes import DeviceBox, is_possible
from tensorhub_agent.devices.kernels.boxes import TABLES_BYTES, BoxTables, normal_parts
from tensorhub_agent.devices.kernels.casts import kernel_name, table
from tensorhub_common.layout.casts import CASTABLE, cast_name
from tensorhub_common.programs.regions import StridedForm

PAIRS = [(one, other) for one in CASTABLE for other in CASTABLE if one != other]
NAMES = sorted({kernel_name(cast_name(*pair)) for pair in PAIRS})

RUN = (
    """
typedef void (*Run)(const Box*, const Form*, u32, const void*);
static Run kernels[] = {"""
    + ", ".join(NAMES)
    + """};
extern "C" void run(int which, u32 blocks, const Box* boxes, const Form* forms, u32 count, const void* table) {
    blockDim.x = 256;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < 256; threadIdx.x++) kernels[which](boxes, forms, count, table);
}
"""
)


@functools.cache
def library() -> ctypes.CDLL:
    return compiled("casts", RUN, Path(tempfile.mkdtemp(prefix="tensorhub-kernels-")))


def converted(cast_: str, form: StridedForm, source: "np.ndarray[Any, Any]", to: "np.ndarray[Any, Any]") -> None:
    """Run the kernel between two arrays of bytes."""
    room, looked_up = np.zeros(TABLES_BYTES, np.uint8), table(cast_)
    tables = BoxTables(memoryview(room))  # type: ignore[arg-type]  # an array of bytes has such a view
    box = DeviceBox(to.ctypes.data, source.ctypes.data, form)
    assert is_possible(box)
    for part in normal_parts(box):
        assert tables.add(part)
    address = None if looked_up is None else ctypes.c_void_p(looked_up.ctypes.data)
    begin = room.ctypes.data
    library().run(
        NAMES.index(kernel_name(cast_)),
        tables.blocks,
        ctypes.c_void_p(begin),
        ctypes.c_void_p(begin + tables.boxes.nbytes),
        tables.count,
        address,
    )


@pytest.mark.parametrize(("from_dtype", "to_dtype"), PAIRS)
def test_all_kinds_of_numbers_get_the_hosts_bits(from_dtype: str, to_dtype: str) -> None:
    source = numbers(from_dtype, 40_000)
    # One length is of whole units, the other is not.
    for length in (len(source) // 8 * 8, len(source) // 8 * 8 - 3):
        given, found = source[:length], np.zeros(length, bits_of(to_dtype))
        sizes = CASTABLE[from_dtype], CASTABLE[to_dtype]
        name = cast_name(from_dtype, to_dtype)
        form = StridedForm((length,), (sizes[1],), (sizes[0],), *sizes, name)
        converted(name, form, given, found)
        expected = np.zeros(length, bits_of(to_dtype))
        cast(given, from_dtype, expected, to_dtype)
        assert (found == expected).all(), [hex(bits) for bits in given[found != expected][:5]]


@pytest.mark.parametrize("columns", [24, 7])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_boxes_within_matrices_are_cast_and_nothing_else_is_touched(columns: int, *, is_transposed: bool) -> None:
    source = numbers("float32", 64 * 64)[: 64 * 64].reshape(64, 64)
    given = source.T if is_transposed else source
    there, here = given[8 : 8 + 30, 16 : 16 + columns], np.full((40, 48), 0xABCD, np.uint16)
    box = here[4 : 4 + 30, 8 : 8 + columns]
    form = StridedForm((30, columns), box.strides, there.strides, 4, 2, "float32>bfloat16")
    converted("float32>bfloat16", form, there, box)
    expected = np.full((40, 48), 0xABCD, np.uint16)
    cast(there, "float32", expected[4 : 4 + 30, 8 : 8 + columns], "bfloat16")
    assert (here == expected).all()


def test_what_the_kernels_do_not_take_is_told_before() -> None:
    form = StridedForm((4,), (2,), (4,), 4, 2, "float32>bfloat16")
    assert is_possible(DeviceBox(2, 4, form))
    assert not is_possible(DeviceBox(1, 4, form))
    assert not is_possible(DeviceBox(2, 2, form))
    assert not is_possible(DeviceBox(2, 4, StridedForm((4,), (2,), (6,), 4, 2, "float32>bfloat16")))
    assert not is_possible(DeviceBox(4, 4, StridedForm((4,), (1,), (4,), 4, 1, "fp8-block-128:values")))
