"""The kernels for fp8, compiled for the CPU: values, scales and largest magnitudes are the host's, bit for bit."""

import ctypes
import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from tests.kit.compiled_kernels import compiled
from tests.kit.fp8_boxes import KINDS, SHAPES, boxes

from tensorhub_agent.devices.boxes import DeviceBox, is_possible
from tensorhub_agent.devices.kernels.fp8 import Tables
from tensorhub_common.layout.casts import FP8_SOURCES

RUN = """
static const Matrix* all;
static const Scheme* how;
static u32 many;
#define BODIES(name) \\
    static void find_##name() { largest_##name(all, many); } \\
    static void fill_##name() { values_##name(all, many, how); }
BODIES(float32)
BODIES(bfloat16)
BODIES(float16)
static void lay_out() { scales(all, many, how); }
static void (*bodies[])() = {
    find_float32, find_bfloat16, find_float16, fill_float32, fill_bfloat16, fill_float16, lay_out};
extern "C" void run(int which, u32 groups, const Matrix* matrices, u32 count, const Scheme* scheme) {
    all = matrices, many = count, how = scheme;
    for (blockIdx.x = 0; blockIdx.x < groups; blockIdx.x++) run_group(256, blockIdx.x, bodies[which]);
}
"""


KERNELS = ("float32", "bfloat16", "float16")


@functools.cache
def library() -> ctypes.CDLL:
    return compiled("fp8", RUN, Path(tempfile.mkdtemp(prefix="tensorhub-kernels-")))


def computed(box: DeviceBox) -> None:
    """Do what `Fp8Computer` does, with memory of the host."""
    assert is_possible(box)
    tables, scheme = Tables([box]), Tables([box]).scheme()
    amax = np.zeros(tables.amax_count, np.float32)
    tables.place(amax.ctypes.data)

    def launch(which: int, groups: int) -> None:
        matrices, how = (ctypes.c_void_p(each.ctypes.data) for each in (tables.matrices, scheme))
        library().run(which, groups, matrices, len(tables.matrices), how)

    number = KERNELS.index(tables.from_dtype)
    if tables.given:
        amax[:] = np.frombuffer(tables.given, np.float32)
    else:
        launch(number, tables.tiles)
    if tables.kind.is_scales:
        launch(6, len(tables.matrices))
    else:
        launch(3 + number, tables.tiles)


@pytest.mark.parametrize(
    "shape", [SHAPES[1], *(pytest.param(each, marks=pytest.mark.long) for each in SHAPES if each != SHAPES[1])]
)
@pytest.mark.parametrize("name", sorted(KINDS))
@pytest.mark.parametrize("dtype", FP8_SOURCES)
def test_boxes_are_the_hosts(dtype: str, name: str, shape: tuple[int, ...]) -> None:
    for box in boxes(dtype, name, shape):
        found = box.before.copy()
        computed(DeviceBox(found.ctypes.data + box.to, box.source.ctypes.data, box.form, box.amax))
        if KINDS[name].is_amax:
            # Which of several NaN is the largest depends on how a box was cut.
            for each in (found, box.after):
                floats = each.view(np.float32)
                floats[np.isnan(floats)] = np.nan
        assert (found == box.after).all(), box.form
