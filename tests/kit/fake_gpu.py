"""Tensors of the CPU that count as a fake GPU's: all that a shard on a GPU does, without one.

What the caller "queues" is work of the device's default stream. A lazy device does it only when it is waited for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from tensorhub._tensors import streams
from tensorhub_common.devices.device import Device
from tensorhub_common.devices.fake import FakeDevice, Span


class FakeGpu:
    """One fake device and the tensors that are on it."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self._storages: set[int] = set()
        self._empty: set[int] = set()
        """Members without a byte, by identity: they have no storage to be known by."""

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor, with all others of its storage, as one of the GPU's."""
        self._storages.add(tensor.untyped_storage().data_ptr())
        return tensor

    def put_all(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Count all of them."""
        return {name: self.put(tensor) for name, tensor in tensors.items()}

    def put_module(self, module: nn.Module) -> None:
        """Count all members of a module, of DTensors this rank's parts."""
        for tensor in (*module.parameters(), *module.buffers()):
            local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
            if local.numel():
                self.put(local)
            else:
                self._empty.add(id(tensor))

    def device_of(self, tensor: torch.Tensor) -> Device | None:
        """Stand in for the function of this name."""
        local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
        if id(tensor) in self._empty:
            return self.device
        if local.is_meta or not local.numel():
            return None
        return self.device if local.untyped_storage().data_ptr() in self._storages else None

    def queue_write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Queue on the caller's stream what writes a tensor, as an optimizer does."""
        self._queue("an optimizer's step", tensor, lambda: tensor.copy_(values), writes=True)

    def queue_read(self, tensor: torch.Tensor, into: dict[str, Any], name: str) -> None:
        """Queue what reads a tensor, as a forward pass does."""
        self._queue("a forward pass", tensor, lambda: into.update({name: tensor.clone()}), writes=False)

    def _queue(self, what: str, tensor: torch.Tensor, act: Any, *, writes: bool) -> None:
        def run() -> None:
            with torch.no_grad():
                act()

        storage = tensor.untyped_storage()
        span = Span(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), writes)
        self.device.stream_of(0).run(what, run, (span,))


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch, device: FakeDevice) -> Iterator[FakeGpu]:
    """Have this process see a fake GPU within the block."""
    gpu = FakeGpu(device)
    with monkeypatch.context() as patch:
        patch.setattr(streams, "device_of", gpu.device_of)
        yield gpu
