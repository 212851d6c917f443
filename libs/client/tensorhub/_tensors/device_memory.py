"""Hub memory on a GPU as torch sees it: the agent's allocation mapped into this process, and the tensors in it.

Nothing is copied and torch owns nothing: a tensor is an address. As in host memory each tensor has a storage of its
own, and each storage keeps the mapping, which so lives exactly as long as a tensor needs it, also after the hub is
closed.

The last tensor may go while work on it is still queued on some stream, which only its owner knew. So the mapping is
taken away in a thread of its own, after all work of the device.

Invariant: the lock on a holder's memory is kept until that memory is unmapped here, and no kernel of this process that
was queued before can read it any more. A child that this process forks has no part in it: a GPU's mappings don't go to
children.
"""

import ctypes
import math
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

import torch

from tensorhub._tensors.adoption import Member
from tensorhub_common.devices.cuda import cuda_device
from tensorhub_common.devices.device import Device, DeviceMemory, DeviceUnavailable
from tensorhub_common.devices.fake import FakeDevice
from tensorhub_common.devices.registry import device_named
from tensorhub_common.errors import AgentUnavailable, LayoutMismatch, TensorHubError
from tensorhub_common.layout.layout import Layout, placements, segment_bytes
from tensorhub_common.runtime.own_descriptors import OwnDescriptors

_BYTES: Final = "|u1"
"""The array interface has no name for bfloat16 or float8, so tensors are made as bytes."""


class DeviceSpace:
    """A layout's memory on a GPU, mapped into this process."""

    def __init__(self, device: Device, memory: DeviceMemory, lock: OwnDescriptors | None = None) -> None:
        """Take the mapping over, and its holder's lock: it is unmapped when nothing refers to this any more."""
        self.device, self.memory = device, memory
        # Not at the interpreter's end: other threads may still work with it, and the process's end unmaps it anyway.
        weakref.finalize(self, _unmap_soon, device, memory, lock).atexit = False

    def __len__(self) -> int:
        return self.memory.nbytes


def map_device(fd: int, layout: Layout, uuid: str) -> DeviceSpace | bytearray:
    """Map the segment of a layout in the memory of the GPU with this UUID. The descriptor may be closed afterwards.

    Raises `AgentUnavailable` when it can't be mapped here.
    """
    nbytes = segment_bytes(layout)
    if not nbytes:
        return bytearray()
    device = device_named(uuid)
    try:
        return DeviceSpace(device, device.import_memory(fd, nbytes, readonly=False))
    except TensorHubError as why:
        raise AgentUnavailable(
            f"the segment of {nbytes} bytes on {uuid} that the agent handed over can't be mapped ({why}); register "
            "again, or with memory='host'"
        ) from why


def map_lent(fds: tuple[int, ...], layout: Layout, uuid: str) -> DeviceSpace | bytearray:
    """Map a holder's segment in the memory of the GPU with this UUID, so that a write fails.

    `fds`: the memory's descriptor, and the one with the holder's lock. They may be closed afterwards.

    Raises `AgentUnavailable` when it can't be mapped here.
    """
    nbytes = segment_bytes(layout)
    if not nbytes:
        return bytearray()
    lock: OwnDescriptors | None = None
    try:
        fd, lent_fd = fds
        # Before the memory, which so is never mapped without it.
        lock = OwnDescriptors([os.dup(lent_fd)])
        device = device_named(uuid)
        return DeviceSpace(device, device.import_memory(fd, nbytes, readonly=True), lock)
    except (TensorHubError, OSError, ValueError) as why:
        if lock is not None:
            lock.close()
        raise AgentUnavailable(
            f"the segment of {nbytes} bytes on {uuid} that the agent lent can't be mapped ({why}); read again, or "
            "register with install='in-place', which copies"
        ) from why


def tensors_on(layout: Layout, space: DeviceSpace) -> dict[str, torch.Tensor]:
    """Return the layout's tensors in memory of a GPU: contiguous, writable, sharing its bytes, by name."""
    standing: dict[str, torch.Tensor] = {}
    for entry, start in zip(layout.tensors, placements(layout), strict=True):
        dtype = getattr(torch, entry.dtype, None)
        if dtype is None:
            raise LayoutMismatch(
                f"tensor {entry.name!r} is {entry.dtype}, which torch {torch.__version__} lacks: use a newer one"
            )
        if math.prod(entry.shape) == 0:
            standing[entry.name] = torch.empty(entry.shape, dtype=dtype, device=torch_device(space.device))
        else:
            flat = _bytes_at(space, start, entry.nbytes)
            standing[entry.name] = flat.view(dtype).view(entry.shape).data
    return standing


def uuid_of_gpu(values: Mapping[str, object], members: Iterable[Member]) -> str:
    """Return the UUID of the GPU that given tensors are on; without one, of torch's current GPU.

    Raises `LayoutMismatch` where they are on several, and `DeviceUnavailable` where there is none.
    """
    given = (*values.values(), *(member.tensor for member in members))
    tensors = [each for each in given if isinstance(each, torch.Tensor)]
    ordinals = {each.device.index for each in tensors if each.device.type == "cuda"}
    if len(ordinals) > 1:
        raise LayoutMismatch(
            f"the tensors are on GPUs {', '.join(map(str, sorted(ordinals)))}: a shard is in the memory of one, so "
            "register those of each GPU as a shard of its own"
        )
    if not ordinals and not torch.cuda.is_available():
        raise DeviceUnavailable("memory='device' needs a GPU that torch can use, and there is none here")
    return cuda_device(ordinals.pop() if ordinals else torch.cuda.current_device()).uuid


def torch_device(device: Device) -> torch.device:
    """Return what torch calls a device; a fake one's tensors are the CPU's."""
    return torch.device("cpu") if isinstance(device, FakeDevice) else torch.device("cuda", device.ordinal)


def _bytes_at(space: DeviceSpace, start: int, nbytes: int) -> torch.Tensor:
    address = space.memory.address + start
    if isinstance(space.device, FakeDevice):
        kind: Any = type("FakeDeviceBytes", (ctypes.c_ubyte * nbytes,), {})
        array = kind.from_address(address)
        array.space = space
        return torch.frombuffer(array, dtype=torch.uint8)
    return torch.as_tensor(_CudaBytes(space, address, nbytes), device=torch_device(space.device))


class _CudaBytes:
    """Bytes of a GPU as torch takes them in: it keeps this object for as long as the storage lives."""

    def __init__(self, space: DeviceSpace, address: int, nbytes: int) -> None:
        self._space = space
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": _BYTES,
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _unmap_soon(device: Device, memory: DeviceMemory, lock: OwnDescriptors | None) -> None:
    thread = threading.Thread(target=_unmap, args=(device, memory, lock), daemon=True, name="tensorhub-unmap")
    with suppress(RuntimeError):  # The interpreter is about to end.
        thread.start()


def _unmap(device: Device, memory: DeviceMemory, lock: OwnDescriptors | None) -> None:
    # After a failure of the device the lock stays, until the process ends: what its kernels still read is not known.
    device.finish()
    memory.close()
    if lock is not None:
        lock.close()
