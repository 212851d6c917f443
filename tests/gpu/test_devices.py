"""The promises of `Device`, on a real one: sharing by descriptors, pinning, and the order of work."""

import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.kit.gpu import address_of, bytes_of, on_device

from tensorhub_agent.devices.region import DeviceRegion
from tensorhub_common.devices.cuda import CudaDevice, cuda_device_of
from tensorhub_common.devices.device import DeviceError, DeviceMemoryExhausted, DeviceUnavailable

pytestmark = pytest.mark.gpu

MIB = 1024 * 1024

MAKER = """
import os, socket, sys, time
from tensorhub_common.devices.cuda import cuda_device
device = cuda_device(0)
memory = device.allocate({nbytes})
stream = device.stream()
stream.fill(memory.address, {nbytes}, 7)
stream.record().wait()
fd = memory.export()
with socket.socket(fileno=int(sys.argv[1])) as channel:
    socket.send_fds(channel, [b"x"], [fd])
    time.sleep(60)
"""


def made_elsewhere(nbytes: int) -> tuple["subprocess.Popen[bytes]", int]:
    """Return a process that has made memory full of sevens, and a descriptor of it."""
    here, there = socket.socketpair()
    with here, there:
        code = MAKER.format(nbytes=nbytes)
        process = subprocess.Popen([sys.executable, "-c", code, str(there.fileno())], pass_fds=[there.fileno()])
        here.settimeout(60)
        _, fds, _, _ = socket.recv_fds(here, 1, 1)
    return process, fds[0]


def test_memory_of_another_process_is_the_same_bytes_and_outlives_it(device: CudaDevice) -> None:
    process, fd = made_elsewhere(5 * MIB)
    try:
        early = device.import_memory(fd, 5 * MIB, readonly=True)
        assert bytes_of(DeviceRegion.of(device, early)) == b"\x07" * 5 * MIB
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert bytes_of(DeviceRegion.of(device, early)) == b"\x07" * 5 * MIB
    early.close()
    # The descriptor alone keeps it, and gives it to new readers.
    late = device.import_memory(fd, 5 * MIB, readonly=False)
    stream = device.stream()
    stream.fill(late.address, MIB, 9)
    stream.record().wait()
    assert bytes_of(DeviceRegion.of(device, late)) == b"\x09" * MIB + b"\x07" * 4 * MIB
    with pytest.raises(DeviceError, match="cuMemExportToShareableHandle"):
        late.export()
    third = device.import_memory(fd, 5 * MIB, readonly=True)
    os.close(fd)
    late.close()
    assert bytes_of(DeviceRegion.of(device, third))[:MIB] == b"\x09" * MIB
    third.close()


def test_memory_is_free_again_when_nobody_has_it(device: CudaDevice) -> None:
    before = device.free_bytes()
    for _ in range(20):
        memory = device.allocate(2 * 1024 * MIB)
        assert device.free_bytes() <= before - 2 * 1024 * MIB + 64 * MIB
        fd = memory.export()
        memory.close()
        os.close(fd)
    assert device.free_bytes() >= before - 64 * MIB


def test_too_much_memory_is_refused_in_one_sentence(device: CudaDevice) -> None:
    with pytest.raises(DeviceMemoryExhausted, match=r"do not fit on GPU-.* bytes free"):
        device.allocate(device.total_bytes() + 1)


def test_a_descriptor_that_is_no_memory_is_refused(device: CudaDevice) -> None:
    fd = os.memfd_create("no-memory")
    with pytest.raises(DeviceError, match="cuMemImportFromShareableHandle"):
        device.import_memory(fd, MIB, readonly=True)
    os.close(fd)


def test_a_device_is_found_by_its_uuid(device: CudaDevice) -> None:
    assert cuda_device_of(device.uuid) is device
    with pytest.raises(DeviceUnavailable, match="can be seen"):
        cuda_device_of("GPU-00000000-0000-0000-0000-000000000000")


def test_work_on_two_streams_is_ordered_by_an_event(device: CudaDevice) -> None:
    source, destination = on_device(device, bytes(256 * MIB)), on_device(device, bytes(256 * MIB))
    first, second = device.stream(), device.stream()
    for value in range(1, 20):
        first.wait_for(second.record())
        first.fill(source.address, 256 * MIB, value)
        second.wait_for(first.record())
        second.copy(destination.address, source.address, 256 * MIB)
        event = second.record()
        event.wait()
        assert event.is_done()
        assert bytes_of(destination[:4096]) == bytes([value]) * 4096
        assert bytes_of(destination[-4096:]) == bytes([value]) * 4096


@pytest.mark.parametrize("readonly", [False, True])
def test_a_shared_segment_is_pinned_and_copied_both_ways(device: CudaDevice, *, readonly: bool) -> None:
    shm = Path(f"/dev/shm/tensorhub-test-{os.getpid()}")  # noqa: S108
    data = random.Random(1).randbytes(8 * MIB)
    try:
        shm.write_bytes(data)
        with shm.open("r+b") as file:
            mapping = mmap.mmap(file.fileno(), 8 * MIB, mmap.MAP_SHARED)
        address = address_of(mapping)  # type: ignore[arg-type]
        try:
            pinned = device.pin(address, 8 * MIB, readonly=readonly)
        except DeviceError as why:
            if readonly:
                pytest.skip(f"this GPU pins nothing read-only: {why}")
            raise
        with pytest.raises(DeviceError, match="cuMemHostRegister"):
            device.pin(address, 8 * MIB)
        region = on_device(device, bytes(8 * MIB))
        stream = device.stream()
        stream.copy(region.address, address, 8 * MIB)
        stream.record().wait()
        assert bytes_of(region) == data
        pinned.close()
        pinned.close()
        device.pin(address, 8 * MIB).close()
    finally:
        shm.unlink()


def test_a_wait_sleeps(device: CudaDevice) -> None:
    region = on_device(device, bytes(1024 * MIB))
    stream = device.stream()
    for value in range(200):
        stream.fill(region.address, 1024 * MIB, value)
    began, cpu = time.perf_counter(), time.thread_time()
    stream.record().wait()
    took, used = time.perf_counter() - began, time.thread_time() - cpu
    assert used < max(0.5 * took, 0.005)


def test_what_was_there_before_is_not_torn_by_copies_of_many_threads(device: CudaDevice) -> None:
    data = [np.random.default_rng(n).bytes(4 * MIB) for n in range(8)]

    def copied(number: int) -> bool:
        source = on_device(device, data[number])
        destination = on_device(device, bytes(4 * MIB))
        stream = device.stream()
        for _ in range(50):
            stream.copy(destination.address, source.address, 4 * MIB)
        stream.record().wait()
        return bytes_of(destination) == data[number]

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(copied, range(8)))
