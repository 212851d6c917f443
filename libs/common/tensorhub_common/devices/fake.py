"""A device without a GPU: the same promises over host memory, and every missing wait found.

Memory is a memfd, which its descriptor brings to other processes as CUDA's does. Work is not done when it is given.
A `lazy` device does it only when somebody waits for an event behind it, an `eager` one at once, and a `random.Random`
does so at points that its seed decides. So bytes that were not waited for are still the old ones, and a test of bytes
fails; on an eager device such a test would pass, as it may on a GPU that happens to be quick.

Independent of when work is done, each piece of work is compared with what is under way: two of which one writes what
the other touches, and which neither a stream nor an event nor a wait of the host orders, raise `DeviceRace`. That finds
a missing wait, a wrong stream, and memory that is closed or touched by the host while work on it is under way. What one
process does is compared; the order between processes is their frames'.
"""

import contextlib
import ctypes
import mmap
import os
import random
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from tensorhub_common.devices.device import DeviceError, DeviceMemoryExhausted, DeviceUnavailable, Event
from tensorhub_common.errors import TensorHubError

GRANULE_BYTES: Final = 2 * 1024 * 1024
"""As on today's GPUs."""

Schedule = Literal["lazy", "eager"] | random.Random

_libc: Final = ctypes.CDLL(None, use_errno=True)
_memmove: Final = _libc.memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = ctypes.c_void_p


class DeviceRace(TensorHubError):
    """Work touches memory that other work, not ordered before or after it, writes; or writes what that touches."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes that work touches: from `begin` to before `end`, or of these `width` from each multiple of `stride` on."""

    begin: int
    end: int
    writes: bool
    stride: int = 0
    """0: all of them."""
    width: int = 0

    def conflicts(self, other: "Span") -> bool:
        """Whether both touch a byte, and one of them writes it. Boxes of one matrix may lie between each other."""
        if not (self.writes or other.writes) or self.begin >= other.end or other.begin >= self.end:
            return False
        stride = self.stride or other.stride
        if not stride or (self.stride and other.stride and self.stride != other.stride):
            # Of different strides it is not looked at more closely.
            return True
        # Row i of this one and row i + k of the other overlap where -there < apart + k * stride < here.
        (rows, here), (other_rows, there) = self.rows(), other.rows()
        apart = other.begin - self.begin
        first, last = (-there - apart) // stride + 1, -((apart - here) // stride) - 1
        return max(first, 1 - rows) <= min(last, other_rows - 1)

    def rows(self) -> tuple[int, int]:
        """Return how many rows there are, and the bytes of each."""
        if not self.stride:
            return 1, self.end - self.begin
        return 1 + (self.end - self.begin - self.width) // self.stride, self.width


@dataclass(slots=True, eq=False)
class Work:
    """Something that a stream does, behind what it must wait for."""

    what: str
    spans: tuple[Span, ...]
    act: Callable[[], None]
    after: "tuple[Work, ...]"
    done: bool = False
    failure: Exception | None = None
    known: bool = False
    """The host has waited for it."""
    before: "frozenset[Work]" = field(default_factory=frozenset)
    """All work that is ordered before it and that the host did not know to be done."""


class FakeEvent:
    """See `Event`."""

    def __init__(self, device: "FakeDevice", work: Work | None) -> None:
        """Take the last work of a stream."""
        self._device, self.work = device, work

    def is_done(self) -> bool:
        """See `Event.is_done`. The answer that it is done orders as a wait does."""
        if self.work is not None and not self.work.done:
            self._device.advance()
            if not self.work.done:
                return False
        self.wait()
        return True

    def wait(self) -> None:
        """See `Event.wait`."""
        if self.work is not None:
            self._device.finish_work(self.work)


