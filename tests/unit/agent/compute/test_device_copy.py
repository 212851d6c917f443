"""Copies and digests where an end, or both, is memory of a GPU: the same bytes and digests as between host memories."""

import ctypes
import os
import random

import pytest
import xxhash
from tests.kit.fakes import LastResort

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.devices import fake_engine
from tensorhub_agent.devices.region import DeviceRegion
from tensorhub_common.devices.device import DeviceLost
from tensorhub_common.devices.fake import FakeDevice, FakeEvent

SIZE = 3 * 1024 * 1024
SPANS = Spans([0, 100, 5000, 1024 * 1024], [7, 2 * 1024 * 1024, 0, 4096], [100, 4900, 300_000, 1024 * 1024])


@pytest.fixture(params=["lazy", "eager", 1])
def device(request: pytest.FixtureRequest) -> FakeDevice:
    return FakeDevice(schedule=random.Random(request.param) if isinstance(request.param, int) else request.param)


def on_device(device: FakeDevice, data: bytes) -> DeviceRegion:
    memory = device.allocate(len(data))
    ctypes.memmove(memory.address, data, len(data))
    return DeviceRegion.of(device, memory)


def bytes_of(region: DeviceRegion | memoryview) -> bytes:
    return bytes(region) if isinstance(region, memoryview) else ctypes.string_at(region.address, region.nbytes)


def expected(data: bytes, before: bytes) -> bytes:
    after = bytearray(before)
    for to, origin, nbytes in zip(SPANS.to, SPANS.origin, SPANS.nbytes, strict=True):
        after[to : to + nbytes] = data[origin : origin + nbytes]
    return bytes(after)


def digests_of(data: bytes) -> bytes:
    cuts = zip(SPANS.origin, SPANS.nbytes, strict=True)
    return b"".join(xxhash.xxh3_128_digest(data[origin : origin + nbytes]) for origin, nbytes in cuts)


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize(("to_device", "from_device"), [(True, True), (True, False), (False, True)])
async def test_spans_arrive_with_the_digests_of_the_host(
    device: FakeDevice, *, to_device: bool, from_device: bool, digests: bool
) -> None:
    data = random.Random(1).randbytes(SIZE)
    source = on_device(device, data) if from_device else memoryview(data)
    destination = on_device(device, b"\xee" * SIZE) if to_device else memoryview(bytearray(b"\xee" * SIZE))
    pool = CopyPool(2)
    found = await pool.copy_and_digest(destination, source, SPANS, digests=digests).result()
    assert bytes_of(destination) == expected(data, b"\xee" * SIZE)
    assert found == (digests_of(data) if digests else b"")
    pool.close()


async def test_spans_come_from_another_device(device: FakeDevice) -> None:
    """A kernel of the one that they come to does not reach them there."""
    data, other = random.Random(8).randbytes(SIZE), FakeDevice(1)
    pool, destination = CopyPool(2), on_device(device, b"\xee" * SIZE)
    assert await pool.copy_and_digest(destination, on_device(other, data), SPANS).result() == digests_of(data)
    assert bytes_of(destination) == expected(data, b"\xee" * SIZE)
    pool.close()


async def test_memory_is_hashed_where_it_is(device: FakeDevice) -> None:
    data = random.Random(2).randbytes(SIZE)
    pool = CopyPool(2)
    spans = Spans(SPANS.origin, SPANS.origin, SPANS.nbytes)
    assert await pool.digest(on_device(device, data), spans).result() == digests_of(data)
    pool.close()


async def test_a_part_of_a_region_is_the_same_memory(device: FakeDevice) -> None:
    data = random.Random(3).randbytes(SIZE)
    whole = on_device(device, data)
    part = whole[4096:8192]
    assert (len(part), part.address - whole.address, bytes_of(part[1:3])) == (4096, 4096, data[4097:4099])
    with pytest.raises(ValueError, match="step"):
        whole[::2]


async def test_what_does_not_fit_is_refused_and_nothing_is_copied(device: FakeDevice) -> None:
    destination, source = on_device(device, bytes(SIZE)), on_device(device, b"\x01" * SIZE)
    pool = CopyPool(1)
    with pytest.raises(ValueError, match="does not fit"):
        pool.copy_and_digest(destination, source, Spans([0, SIZE - 1], [0, 0], [10, 2]))
    assert bytes_of(destination) == bytes(SIZE)
    pool.close()


