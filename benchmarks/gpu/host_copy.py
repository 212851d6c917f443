"""Copies between tensors of a GPU and pinned hub memory, as a share of a pinned copy of as many bytes."""

import ctypes
import mmap
from typing import NamedTuple

import torch

from benchmarks.gpu.timing import wall_s
from tensorhub._tensors.host_copy import copy_tensor
from tensorhub_common.devices.cuda import CudaDevice


class HostCopyRates(NamedTuple):
    """Bytes a second."""

    to_host_bps: float
    to_gpu_bps: float


def measure(device: CudaDevice, tensors: int = 256, nbytes: int = 16 << 20) -> HostCopyRates:
    """Measure many tensors of a layer's size, copied one after the other on one stream."""
    memory = mmap.mmap(-1, tensors * nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(address, 1, tensors * nbytes)
    pinned, stream = device.pin(address, tensors * nbytes), device.stream()
    host = list(torch.frombuffer(memory, dtype=torch.uint8).chunk(tensors))
    there = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(tensors)]

    def across(to: list[torch.Tensor], origin: list[torch.Tensor]) -> float:
        def work() -> None:
            for one, other in zip(to, origin, strict=True):
                copy_tensor(stream, one, other)
            stream.record().wait()

        return tensors * nbytes / wall_s(work, rounds=5)

    rates = HostCopyRates(across(host, there), across(there, host))
    pinned.close()
    return rates
