"""Whether tests on a GPU can run here, and memory of a GPU for them."""

import functools

import numpy as np

from tensorhub_agent.devices.region import DeviceRegion
from tensorhub_common.devices.cuda import CudaDevice, cuda_device
from tensorhub_common.devices.device import Device, DeviceUnavailable


@functools.cache
def why_no_gpu() -> str:
    """Return why tests on a GPU are skipped; empty where they run."""
    try:
        cuda_device(0)
        import cupy  # noqa: F401, PLC0415
    except (DeviceUnavailable, ImportError) as why:
        return f"no test on a GPU runs here: {why}"
    return ""


def address_of(data: "bytes | bytearray | np.ndarray") -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def on_device(device: Device, data: bytes, shift: int = 0) -> DeviceRegion:
    """Return memory of a device with these bytes, which begin `shift` bytes after its beginning."""
    memory = device.allocate(len(data) + shift)
    stream = device.stream()
    stream.fill(memory.address, memory.nbytes, 0xEE)
    if data:
        stream.copy(memory.address + shift, address_of(data), len(data))
    stream.record().wait()
    return DeviceRegion(device, memory, shift, len(data))


def bytes_of(region: DeviceRegion) -> bytes:
    landing = bytearray(len(region))
    if landing:
        stream = region.device.stream()
        stream.copy(address_of(landing), region.address, len(region))
        stream.record().wait()
    return bytes(landing)


def gpu() -> CudaDevice:
    return cuda_device(0)