class FakeStream:
    """See `Stream`."""

    def __init__(self, device: "FakeDevice", handle: int) -> None:
        """Begin without work."""
        self._device, self.handle = device, handle
        self._last: Work | None = None
        self._waits: list[Work] = []

    def run(self, what: str, act: Callable[[], None], spans: tuple[Span, ...]) -> None:
        """Do something in the order of the stream: the form that kernels have here.

        Raises `DeviceError` for memory of another device, which a kernel does not reach.
        """
        for span in spans:
            self._device.check_reach(span)
        self._give(what, act, spans)

    def _give(self, what: str, act: Callable[[], None], spans: tuple[Span, ...]) -> None:
        # As one step: a stream orders what several threads give it, as CUDA's do.
        with self._device.lock:
            after = tuple(each for each in (self._last, *self._waits) if each is not None)
            self._waits = []
            self._last = self._device.give(Work(f"{what} on stream {self.handle}", spans, act, after))

    def copy(self, to: int, origin: int, nbytes: int) -> None:
        """See `Stream.copy`."""
        spans = (Span(to, to + nbytes, writes=True), Span(origin, origin + nbytes, writes=False))
        self._give(f"a copy of {nbytes} bytes", lambda: _move(to, origin, nbytes), spans)

    def fill(self, to: int, nbytes: int, value: int = 0) -> None:
        """See `Stream.fill`."""
        spans = (Span(to, to + nbytes, writes=True),)
        self._give(f"a fill of {nbytes} bytes", lambda: _set(to, value, nbytes), spans)

    def record(self) -> FakeEvent:
        """See `Stream.record`."""
        if self._waits:
            self.run("a wait", lambda: None, ())
        return FakeEvent(self._device, self._last)

    def wait_for(self, event: Event) -> None:
        """See `Stream.wait_for`."""
        if not isinstance(event, FakeEvent):
            raise TypeError(f"{type(event).__name__} is no event of a fake device")
        if event.work is not None:
            self._waits.append(event.work)

    def close(self) -> None:
        """See `Stream.close`."""


def _move(to: int, origin: int, nbytes: int) -> None:
    _memmove(to, origin, nbytes)


def _set(to: int, value: int, nbytes: int) -> None:
    ctypes.memset(to, value, nbytes)


class FakeMemory:
    """See `DeviceMemory`: a memfd, mapped shared."""

    def __init__(
        self, device: "FakeDevice", fd: int, nbytes: int, whole: int, *, readonly: bool, imported: bool
    ) -> None:
        """Map the descriptor, and take it over."""
        self._device, self._fd, self._whole, self._imported = device, fd, whole, imported
        self.nbytes, self.readonly = nbytes, readonly
        access = mmap.PROT_READ if readonly else mmap.PROT_READ | mmap.PROT_WRITE
        self._mapping: mmap.mmap | None = mmap.mmap(fd, whole, mmap.MAP_SHARED, access)
        self.address = _address_of(self._mapping)
        _mapped.add(self)

    @property
    def device(self) -> "FakeDevice":
        """Whose memory it is."""
        return self._device

    def export(self) -> int:
        """See `DeviceMemory.export`."""
        if self._imported:
            raise DeviceError("memory that was imported can't be exported: keep its descriptor")
        return os.dup(self._fd)

    def close(self) -> None:
        """See `DeviceMemory.close`. Memory that work under way touches stays mapped."""
        if self._mapping is not None:
            self._device.host_touches(self.address, self._whole, "closing memory", writes=True)
            mapping, self._mapping = self._mapping, None
            self._device.freed(self)
            _mapped.discard(self)
            os.close(self._fd)
            mapping.close()

    def __del__(self) -> None:
        """Unmap it with the last reference, unless work under way would touch what is not there any more."""
        with contextlib.suppress(Exception):
            try:
                self.close()
            except DeviceRace:
                _kept.append(self._mapping)


_kept: Final[list[mmap.mmap | None]] = []
"""What was dropped without a wait: the work may be done at any time, and must not end the process."""

_mapped: "Final[weakref.WeakSet[FakeMemory]]" = weakref.WeakSet()
"""All memory of fake devices that this process has mapped."""


