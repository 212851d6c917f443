"""Hub memory as torch sees it: a segment mapped into this process, and the tensors in it.

The agent owns the segment; the worker maps it shared and writable, so weights are read and trained where they stand.

Always true:
- Each tensor has a storage of its own (not a view of one large storage), so that autograd's version counters are not
  shared between tensors, and `torch.save` writes a tensor's own bytes alone.
- Each storage holds a reference to the mapping, so that the mapping lives exactly as long as a tensor needs it, also
  after the hub is closed. Nothing may call `close()` on the mapping: torch keeps the object alive, but does not keep
  its buffer exported, and so an explicit close would leave the tensors on unmapped pages.
"""

import ctypes
import math
import mmap
import os
import threading
import weakref
from contextlib import suppress
from typing import Any, Final

import torch

from tensorhub._tensors.device_memory import DeviceSpace, map_device, map_lent, tensors_on
from tensorhub_common.errors import AgentUnavailable, LayoutMismatch
from tensorhub_common.layout.layout import Layout, placements, segment_bytes

_MADV_POPULATE_READ: Final = 22
"""Of Linux since 5.14; CPython names it from 3.14 on."""

UNMAP_AFTER_S: Final = 0.1
"""A mapping without references is unmapped after this: in the same moment all readers of the host are being
told of the next version, and have better use for its cores."""

_libc: Final = ctypes.CDLL(None, use_errno=True)
_mmap: Final = _libc.mmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_mmap.restype = ctypes.c_void_p
_munmap: Final = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

Memory = mmap.mmap | bytearray | ctypes.Array[Any] | DeviceSpace
"""A mapped segment. A bytearray stands for the segment of a layout without a byte, which can't be mapped, and an array
of bytes for one that may not be written."""


def map_segment(fd: int, layout: Layout, device: str = "") -> Memory:
    """Map the segment of a layout, shared and writable. The descriptor may be closed afterwards.

    `device` is the UUID of the GPU whose memory it is; empty: the host's.

    Raises `AgentUnavailable` when the segment is not there in its full length.
    """
    if device:
        return map_device(fd, layout, device)
    nbytes = segment_bytes(layout)
    if not nbytes:
        return bytearray()
    try:
        return mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise AgentUnavailable(
            f"the segment of {nbytes} bytes that the agent handed over can't be mapped ({error}); register again"
        ) from error


def map_readonly(fds: tuple[int, ...], layout: Layout, device: str = "") -> Memory:
    """Map a holder's segment of a layout so that a write is SIGSEGV. The descriptors may be closed afterwards.

    `device` is the UUID of the GPU whose memory it is; empty: the host's. Of a GPU's, a write is a fault of the GPU.

    Raises `AgentUnavailable` when the segment is not there in its full length.
    """
    if device:
        return map_lent(fds, layout, device)
    nbytes, fd = segment_bytes(layout), fds[0]
    if not nbytes:
        return bytearray()
    if os.fstat(fd).st_size < nbytes:
        raise AgentUnavailable(f"the segment that the agent lent is shorter than {nbytes} bytes; read again")
    address = _mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        why = os.strerror(ctypes.get_errno())
        raise AgentUnavailable(f"the segment of {nbytes} bytes that the agent lent can't be mapped ({why}); read again")
    # torch knows no read-only storage and warns of each; so it is shown an array that looks writable over the same
    # bytes, and the kernel sees to it that it isn't.
    kind: Any = type("ReadOnlyBytes", (ctypes.c_ubyte * nbytes,), {})
    memory: ctypes.Array[Any] = kind.from_address(address)
    # Not at the interpreter's end: other threads may still look at it, and the process's end unmaps it anyway.
    weakref.finalize(memory, _unmap_soon, address, nbytes).atexit = False
    return memory


def _unmap_soon(address: int, nbytes: int) -> None:
    """Unmap in a thread that does not hold the interpreter's lock: 1 GiB of touched pages takes 0.1 s."""
    timer = threading.Timer(UNMAP_AFTER_S, _munmap, (address, nbytes))
    timer.daemon = True
    with suppress(RuntimeError):  # The interpreter is about to end.
        timer.start()


def private_memory(layout: Layout) -> Memory:
    """Return zeroed memory of this process alone for a layout; pages that are never written take no room."""
    nbytes = segment_bytes(layout)
    return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if nbytes else bytearray()


def populate(memory: Memory) -> None:
    """Have all pages of a mapped segment in this process's page table now. Where the kernel can't, they come later."""
    if isinstance(memory, mmap.mmap):
        with suppress(OSError):
            memory.madvise(_MADV_POPULATE_READ)


def tensors_at(layout: Layout, memory: Memory) -> dict[str, torch.Tensor]:
    """Return the layout's tensors in the memory: contiguous, writable, sharing its bytes, by name."""
    if len(memory) < segment_bytes(layout):
        raise LayoutMismatch(
            f"the memory has {len(memory)} bytes and the layout takes {segment_bytes(layout)}: it is another shard's"
        )
    if isinstance(memory, DeviceSpace):
        return tensors_on(layout, memory)
    standing: dict[str, torch.Tensor] = {}
    for entry, start in zip(layout.tensors, placements(layout), strict=True):
        dtype = getattr(torch, entry.dtype, None)
        if dtype is None:
            raise LayoutMismatch(
                f"tensor {entry.name!r} is {entry.dtype}, which torch {torch.__version__} lacks: use a newer one"
            )
        count = math.prod(entry.shape)
        if count == 0:
            # No byte to share. The device is named because a caller may run under `torch.device("meta")`.
            standing[entry.name] = torch.empty(entry.shape, dtype=dtype, device="cpu")
        else:
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
            # `.data` makes the tensor a base of its own; a view would tie its version counter to `flat`'s.
            standing[entry.name] = flat.view(entry.shape).data
    return standing
