"""Boxes where an end, or both, is memory of a GPU come as between two memories of the host, converted or not."""

import asyncio
import ctypes
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.agent.boxes import answer, forms, regions, source_of

from tensorhub_agent.compute import device_boxes
from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.strided_copy import copy_boxes
from tensorhub_agent.devices.boxes import DeviceBox
from tensorhub_agent.devices.fake_engine import FakeEngine
from tensorhub_agent.devices.region import DeviceRegion
from tensorhub_common.devices.fake import DeviceRace, FakeDevice, FakeEvent, FakeStream
from tensorhub_common.programs.regions import StridedCopies, StridedForm

Ends = tuple[int | None, int | None]
ENDS: list[Ends] = [(0, 0), (0, None), (None, 0), (0, 1)]


def on_device(device: FakeDevice, data: bytes) -> DeviceRegion:
    memory = device.allocate(len(data))
    ctypes.memmove(memory.address, data, len(data))
    return DeviceRegion.of(device, memory)


def brought(nbytes: int, data: bytes, boxes: StridedCopies, to_device: int | None, from_device: int | None) -> bytes:
    """Copy boxes between memories of these devices, None being the host; return what is in the destination then."""
    devices = [FakeDevice(ordinal, schedule=random.Random(nbytes)) for ordinal in range(2)]

    async def run() -> bytes:
        pool = CopyPool(2)
        before = b"\xaa" * nbytes
        source = memoryview(data) if from_device is None else on_device(devices[from_device], data)
        destination = memoryview(bytearray(before)) if to_device is None else on_device(devices[to_device], before)
        await copy_boxes(pool, destination, source, boxes).done()
        pool.close()
        if isinstance(destination, DeviceRegion):
            return ctypes.string_at(destination.address, nbytes)
        return bytes(destination)

    return asyncio.run(run())


@given(regions(), st.sampled_from(ENDS))
@settings(deadline=None)
def test_random_boxes_are_numpys(drawn: tuple[StridedCopies, int, int], ends: Ends) -> None:
    boxes, nbytes, origin_nbytes = drawn
    source = bytes(source_of(origin_nbytes))
    assert brought(nbytes, source, boxes, *ends) == answer(b"\xaa" * nbytes, memoryview(source), boxes)


@pytest.mark.parametrize("ends", ENDS)
@given(form=forms(30_000))
@settings(deadline=None, max_examples=30)
def test_a_box_is_the_same_however_it_is_cut(ends: Ends, form: StridedForm) -> None:
    whole, device_boxes.STEP_BYTES_MAX = device_boxes.STEP_BYTES_MAX, 700  # type: ignore[misc]
    try:
        source, boxes = bytes(source_of(form.origin_span_bytes)), StridedCopies([0], [0], [form])
        expected = answer(b"\xaa" * form.span_bytes, memoryview(source), boxes)
        assert brought(form.span_bytes, source, boxes, *ends) == expected
    finally:
        device_boxes.STEP_BYTES_MAX = whole  # type: ignore[misc]


def test_boxes_that_lie_between_each_others_rows_are_no_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads copy columns of one matrix, each on a stream of its own, and neither waits for the other."""
    device = FakeDevice()
    monkeypatch.setattr(FakeStream, "record", lambda _: FakeEvent(device, None))
    memories = device.allocate(4096), device.allocate(4096)
    to, origin = (each.address for each in memories)
    columns = StridedForm((4, 8), (32, 1), (8, 1), 1, 1)
    FakeEngine(device).copy_boxes([DeviceBox(to, origin, columns)])
    FakeEngine(device).copy_boxes([DeviceBox(to + 8, origin, columns)])
    with pytest.raises(DeviceRace, match="a copy of a box on stream 3 is not ordered behind a copy of a box"):
        FakeEngine(device).copy_boxes([DeviceBox(to + 12, origin, columns)])
