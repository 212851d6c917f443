"""What a GPU computes for the agent: copies by the driver, digests and fused copies by kernels.

Each thread of the pool has streams of its own. What crosses between the host and the GPU does so in chunks: while one
crosses, the GPU digests the one before or after it.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash

from tensorhub_agent.devices.boxes import DeviceBox, is_derived, is_possible
from tensorhub_agent.devices.changes import Changes
from tensorhub_agent.devices.columns import Columns, join_adjacent
from tensorhub_agent.devices.kernels.boxes import BoxCopier
from tensorhub_agent.devices.kernels.casts import CastTables
from tensorhub_agent.devices.kernels.deltas import PieceComparer, PieceOverwriter
from tensorhub_agent.devices.kernels.digests import LONG_BYTES_MIN, Digester
from tensorhub_agent.devices.kernels.fp8 import Fp8Computer
from tensorhub_agent.devices.kernels.library import KernelLibrary
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES
from tensorhub_common.devices.cuda import CudaDevice, CudaEvent, CudaMemory

_Digests = Callable[[Columns, Columns | None, Columns], bytes]
"""Takes where pieces go, where they are from, and their sizes; returns their digests."""

CHUNK_BYTES: Final = 16 * 1024 * 1024
"""What crosses between the host and a GPU at a time. It takes the bus 0.3 ms, and less to give the work."""

STAGINGS: Final = 2
"""How many chunks on their way to the host a thread has room for."""


@dataclass(slots=True)
class _Staging:
    """Memory of the GPU for a chunk on its way to the host, and when the last one has left it."""

    memory: CudaMemory
    left: CudaEvent


class _Own:
    """What one thread has on the device."""

    def __init__(self, device: CudaDevice, library: KernelLibrary, casts: CastTables) -> None:
        self._device = device
        self.stream, self._crossing = device.stream(), device.stream()
        self.digester = Digester(device, library, self.stream)
        self.boxes = BoxCopier(device, library, casts, self.stream)
        self.fp8 = Fp8Computer(device, library, self.stream)
        self.overwriter = PieceOverwriter(device, library, self.stream)
        self._stagings: list[_Staging] = []

    def digest(self, to: Columns, origin: Columns | None, nbytes: Columns) -> bytes:
        """Digest pieces in the GPU's memory; with `origin` they are copied from there in the same pass."""
        self.digester.begin(to, origin, nbytes)
        return self.digester.collect()

    def receive(self, to: Columns, origin: Columns | None, nbytes: Columns) -> bytes:
        """Copy pieces of other memory into the GPU's, and digest them there."""
        assert origin is not None
        for some in _chunks(nbytes):
            self._cross(to[some], origin[some], nbytes[some])
            self.stream.wait_for(self._crossing.record())
            self.digester.begin(to[some], None, nbytes[some])
        return self.digester.collect()

    def send(self, to: Columns, origin: Columns | None, nbytes: Columns) -> bytes:
        """Copy pieces into memory of this thread's on the GPU, digest them there, and send that to the host.

        So a digest is of what was sent, also where the source changes in the middle.
        """
        assert origin is not None
        chunks = list(_chunks(nbytes))
        # Before any work: memory that is not to be had must not end the call while the bus still writes.
        self._make_room(max(int(nbytes[some].sum()) for some in chunks))
        for number, some in enumerate(chunks):
            staging = self._stagings[number % STAGINGS]
            room = staging.memory.address + np.cumsum(nbytes[some]) - nbytes[some]
            self.stream.wait_for(staging.left)
            self.digester.begin(room, origin[some], nbytes[some])
            self._crossing.wait_for(self.stream.record())
            self._cross(to[some], room, nbytes[some])
            staging.left = self._crossing.record()
        digests = self.digester.collect()
        self._crossing.record().wait()
        return digests

    def _cross(self, to: Columns, origin: Columns, nbytes: Columns) -> None:
        for there, here, size in zip(*(each.tolist() for each in join_adjacent(to, origin, nbytes)), strict=True):
            self._crossing.copy(there, here, size)

    def _make_room(self, nbytes: int) -> None:
        """Have room for chunks; it grows to what the largest one took. Nothing is in it between two calls."""
        if not self._stagings or self._stagings[0].memory.nbytes < nbytes:
            self._stagings.clear()
            rooms = [self._device.allocate(max(nbytes, CHUNK_BYTES)) for _ in range(STAGINGS)]
            self._stagings = [_Staging(room, self._crossing.record()) for room in rooms]


