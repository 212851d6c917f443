"""The kernel that copies boxes, compiled for the CPU: its boxes are numpy's, and nothing else is touched."""

import ctypes
import functools
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.compiled_kernels import compiled
from tests.unit.agent.boxes import answer, regions, source_of

from tensorhub_agent.devices.boxes import DeviceBox
from tensorhub_agent.devices.kernels.boxes import TABLES_BYTES, BoxTables, normal_parts
from tensorhub_common.programs.regions import StridedCopies

RUN = """
extern "C" void run(u32 blocks, const Box* boxes, const Form* forms, u32 count) {
    blockDim.x = 256;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < 256; threadIdx.x++) copy_boxes(boxes, forms, count);
}
"""


@functools.cache
def library() -> ctypes.CDLL:
    return compiled("boxes", RUN, Path(tempfile.mkdtemp(prefix="tensorhub-kernels-")))


def address_of(array: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> int:
    return int(array.ctypes.data)


@given(drawn=regions(), shifts=st.tuples(st.integers(0, 31), st.integers(0, 31)))
@settings(deadline=None)
def test_random_boxes_are_numpys(drawn: tuple[StridedCopies, int, int], shifts: tuple[int, int]) -> None:
    boxes, nbytes, origin_nbytes = drawn
    data = bytes(source_of(origin_nbytes))
    source, destination = np.zeros(origin_nbytes + 64, np.uint8), np.full(nbytes + 64, 0xAA, np.uint8)
    to_shift, from_shift = shifts
    source[from_shift : from_shift + origin_nbytes] = np.frombuffer(data, np.uint8)
    to, origin = address_of(destination) + to_shift, address_of(source) + from_shift
    room = np.zeros(TABLES_BYTES, np.uint8)
    tables = BoxTables(memoryview(room))  # type: ignore[arg-type]  # an array of bytes has such a view
    for begin, from_, form in zip(boxes.to, boxes.origin, boxes.form, strict=True):
        for part in normal_parts(DeviceBox(to + begin, origin + from_, form)):
            assert tables.add(part)
    forms = address_of(room) + tables.boxes.nbytes
    library().run(tables.blocks, ctypes.c_void_p(address_of(room)), ctypes.c_void_p(forms), tables.count)
    expected = answer(b"\xaa" * nbytes, memoryview(data), boxes)
    assert destination[to_shift : to_shift + nbytes].tobytes() == expected
    assert (destination[:to_shift] == 0xAA).all()
    assert (destination[to_shift + nbytes :] == 0xAA).all()