async def test_read_only_memory_is_refused(device: FakeDevice) -> None:
    owner = device.allocate(SIZE)
    fd = owner.export()
    region = DeviceRegion.of(device, device.import_memory(fd, SIZE, readonly=True))
    pool = CopyPool(1)
    with pytest.raises(ValueError, match="can't be written"):
        pool.copy_and_digest(region, memoryview(bytes(SIZE)), SPANS)
    pool.close()


# Planted bugs: a reader compares the digests that it gets with those of the version, and these show each.


async def _read(device: FakeDevice, source: DeviceRegion) -> tuple[bytes, bytes]:
    """Copy a region as a reader does; return the digest of all of it, and the bytes that are there then."""
    destination, pool = on_device(device, b"\xee" * SIZE), CopyPool(1)
    try:
        return await pool.copy_and_digest(destination, source, Spans([0], [0], [SIZE])).result(), bytes_of(destination)
    finally:
        pool.close()


async def test_a_wait_that_is_missing_is_found_by_the_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    data, device = random.Random(4).randbytes(SIZE), FakeDevice()
    source = on_device(device, data)
    with monkeypatch.context() as patch:
        patch.setattr(FakeEvent, "wait", lambda _: None)
        digest, after = await _read(device, source)
    assert after != data
    assert digest != xxhash.xxh3_128_digest(data)


async def test_digests_of_the_old_bytes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    data, device = random.Random(5).randbytes(SIZE), FakeDevice()
    source = on_device(device, data)

    def digest_first(found: list[bytes], number: int, to: int, origin: int, nbytes: int) -> None:
        found[number] = xxhash.xxh3_128_digest(ctypes.string_at(to, nbytes))
        ctypes.memmove(to, origin, nbytes)

    monkeypatch.setattr(fake_engine, "_digest", digest_first)
    digest, after = await _read(device, source)
    assert after == data
    assert digest != xxhash.xxh3_128_digest(data)


async def test_a_stale_descriptor_is_found_by_the_digests() -> None:
    """The holder has published in other memory, and the reader still has the descriptor of what it held before."""
    device, old, new = FakeDevice(), random.Random(6).randbytes(SIZE), random.Random(7).randbytes(SIZE)
    before, after = on_device(device, old), on_device(device, new)
    stale = before.memory.export()
    before.memory.close()
    digest, brought = await _read(device, DeviceRegion.of(device, device.import_memory(stale, SIZE, readonly=True)))
    os.close(stale)
    assert brought == old
    assert digest != xxhash.xxh3_128_digest(bytes_of(after))


async def test_a_gpu_that_is_lost_ends_the_process_and_other_work_goes_on_until_then(
    monkeypatch: pytest.MonkeyPatch, last_resort: LastResort
) -> None:
    data, device, pool = random.Random(9).randbytes(SIZE), FakeDevice(), CopyPool(2)
    source, destination = on_device(device, data), on_device(device, bytes(SIZE))

    def lost(*_: object) -> None:
        raise DeviceLost("cuEventSynchronize failed: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(FakeEvent, "wait", lost)
        with pytest.raises(DeviceLost, match="illegal memory access"):
            await pool.copy_and_digest(destination, source, SPANS).result()
    fault = await last_resort.wait()
    assert (fault.owner, type(fault.error)) == ("copying", DeviceLost)
    landing = memoryview(bytearray(SIZE))
    assert await pool.copy_and_digest(landing, memoryview(data), SPANS).result() == digests_of(data)
    pool.close()


async def test_a_gpu_that_is_lost_in_the_background_ends_the_process_too(last_resort: LastResort) -> None:
    pool = CopyPool(1)

    def lost() -> None:
        raise DeviceLost("cuEventSynchronize failed: an illegal memory access was encountered")

    with pytest.raises(DeviceLost, match="illegal memory access"):
        await pool.background(lost)
    assert (await last_resort.wait()).owner == "copying"
    pool.close()
