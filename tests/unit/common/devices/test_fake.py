"""The fake device keeps the order that streams and events give, and finds work that nothing orders."""

import contextlib
import ctypes
import gc
import os
import queue
import random
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.devices.device import DeviceError, DeviceMemoryExhausted, DeviceUnavailable
from tensorhub_common.devices.fake import DeviceRace, FakeDevice, FakeMemory, FakeStream, Schedule, Span
from tensorhub_common.devices.registry import device_named

SIZE = 4096
Mistake = Callable[[FakeStream, FakeStream, FakeMemory, FakeMemory], None]


def bytes_at(address: int, nbytes: int = SIZE) -> bytes:
    return ctypes.string_at(address, nbytes)


def memories(device: FakeDevice, count: int) -> list[FakeMemory]:
    return [device.allocate(SIZE) for _ in range(count)]


@pytest.fixture(params=["lazy", "eager", 1, 2, 3])
def device(request: pytest.FixtureRequest) -> FakeDevice:
    schedule: Schedule = random.Random(request.param) if isinstance(request.param, int) else request.param
    return FakeDevice(schedule=schedule)


def test_work_of_one_stream_is_done_in_its_order(device: FakeDevice) -> None:
    first, second = memories(device, 2)
    stream = device.stream()
    stream.fill(first.address, SIZE, 7)
    stream.copy(second.address, first.address, SIZE)
    stream.fill(first.address, SIZE, 9)
    stream.record().wait()
    assert bytes_at(second.address) == b"\x07" * SIZE
    assert bytes_at(first.address) == b"\x09" * SIZE


def test_an_event_orders_two_streams(device: FakeDevice) -> None:
    first, second = memories(device, 2)
    writes, copies = device.stream(), device.stream()
    writes.fill(first.address, SIZE, 7)
    copies.wait_for(writes.record())
    copies.copy(second.address, first.address, SIZE)
    copies.record().wait()
    assert bytes_at(second.address) == b"\x07" * SIZE


def test_waiting_on_a_stream_that_only_waits_waits_for_the_other(device: FakeDevice) -> None:
    (memory,) = memories(device, 1)
    writes, other = device.stream(), device.stream()
    writes.fill(memory.address, SIZE, 5)
    other.wait_for(writes.record())
    other.record().wait()
    assert bytes_at(memory.address) == b"\x05" * SIZE


def test_a_lazy_device_does_nothing_that_nobody_waits_for() -> None:
    device = FakeDevice()
    (memory,) = memories(device, 1)
    stream = device.stream()
    stream.fill(memory.address, SIZE, 1)
    event = stream.record()
    assert bytes_at(memory.address) == bytes(SIZE)
    assert not event.is_done()
    event.wait()
    assert event.is_done()


def _missing_wait(writes: FakeStream, other: FakeStream, first: FakeMemory, second: FakeMemory) -> None:
    writes.fill(first.address, SIZE, 7)
    other.copy(second.address, first.address, SIZE)


def _wrong_stream(writes: FakeStream, other: FakeStream, first: FakeMemory, second: FakeMemory) -> None:
    event = other.record()
    writes.fill(first.address, SIZE, 7)
    other.wait_for(event)
    other.copy(second.address, first.address, SIZE)


def _overwritten_while_read(writes: FakeStream, other: FakeStream, first: FakeMemory, second: FakeMemory) -> None:
    other.copy(second.address, first.address, SIZE)
    writes.fill(first.address, SIZE, 7)


def _two_writers(writes: FakeStream, other: FakeStream, first: FakeMemory, second: FakeMemory) -> None:
    writes.fill(second.address, SIZE, 7)
    other.copy(second.address, first.address, SIZE)


def _closed_while_read(_: FakeStream, other: FakeStream, first: FakeMemory, second: FakeMemory) -> None:
    other.copy(second.address, first.address, SIZE)
    first.close()


