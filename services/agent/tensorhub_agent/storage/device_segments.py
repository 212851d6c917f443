"""Segments in the memory of GPUs.

A segment is an allocation of the driver's, exported as a file descriptor: the worker that owns the shard maps it
writable, agents that read it map it read-only. It stands for as long as any process has a descriptor or a mapping, so
the crash of a worker leaves it as it is. It has no name in a file system, so the next process of the agent finds none
of it. It gets it from the worker, which keeps the descriptors for as long as it has the shard.

Who is lent a segment to map it holds a lock on it, as with host memory. The driver's descriptor is of no file that
could carry one, so each segment has an empty file in memory, whose descriptor travels beside the memory's.

Invariants:
- Memory stays mapped here while a job works on it, also after its segment was removed.
- What all segments of a device take together stays below the limit, which is checked before the driver is asked.
- A failed `create` leaves nothing on the account.
"""

import contextlib
import os
import secrets
import threading
from dataclasses import dataclass
from typing import Final

from tensorhub_agent.devices.engine import engine_of
from tensorhub_agent.devices.region import DeviceRegion
from tensorhub_agent.storage.byte_account import ByteAccount
from tensorhub_agent.storage.segments import RANDOM_BYTES, Segment
from tensorhub_common.devices.device import Device, DeviceMemory, DeviceMemoryExhausted
from tensorhub_common.devices.registry import device_named
from tensorhub_common.errors import AgentUnavailable
from tensorhub_common.layout.layout import Layout
from tensorhub_common.runtime import segment_locks

SHARE_OF_DEVICE: Final = 0.9
"""Without a setting an agent's segments may take so much of a GPU: the engine's own memory is not the hub's to give."""

DEVICES_MAX: Final = 16
"""One agent has segments on at most this many GPUs."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSegment:
    """One allocation. See `Segment`, which it stands in for wherever memory is only handed on."""

    name: str
    device: str
    """The GPU's UUID."""
    nbytes: int
    fd: int
    lock_fd: int
    """An empty file for the locks of those who map it."""
    view: DeviceRegion
    inode: int
    """A number of its own."""
    _memory: DeviceMemory
    origin: int = 0

    @property
    def told(self) -> int:
        """What a worker is told that the segment is, for its descriptor says nothing."""
        return self.inode

    @property
    def file_bytes(self) -> int:
        """What it takes."""
        return self.nbytes

    def open_writable(self, *, keeps: bool = False) -> tuple[int, ...]:
        """Return a new descriptor for the worker that owns the shard. The caller closes it.

        For a worker that keeps the memory there is one of its locks too, of a description that has none.
        """
        if not keeps:
            return (os.dup(self.fd),)
        lock_fd = segment_locks.reopened(self.lock_fd, os.O_RDWR)
        try:
            return os.dup(self.fd), lock_fd
        except BaseException:
            os.close(lock_fd)
            raise

    def open_readonly(self) -> int:
        """Return a new descriptor for readers, which map it read-only by agreement. The caller closes it."""
        return os.dup(self.fd)

    def open_lent(self) -> tuple[int, ...]:
        """Return new descriptors for a worker that maps the segment: the memory's, and that with the lock.

        See `Segment.open_lent`. The memory's carries no lock, so the worker keeps the other one as long as its mapping.
        The caller closes them.
        """
        self.ask_back(is_wanted=False)
        lock_fd = segment_locks.lent(self.lock_fd)
        try:
            return os.dup(self.fd), lock_fd
        except BaseException:
            os.close(lock_fd)
            raise

    def is_lent(self) -> bool:
        """Tell whether any process has a lock of `open_lent`."""
        return segment_locks.is_lent(self.lock_fd)

    def ask_back(self, *, is_wanted: bool) -> None:
        """Have processes that map it see that it is to be written, or is no more. Some kernels can't."""
        with contextlib.suppress(OSError):
            segment_locks.ask_back(self.lock_fd, is_wanted=is_wanted)

    def close(self) -> None:
        """Let go of it; who has it mapped keeps it.

        The mapping of this process goes with the last region of it: a job that is under way has one, and a GPU that
        met an address without memory would fail for the whole process.
        """
        os.close(self.fd)
        os.close(self.lock_fd)


AnySegment = Segment | DeviceSegment
"""Memory of the host or of a GPU, where it is only handed on."""


@dataclass(frozen=True, slots=True)
class HandedBackSegment:
    """Memory of a GPU, of an earlier process of this agent, that its worker kept. `close` closes the descriptors."""

    told: int
    """What that process has called it."""
    is_live: bool
    """Whether its shard is in it; the other one is a staged shard's spare."""
    fds: tuple[int, ...]
    """The memory's, and where the worker was given it that of its locks."""

    def close(self) -> None:
        """Close the descriptors."""
        for fd in self.fds:
            os.close(fd)

    def duplicate(self) -> "HandedBackSegment":
        """Return the same with descriptors of its own. Raises `AgentUnavailable` where there are none to spare."""
        fds: list[int] = []
        try:
            fds.extend(map(os.dup, self.fds))
        except OSError as why:
            for fd in fds:
                os.close(fd)
            raise AgentUnavailable(
                f"memory of a GPU can't be taken back just now ({why.strerror}): call again"
            ) from why
        return HandedBackSegment(self.told, self.is_live, tuple(fds))


def _lock_file() -> int:
    return os.memfd_create("tensorhub-lock", os.MFD_CLOEXEC)


