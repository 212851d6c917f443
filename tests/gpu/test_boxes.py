"""Strided boxes that a GPU copies are numpy's, between all kinds of memory, converted or not."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kit.gpu import bytes_of, gpu, on_device
from tests.unit.agent.boxes import answer, dense, regions, rows, source_of

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.strided_copy import copy_boxes
from tensorhub_agent.devices.region import DeviceRegion
from tensorhub_common.devices.cuda import CudaDevice
from tensorhub_common.programs.regions import StridedCopies, StridedForm

pytestmark = pytest.mark.gpu

MIB = 1024 * 1024
ENDS = [(True, True), (True, False), (False, True)]


def brought(nbytes: int, data: bytes, boxes: StridedCopies, ends: tuple[bool, bool]) -> bytes:
    """Copy boxes between memories of these kinds; return what is in the destination then."""

    async def run() -> bytes:
        pool, before = CopyPool(2), b"\xaa" * nbytes
        source = on_device(gpu(), data) if ends[1] else memoryview(data)
        destination = on_device(gpu(), before) if ends[0] else memoryview(bytearray(before))
        await copy_boxes(pool, destination, source, boxes).done()
        pool.close()
        found = bytes_of(destination) if isinstance(destination, DeviceRegion) else bytes(destination)
        for region in (source, destination):
            if isinstance(region, DeviceRegion):
                region.memory.close()
        return found

    return asyncio.run(run())


@given(regions(), st.sampled_from(ENDS))
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck), database=None)
def test_random_boxes_are_numpys(drawn: tuple[StridedCopies, int, int], ends: tuple[bool, bool]) -> None:
    boxes, nbytes, origin_nbytes = drawn
    source = bytes(source_of(origin_nbytes))
    assert brought(nbytes, source, boxes, ends) == answer(b"\xaa" * nbytes, memoryview(source), boxes)


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize(
    "form",
    [
        rows(3000, 2, 6, 10),
        rows(1000, 257, 300, 1001),
        rows(700, 4096, 9000, 4096),
        rows(3, 3 * MIB, 4 * MIB, 3 * MIB + 5),
        rows(1, 9 * MIB + 1, 1, 1),
        dense((700, 900), 4, (4, 2800)),
        dense((5, 40, 30, 16), 2, (100_000, 32, 1300, 2)),
    ],
)
def test_boxes_of_many_kinds(device: CudaDevice, form: StridedForm, ends: tuple[bool, bool]) -> None:
    data = bytes(source_of(form.origin_span_bytes + 11))
    nbytes, boxes = form.span_bytes + 20, StridedCopies([13], [7], [form])
    assert brought(nbytes, data, boxes, ends) == answer(b"\xaa" * nbytes, memoryview(data), boxes)


def test_more_boxes_than_a_launch_takes(device: CudaDevice) -> None:
    form = StridedForm((5,), (2,), (3,), 2, 2)
    count = 10_000
    boxes = StridedCopies(list(range(0, 20 * count, 20)), list(range(0, 30 * count, 30)), [form] * count)
    data = bytes(source_of(30 * count))
    assert brought(20 * count, data, boxes, (True, True)) == answer(b"\xaa" * 20 * count, memoryview(data), boxes)