@pytest.mark.parametrize(
    "mistake", [_missing_wait, _wrong_stream, _overwritten_while_read, _two_writers, _closed_while_read]
)
def test_work_that_nothing_orders_is_found_whenever_it_is_done(device: FakeDevice, mistake: Mistake) -> None:
    first, second = memories(device, 2)
    with pytest.raises(DeviceRace, match="not ordered"):
        mistake(device.stream(), device.stream(), first, second)


def test_a_wait_of_the_host_orders_everything_after_it(device: FakeDevice) -> None:
    first, second = memories(device, 2)
    writes, other = device.stream(), device.stream()
    writes.fill(first.address, SIZE, 7)
    writes.record().wait()
    other.copy(second.address, first.address, SIZE)
    other.record().wait()
    first.close()
    assert bytes_at(second.address) == b"\x07" * SIZE


def test_two_readers_need_no_order(device: FakeDevice) -> None:
    first, second, third = memories(device, 3)
    one, other = device.stream(), device.stream()
    ctypes.memset(first.address, 4, SIZE)
    one.copy(second.address, first.address, SIZE)
    other.copy(third.address, first.address, SIZE)
    one.record().wait()
    other.record().wait()
    assert bytes_at(second.address) == bytes_at(third.address) == b"\x04" * SIZE


def test_the_host_is_held_to_the_order_too(device: FakeDevice) -> None:
    (memory,) = memories(device, 1)
    stream = device.stream()
    stream.fill(memory.address, SIZE, 7)
    with pytest.raises(DeviceRace):
        device.host_touches(memory.address, 1, "a look", writes=False)
    stream.record().wait()
    device.host_touches(memory.address, 1, "a look", writes=True)


def test_memory_that_is_dropped_under_work_stays_until_the_process_ends() -> None:
    device = FakeDevice()
    stream, kept = device.stream(), device.allocate(SIZE)
    dropped = device.allocate(SIZE)
    stream.copy(kept.address, dropped.address, SIZE)
    with pytest.raises(DeviceRace, match="closing memory is not ordered behind a copy"):
        dropped.close()
    del dropped
    gc.collect()
    stream.record().wait()
    assert bytes_at(kept.address) == bytes(SIZE)