class DeviceSegmentStore:
    """All segments of one agent on one GPU. Its methods may be called from any thread."""

    def __init__(self, device: Device, prefix: str, bytes_max: int) -> None:
        """Keep segments named `prefix…`, at most `bytes_max` bytes of them together; 0 means `SHARE_OF_DEVICE`."""
        self._device, self._prefix = device, prefix
        self.account = ByteAccount(bytes_max or int(device.total_bytes() * SHARE_OF_DEVICE), self._refuse)
        self._segments: dict[str, DeviceSegment] = {}
        self._lock = threading.Lock()

    def head_of(self, layout: Layout) -> bytes:  # noqa: ARG002 (what a file on a disk begins with)
        """Return what a segment begins with: nothing, for no other process looks for one."""
        return b""

    def create(self, nbytes: int, head: bytes = b"") -> DeviceSegment:  # noqa: ARG002 (as above)
        """Make a segment of zero bytes. Raises `MemoryExhausted`."""
        whole = self._whole(nbytes)
        with self.account.charged(whole):
            memory = self._device.allocate(whole)
            try:
                self._clear(memory)
                fd = memory.export()
                try:
                    lock_fd = _lock_file()
                except BaseException:
                    os.close(fd)
                    raise
            except BaseException:
                memory.close()
                raise
        return self._added(memory, fd, lock_fd, secrets.randbits(62) + 1)

    def take_back(self, given: HandedBackSegment, nbytes: int) -> DeviceSegment:
        """Have a segment of memory that a worker kept; its bytes stay. The worker's descriptors stay the caller's.

        Raises `DeviceError` where it is no memory of this device, or shorter, and `MemoryExhausted`.
        """
        whole = self._whole(nbytes)
        with self.account.charged(whole), contextlib.ExitStack() as undo:
            fd = os.dup(given.fds[0])
            undo.callback(os.close, fd)
            # Descriptions of its own: a lock that an earlier process has on the worker's is not this one's.
            locks = [segment_locks.reopened(each, os.O_RDWR) for each in given.fds[1:]]
            lock_fd = locks[0] if locks else _lock_file()
            undo.callback(os.close, lock_fd)
            memory = self._device.import_memory(fd, whole, readonly=False)
            undo.pop_all()
        return self._added(memory, fd, lock_fd, given.told)

    def _added(self, memory: DeviceMemory, fd: int, lock_fd: int, inode: int) -> DeviceSegment:
        name = f"{self._prefix}{secrets.token_hex(RANDOM_BYTES)}.{self._device.uuid}"
        view = DeviceRegion.of(self._device, memory)
        segment = DeviceSegment(name, self._device.uuid, memory.nbytes, fd, lock_fd, view, inode, memory)
        with self._lock:
            self._segments[name] = segment
        return segment

    def remove(self, segment: DeviceSegment) -> None:
        """Let go of a segment; once more is harmless."""
        with self._lock:
            if self._segments.pop(segment.name, None) is None:
                return
            self.account.take_off(segment.nbytes)
        segment.close()

    def _refuse(self, nbytes: int, total_bytes: int, bytes_max: int) -> DeviceMemoryExhausted:
        return DeviceMemoryExhausted(
            f"a segment of {nbytes} bytes does not fit: this agent's segments take {total_bytes} of at most "
            f"{bytes_max} bytes of {self._device.uuid}; raise TENSORHUB_DEVICE_BYTES_MAX, release a shard, or "
            "register it with memory='host'"
        )

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            left, self._segments = self._segments, {}
            self.account.clear()
        for segment in left.values():
            segment.close()

    def _whole(self, nbytes: int) -> int:
        granule = self._device.granule_bytes
        return max(1, -(-nbytes // granule)) * granule

    def _clear(self, memory: DeviceMemory) -> None:
        """Write zeros: what another process has left there is not a worker's to see."""
        stream = self._device.stream()
        stream.fill(memory.address, memory.nbytes)
        stream.record().wait()
        stream.close()


class DeviceStores:
    """The stores of all GPUs that workers of this agent have named. Its methods may be called from any thread."""

    def __init__(self, prefix: str, bytes_max: int) -> None:
        """Begin with none; `bytes_max` is the limit of each."""
        self._prefix, self._bytes_max = prefix, bytes_max
        self._stores: dict[str, DeviceSegmentStore] = {}
        self._lock = threading.Lock()

    def of(self, uuid: str) -> DeviceSegmentStore:
        """Return the store of a GPU, by its UUID. Raises `DeviceUnavailable` where this agent can't use it."""
        with self._lock:
            if uuid not in self._stores:
                if len(self._stores) >= DEVICES_MAX:
                    raise DeviceMemoryExhausted(f"this agent has segments on {DEVICES_MAX} GPUs, which is the limit")
                device = device_named(uuid)
                # Now, so that missing packages are an answer to the worker, and not to its first reader.
                engine_of(device)
                self._stores[uuid] = DeviceSegmentStore(device, self._prefix, self._bytes_max)
            return self._stores[uuid]

    def accounts(self) -> dict[str, ByteAccount]:
        """Return what the segments on each GPU take, by its UUID."""
        return {uuid: store.account for uuid, store in list(self._stores.items())}

    def close(self) -> None:
        """Let go of everything."""
        for store in self._stores.values():
            store.close()


def imported(uuid: str, fd: int, nbytes: int) -> tuple[DeviceRegion, DeviceMemory]:
    """Map another agent's segment read-only. The descriptor stays the caller's. Raises `DeviceError`."""
    device = device_named(uuid)
    memory = device.import_memory(fd, nbytes, readonly=True)
    return DeviceRegion.of(device, memory), memory
