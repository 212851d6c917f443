"""Digests and copies that a GPU computes are those of the host, for every length and alignment."""

import random

import numpy as np
import pytest
import xxhash
from tests.kit.gpu import address_of, bytes_of, gpu, on_device

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.devices.columns import Columns
from tensorhub_agent.devices.cuda_engine import CudaEngine
from tensorhub_agent.devices.region import DeviceRegion
from tensorhub_common.devices.cuda import CudaDevice

pytestmark = pytest.mark.gpu

MIB = 1024 * 1024
EDGES = [1, 2, 16, 17, 128, 129, 240, 241, 255, 256, 257, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 2049, 65537]
LENGTHS = [*EDGES, MIB, 4 * MIB - 1, 4 * MIB, *(random.Random(4).randrange(1, 200_000) for _ in range(80))]


def columns(base: int, offsets: list[int]) -> Columns:
    return np.asarray(offsets, np.int64) + base


@pytest.fixture(scope="module")
def engine() -> CudaEngine:
    return CudaEngine(gpu())


def laid_out(step: int) -> tuple[list[int], int]:
    """Return where pieces of these lengths begin, each `step` bytes behind the end of the one before, and the end."""
    at, begins = 0, []
    for size in LENGTHS:
        begins.append(at)
        at += size + step
    return begins, at


@pytest.mark.parametrize(("to_shift", "from_shift", "step"), [(0, 0, 0), (0, 0, 3), (5, 8, 1), (8, 3, 7), (16, 32, 0)])
def test_pieces_of_all_lengths_and_alignments(
    device: CudaDevice, engine: CudaEngine, to_shift: int, from_shift: int, step: int
) -> None:
    begins, total = laid_out(step)
    data = random.Random(step).randbytes(total)
    source, destination = on_device(device, data, from_shift), on_device(device, b"\xee" * total, to_shift)
    expected = b"".join(xxhash.xxh3_128_digest(data[at : at + size]) for at, size in zip(begins, LENGTHS, strict=True))
    to, origin = columns(destination.address, begins), columns(source.address, begins)
    assert engine.copy_and_digest(to, origin, columns(0, LENGTHS)) == expected
    wanted = bytearray(b"\xee" * total)
    for at, size in zip(begins, LENGTHS, strict=True):
        wanted[at : at + size] = data[at : at + size]
    assert bytes_of(destination) == wanted
    assert engine.digest(to, columns(0, LENGTHS)) == expected


def test_pieces_of_the_host_are_copied_and_hashed(device: CudaDevice, engine: CudaEngine) -> None:
    begins, total = laid_out(0)
    data = random.Random(9).randbytes(total)
    destination = on_device(device, bytes(total))
    expected = b"".join(xxhash.xxh3_128_digest(data[at : at + size]) for at, size in zip(begins, LENGTHS, strict=True))
    to, origin = columns(destination.address, begins), columns(address_of(data), begins)
    assert engine.receive(to, origin, columns(0, LENGTHS)) == expected
    assert bytes_of(destination) == data


@pytest.mark.parametrize("shift", [0, 5])
def test_pieces_are_hashed_and_go_to_the_host(device: CudaDevice, engine: CudaEngine, shift: int) -> None:
    begins, total = laid_out(0)
    data, landing = random.Random(10).randbytes(total), bytearray(total)
    source = on_device(device, data, shift)
    expected = b"".join(xxhash.xxh3_128_digest(data[at : at + size]) for at, size in zip(begins, LENGTHS, strict=True))
    to, origin = columns(address_of(landing), begins), columns(source.address, begins)
    assert engine.send(to, origin, columns(0, LENGTHS)) == expected
    assert landing == data


def test_more_pieces_than_a_launch_takes(device: CudaDevice, engine: CudaEngine) -> None:
    sizes = [3000] * 2500 + [4 * MIB] * 300
    data = random.Random(5).randbytes(4 * MIB)
    region = on_device(device, data)
    begins = [region.address + (n % 97) for n in range(2500)] + [region.address] * 300
    expected = [xxhash.xxh3_128_digest(data[n % 97 : n % 97 + 3000]) for n in range(2500)]
    expected += [xxhash.xxh3_128_digest(data)] * 300
    assert engine.digest(columns(0, begins), columns(0, sizes)) == b"".join(expected)


def test_a_changed_bit_anywhere_changes_the_digest(device: CudaDevice, engine: CudaEngine) -> None:
    region = on_device(device, random.Random(6).randbytes(2 * MIB))
    stream = device.stream()
    seen = {engine.digest(columns(region.address, [0]), columns(0, [2 * MIB]))}
    for at in [0, 1, 63, 64, 1023, 1024, MIB, 2 * MIB - 64, 2 * MIB - 1]:
        before = bytes_of(region[at : at + 1])[0]
        stream.fill(region.address + at, 1, before ^ 1)
        stream.record().wait()
        seen.add(engine.digest(columns(region.address, [0]), columns(0, [2 * MIB])))
    assert len(seen) == 10


@pytest.mark.parametrize("ends", ["device to device", "host to device", "device to host"])
async def test_the_pool_copies_between_all_kinds_of_memory(device: CudaDevice, ends: str) -> None:
    data = random.Random(7).randbytes(40 * MIB)
    sizes = [4 * MIB] * 9 + [4 * MIB - 100, 99, 1]
    at = [sum(sizes[:n]) for n in range(len(sizes))]
    source = on_device(device, data) if ends.startswith("device") else memoryview(data)
    destination = on_device(device, bytes(40 * MIB)) if ends.endswith("device") else memoryview(bytearray(40 * MIB))
    pool = CopyPool(3)
    try:
        spans = Spans(at, at, sizes)
        found = await pool.copy_and_digest(destination, source, spans).result()
        assert found == b"".join(xxhash.xxh3_128_digest(data[a : a + size]) for a, size in zip(at, sizes, strict=True))
        there = bytes_of(destination) if isinstance(destination, DeviceRegion) else bytes(destination)
        assert there == data
        if isinstance(destination, DeviceRegion):
            assert await pool.digest(destination, spans).result() == found
    finally:
        pool.close()