@contextlib.contextmanager
def at_once(act: Callable[[], object], threads: int = 4) -> Iterator[None]:
    """Run in several threads, which take turns as often as they can."""
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        running = [threading.Thread(target=act) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        yield
    finally:
        sys.setswitchinterval(switch_s)


def test_threads_that_make_streams_at_once_get_one_each() -> None:
    """A shared stream loses work: what two threads give it between two turns is behind the same work, not in a row."""
    device, handles = FakeDevice(), queue.SimpleQueue[int]()

    def make() -> None:
        for _ in range(500):
            handles.put(device.stream().handle)

    with at_once(make):
        assert len({handles.get_nowait() for _ in range(2000)}) == 2000


def test_work_that_threads_give_to_one_stream_is_done_in_a_row() -> None:
    device = FakeDevice()
    stream, memory = device.stream(), device.allocate(SIZE)
    failures = queue.SimpleQueue[DeviceRace]()

    def give() -> None:
        try:
            for _ in range(200):
                stream.fill(memory.address, SIZE, 3)
        except DeviceRace as race:
            failures.put(race)

    with at_once(give):
        assert failures.empty()
    stream.record().wait()
    memory.close()


def test_memory_is_another_devices_by_its_descriptor_and_outlives_its_maker() -> None:
    maker, reader = FakeDevice(), FakeDevice()
    memory = maker.allocate(SIZE)
    ctypes.memset(memory.address, 3, SIZE)
    fd = memory.export()
    memory.close()
    memory.close()
    imported = reader.import_memory(fd, SIZE, readonly=True)
    os.close(fd)
    assert bytes_at(imported.address) == b"\x03" * SIZE
    assert imported.readonly
    with pytest.raises(DeviceError, match="keep its descriptor"):
        imported.export()


def test_memory_is_counted_in_granules_and_refused_beyond_the_limit() -> None:
    device = FakeDevice(bytes_max=4 * FakeDevice.granule_bytes)
    kept = [device.allocate(1) for _ in range(4)]
    with pytest.raises(DeviceMemoryExhausted, match="free"):
        device.allocate(1)
    kept.pop().close()
    assert device.free_bytes() == FakeDevice.granule_bytes
    assert device.allocate(FakeDevice.granule_bytes).nbytes == FakeDevice.granule_bytes


def test_too_short_a_descriptor_is_refused() -> None:
    device = FakeDevice()
    fd = device.allocate(SIZE).export()
    with pytest.raises(DeviceError, match="has 2097152 bytes"):
        device.import_memory(fd, FakeDevice.granule_bytes + 1, readonly=False)
    os.close(fd)


def test_failed_work_fails_the_wait_and_all_work_behind_it(device: FakeDevice) -> None:
    (memory,) = memories(device, 1)
    stream = device.stream()

    def kernel() -> None:
        raise ValueError("an illegal address")

    stream.run("a kernel", kernel, (Span(memory.address, memory.address + 1, writes=True),))
    stream.fill(memory.address, SIZE, 7)
    with pytest.raises(DeviceError, match="illegal address"):
        stream.record().wait()
    assert bytes_at(memory.address) == bytes(SIZE)


def test_a_range_is_pinned_once() -> None:
    device = FakeDevice()
    pinned = device.pin(4096, 8192)
    with pytest.raises(DeviceError, match="pinned already"):
        device.pin(8192, 4096)
    pinned.close()
    pinned.close()
    assert device.pinned_bytes == 0


def test_devices_are_found_by_their_names() -> None:
    assert device_named("GPU-fake-1") is device_named("GPU-fake-1")
    with pytest.raises(DeviceUnavailable, match="numbered"):
        device_named("GPU-fake-99")
    with pytest.raises(DeviceUnavailable, match="GPU-fake-0"):
        device_named("GPU-fake-x")


def test_a_kernel_does_not_reach_another_devices_memory_and_a_copy_does() -> None:
    here, there = FakeDevice(0, schedule="eager"), FakeDevice(1, schedule="eager")
    (mine,), (other,) = memories(here, 1), memories(there, 1)
    stream = here.stream()
    stream.copy(mine.address, other.address, SIZE)
    with pytest.raises(DeviceError, match="touches memory of GPU-fake-1, which it does not reach"):
        stream.run("a kernel", lambda: None, (Span(other.address + 5, other.address + 6, writes=False),))
    address = other.address
    other.close()
    stream.run("a kernel", lambda: None, (Span(address, address + 1, writes=False),))


@given(st.data())
def test_spans_conflict_where_they_share_a_byte_and_one_writes_it(data: st.DataObject) -> None:
    """Exactly, for rows of one stride; of different strides a conflict may be told where there is none."""

    def drawn() -> tuple[Span, set[int]]:
        stride = data.draw(st.sampled_from([0, 7, 7, 7, 5]))
        begin = data.draw(st.integers(0, 40))
        if not stride:
            nbytes = data.draw(st.integers(1, 12))
            return Span(begin, begin + nbytes, data.draw(st.booleans())), {*range(begin, begin + nbytes)}
        rows, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, stride))
        end = begin + (rows - 1) * stride + width
        touched = {begin + row * stride + at for row in range(rows) for at in range(width)}
        return Span(begin, end, data.draw(st.booleans()), stride, width), touched

    (one, here), (other, there) = drawn(), drawn()
    is_shared = bool(here & there) and (one.writes or other.writes)
    assert one.conflicts(other) == other.conflicts(one)
    if one.stride and other.stride and one.stride != other.stride:
        assert one.conflicts(other) or not is_shared
    else:
        assert one.conflicts(other) == is_shared