class CudaEngine:
    """See `DeviceEngine`."""

    def __init__(self, device: CudaDevice) -> None:
        """Load what compiles kernels. Raises `DeviceUnavailable`."""
        self._device = device
        self._library, self._casts = KernelLibrary(device), CastTables(device)
        self._comparer = PieceComparer(device, self._library)
        self._threads = threading.local()

    def copy(self, to: Sequence[int], origin: Sequence[int], nbytes: Sequence[int]) -> None:
        """See `DeviceEngine.copy`."""
        stream = self._own().stream
        for there, here, size in zip(to, origin, nbytes, strict=True):
            stream.copy(there, here, size)
        stream.record().wait()

    def digest(self, at: Columns, nbytes: Columns) -> bytes:
        """See `DeviceEngine.digest`."""
        return self._by_length(at, None, nbytes, lambda own: own.digest)

    def copy_and_digest(self, to: Columns, origin: Columns, nbytes: Columns) -> bytes:
        """See `DeviceEngine.copy_and_digest`."""
        return self._by_length(to, origin, nbytes, lambda own: own.digest)

    def receive(self, to: Columns, origin: Columns, nbytes: Columns) -> bytes:
        """See `DeviceEngine.receive`."""
        return self._by_length(to, origin, nbytes, lambda own: own.receive)

    def send(self, to: Columns, origin: Columns, nbytes: Columns) -> bytes:
        """See `DeviceEngine.send`."""
        return self._by_length(to, origin, nbytes, lambda own: own.send)

    def copy_boxes(self, boxes: Sequence[DeviceBox]) -> None:
        """See `DeviceEngine.copy_boxes`."""
        own = self._own()
        if derived := [box for box in boxes if is_derived(box)]:
            own.fp8.compute(derived)
        own.boxes.copy([box for box in boxes if not is_derived(box)])

    def changes(self, old: Columns, new: Columns, nbytes: Columns, units: Columns) -> Sequence[Changes | None]:
        """See `DeviceEngine.changes`."""
        self._own()
        return self._comparer.changes(old, new, nbytes, units)

    def overwrite(
        self, at: Columns, nbytes: Columns, units: Columns, patches: Sequence[Sequence[Changes]]
    ) -> tuple[bytes, Sequence[bool]]:
        """See `DeviceEngine.overwrite`."""
        right = self._own().overwriter.overwrite(at, nbytes, units, patches)
        return self.digest(at, nbytes), right.tolist()

    def takes(self, box: DeviceBox) -> bool:
        """See `DeviceEngine.takes`."""
        return is_possible(box)

    def _by_length(
        self, to: Columns, origin: Columns | None, nbytes: Columns, way: "Callable[[_Own], _Digests]"
    ) -> bytes:
        """Have the kernels take what is long enough for them."""
        own = self._own()
        long = nbytes >= LONG_BYTES_MIN
        if long.all():
            return way(own)(to, origin, nbytes) if len(nbytes) else b""
        found = np.empty((len(nbytes), PIECE_DIGEST_BYTES), np.uint8)
        for which, digests_of in ((long, way(own)), (~long, self._short)):
            if which.any():
                some = digests_of(to[which], None if origin is None else origin[which], nbytes[which])
                found[which] = np.frombuffer(some, np.uint8).reshape(-1, PIECE_DIGEST_BYTES)
        return found.tobytes()

    def _short(self, to: Columns, origin: Columns | None, nbytes: Columns) -> bytes:
        """Take pieces that are too short for the kernels by way of the host, and hash them there."""
        landing, ends = np.empty(int(nbytes.sum()), np.uint8), np.cumsum(nbytes)
        here, sizes = (landing.ctypes.data + ends - nbytes).tolist(), nbytes.tolist()
        self.copy(here, (to if origin is None else origin).tolist(), sizes)
        if origin is not None:
            self.copy(to.tolist(), here, sizes)
        view = landing.data
        return b"".join(xxhash.xxh3_128_digest(view[end - size : end]) for end, size in zip(ends, sizes, strict=True))

    def _own(self) -> _Own:
        found: _Own | None = getattr(self._threads, "own", None)
        if found is None:
            # A thread of the pool works with this device alone, or with others by blocks of its own.
            self._device.adopt_thread()
            found = self._threads.own = _Own(self._device, self._library, self._casts)
        return found


def _chunks(nbytes: Columns) -> Iterator[slice]:
    """Yield runs of pieces of about a chunk's bytes, at least one piece each."""
    number = (np.cumsum(nbytes) - 1) // CHUNK_BYTES
    bounds = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(nbytes)]
    for first, last in itertools.pairwise(bounds):
        yield slice(first, last)