def _address_of(mapping: mmap.mmap) -> int:
    import numpy as np  # noqa: PLC0415 (ctypes gives no address of a read-only buffer; control hosts lack numpy)

    # The array goes at once, so that the mapping can be closed.
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


class FakePinned:
    """See `PinnedMemory`."""

    def __init__(self, device: "FakeDevice", address: int, nbytes: int) -> None:
        """Register a range."""
        self._device, self.address, self.nbytes = device, address, nbytes
        self._open = True

    def close(self) -> None:
        """See `PinnedMemory.close`."""
        if self._open:
            self._open = False
            self._device.host_touches(self.address, self.nbytes, "unpinning memory", writes=True)
            self._device.unpinned(self)


class FakeDevice:
    """See `Device`. The default stream is `stream_of(0)`, as CUDA's is."""

    granule_bytes: int = GRANULE_BYTES

    def __init__(self, ordinal: int = 0, *, bytes_max: int = 1 << 40, schedule: Schedule = "lazy") -> None:
        """Make a device with so much memory."""
        self.ordinal, self.uuid = ordinal, f"GPU-fake-{ordinal}"
        self._bytes_max, self._schedule = bytes_max, schedule
        self.lock: Final = threading.RLock()
        self._streams: dict[int, FakeStream] = {}
        self._open: list[Work] = []
        """What the host does not know to be done, in the order in which it was given."""
        self._taken: weakref.WeakKeyDictionary[FakeMemory, int] = weakref.WeakKeyDictionary()
        self._pinned: list[FakePinned] = []

    def free_bytes(self) -> int:
        """See `Device.free_bytes`. Memory of other processes is not counted."""
        with self.lock:
            return self._bytes_max - sum(self._taken.values())

    def total_bytes(self) -> int:
        """See `Device.total_bytes`."""
        return self._bytes_max

    @property
    def pinned_bytes(self) -> int:
        """How much host memory is pinned."""
        return sum(each.nbytes for each in self._pinned)

    def finish(self) -> None:
        """See `Device.finish`."""
        with self.lock:
            for work in list(self._open):
                self.finish_work(work)

    def stream(self) -> FakeStream:
        """See `Device.stream`."""
        with self.lock:
            return self.stream_of(max(self._streams, default=0) + 1)

    def stream_of(self, handle: int) -> FakeStream:
        """See `Device.stream_of`."""
        with self.lock:
            return self._streams.setdefault(handle, FakeStream(self, handle))

    def allocate(self, nbytes: int) -> FakeMemory:
        """See `Device.allocate`."""
        whole = _whole(nbytes)
        if whole > self.free_bytes():
            raise DeviceMemoryExhausted(
                f"{nbytes} bytes do not fit on {self.uuid}: it has {self.free_bytes()} of {self._bytes_max} bytes free"
            )
        fd = os.memfd_create("tensorhub-fake-device", os.MFD_CLOEXEC)
        os.truncate(fd, whole)
        memory = FakeMemory(self, fd, nbytes, whole, readonly=False, imported=False)
        with self.lock:
            self._taken[memory] = whole
        return memory

    def import_memory(self, fd: int, nbytes: int, *, readonly: bool) -> FakeMemory:
        """See `Device.import_memory`."""
        whole = _whole(nbytes)
        if os.fstat(fd).st_size < whole:
            raise DeviceError(f"the memory has {os.fstat(fd).st_size} bytes, and {nbytes} are to be mapped")
        return FakeMemory(self, os.dup(fd), nbytes, whole, readonly=readonly, imported=True)

    def pin(self, address: int, nbytes: int, *, readonly: bool = False) -> FakePinned:
        """See `Device.pin`."""
        del readonly
        with self.lock:
            if any(each.address < address + nbytes and address < each.address + each.nbytes for each in self._pinned):
                raise DeviceError("a part of the memory is pinned already")
            self._pinned.append(FakePinned(self, address, nbytes))
            return self._pinned[-1]

    def freed(self, memory: FakeMemory) -> None:
        """Count the memory no longer."""
        with self.lock:
            self._taken.pop(memory, None)

    def unpinned(self, pinned: FakePinned) -> None:
        """Count the range no longer."""
        with self.lock:
            self._pinned.remove(pinned)

    def check_reach(self, span: Span) -> None:
        """Raise `DeviceError` where a kernel would touch another device's memory."""
        for memory in list(_mapped):
            device, begin = memory.device, memory.address
            if device is not self and span.begin < begin + memory.nbytes and begin < span.end:
                raise DeviceError(f"a kernel on {self.uuid} touches memory of {device.uuid}, which it does not reach")

    # ------------------------------------------------------------------------------------------------- the order

    def host_touches(self, address: int, nbytes: int, what: str, *, writes: bool) -> None:
        """The host reads or writes memory now. Raises `DeviceRace` where work on it is under way."""
        with self.lock:
            self._check(Work(what, (Span(address, address + nbytes, writes),), lambda: None, ()))

    def give(self, work: Work) -> Work:
        """Take work of a stream. Raises `DeviceRace` where it is not ordered with what is under way."""
        with self.lock:
            open_before = [each for each in work.after if not each.known]
            work.before = frozenset(open_before).union(*(each.before for each in open_before))
            self._check(work)
            self._open.append(work)
            if self._schedule == "eager":
                self._do(work)
            elif isinstance(self._schedule, random.Random):
                self.advance()
            return work

    def advance(self) -> None:
        """Do some of what is open, as the schedule has it; a lazy device does nothing."""
        with self.lock:
            if not isinstance(self._schedule, random.Random):
                return
            for work in list(self._open):
                if self._schedule.random() < 0.5:  # noqa: PLR2004 (a coin)
                    self._do(work)

    def finish_work(self, work: Work) -> None:
        """Do what is open up to this work; the host knows it to be done. Raises `DeviceError` where it failed."""
        with self.lock:
            self._do(work)
            for each in (*work.before, work):
                each.known = True
            self._open = [each for each in self._open if not each.known]
            failure = work.failure
        if failure is not None:
            raise DeviceError(f"{work.what} has failed: {failure}") from failure

    def _check(self, work: Work) -> None:
        for other in self._open:
            if other.known or other in work.before:
                continue
            if any(mine.conflicts(its) for mine in work.spans for its in other.spans):
                raise DeviceRace(f"{work.what} is not ordered behind {other.what}: one writes what the other touches")

    def _do(self, work: Work) -> None:
        # Not by recursion: a stream may have thousands of pieces of work, one behind the other.
        todo = [work]
        while todo:
            last = todo[-1]
            waiting = [each for each in last.after if not each.done]
            if waiting and not last.done:
                todo += waiting
                continue
            todo.pop()
            if not last.done:
                last.failure = next((each.failure for each in last.after if each.failure is not None), None)
                if last.failure is None:
                    try:
                        last.act()
                    except Exception as why:  # noqa: BLE001 (a kernel's failure is told by the event behind it)
                        last.failure = why
                last.done = True
                last.act, last.after = _nothing, ()


def _nothing() -> None:
    """What work does that is done."""


def _whole(nbytes: int) -> int:
    return max(1, -(-nbytes // GRANULE_BYTES)) * GRANULE_BYTES


_fakes: Final[dict[int, FakeDevice]] = {}


def fake_device(ordinal: int) -> FakeDevice:
    """Return one of this process's fake devices. Raises `DeviceUnavailable`."""
    if not 0 <= ordinal < FAKES_MAX:
        raise DeviceUnavailable(f"there is no fake device {ordinal}: they are numbered from 0 to {FAKES_MAX - 1}")
    return _fakes.setdefault(ordinal, FakeDevice(ordinal, schedule=random.Random(ordinal)))  # noqa: S311 (no secret)


FAKES_MAX: Final = 8
