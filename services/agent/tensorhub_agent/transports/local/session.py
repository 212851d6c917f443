"""The reading side of the local transport: one open lease, and the copies out of its segment, or its segment itself.

Invariant: a copy that is under way when the session is lost goes on. The memory stays readable, and digests decide
whether its bytes are good.
"""

import contextlib
from abc import abstractmethod
from collections.abc import Callable

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.compute.strided_copy import copy_boxes
from tensorhub_agent.primitives.forms import InvalidForm
from tensorhub_agent.primitives.lease_messages import LeaseMessage, ReaderDone
from tensorhub_agent.primitives.memory_region import MemoryRegion
from tensorhub_agent.storage.mapped_descriptors import LentMemory, close_all
from tensorhub_agent.storage.mapping_cache import DeviceMapping, Mapping, MappingCache
from tensorhub_agent.transports.base import OnAvailability, OnLost, TransportLost, silent
from tensorhub_agent.transports.lease_session import LeaseSession
from tensorhub_agent.transports.local.framing import from_source, send
from tensorhub_common.programs.regions import StridedCopies
from tensorhub_common.runtime.framed_socket import FramedSocket, PeerGone


class LocalLease(LeaseSession):
    """One open lease over a socket, whatever is done with the segment."""

    def __init__(self, framed: FramedSocket, on_lost: OnLost, on_have: OnAvailability) -> None:
        """Take over an opened connection."""
        super().__init__("an open lease", on_lost, on_have)
        self._framed = framed
        self._read_bytes = 0
        self._work.start(self._receive(), "receiving from the source")
        self._work.start(self.renew(), "renewing the lease")

    async def _send(self, message: LeaseMessage) -> None:
        await send(self._framed, message)

    async def _receive(self) -> None:
        with self.receiving():
            while self.over is None:
                self.received(await from_source(self._framed))

    async def _end(self) -> None:
        lost = self.over is not None
        self.over = self.over or "the session was closed"
        await self.stop_copies()
        await self._work.close()
        if not lost:
            with contextlib.suppress(PeerGone):
                await self._send(ReaderDone(self._read_bytes))
        self._end_waiting()
        self._framed.close()
        self._release()

    @abstractmethod
    def _release(self) -> None:
        """Release the segment."""


class LocalSession(LocalLease):
    """One open lease and the copies out of its segment. `LocalTransport.open` makes it; see `SourceSession`."""

    def __init__(
        self,
        framed: FramedSocket,
        mapping: Mapping | DeviceMapping,
        pool: CopyPool,
        cache: MappingCache,
        on_lost: OnLost,
        on_have: OnAvailability,
    ) -> None:
        """Take over an opened connection and a mapping."""
        super().__init__(framed, on_lost, on_have)
        self._mapping, self._pool, self._cache = mapping, pool, cache

    async def read(
        self,
        destination: MemoryRegion,
        spans: Spans,
        *,
        digests: bool,
        progress: Callable[[int], None] = silent,  # noqa: ARG002 (a batch takes milliseconds)
    ) -> bytes:
        """See `SourceSession.read`."""
        self.check_open()
        try:
            job = self._pool.copy_and_digest(destination, self._mapping.view, spans, digests=digests)
        except ValueError as why:
            raise TransportLost(f"the source's segment is not what was asked for: {why}") from why
        await self.finish(job)
        self._read_bytes += sum(spans.nbytes)
        return await job.result()

    async def gather(
        self,
        destination: MemoryRegion,
        regions: StridedCopies,
        *,
        digests: bool,  # noqa: ARG002 (no bytes are sent, so there is nothing to compare)
        progress: Callable[[int], None] = silent,  # noqa: ARG002 (as for `read`)
    ) -> None:
        """See `SourceSession.gather`."""
        self.check_open()
        try:
            job = copy_boxes(self._pool, destination, self._mapping.view, regions)
        except InvalidForm:
            raise
        except ValueError as why:
            raise TransportLost(f"the source's segment is not what was asked for: {why}") from why
        await self.finish(job)
        self._read_bytes += job.origin_nbytes

    def _release(self) -> None:
        self._cache.release(self._mapping)


class MappedSession(LocalLease):
    """One open lease on a segment that a worker of this agent is to map; nothing is copied here."""

    def __init__(
        self, framed: FramedSocket, fds: LentMemory, device: str, on_lost: OnLost, on_have: OnAvailability
    ) -> None:
        """Take over an opened connection, and descriptors of which one carries the source's lock."""
        super().__init__(framed, on_lost, on_have)
        self._fds = fds
        self.device = device
        """The UUID of the GPU whose memory it is; empty: the host's."""

    async def read(self, *_: object, **__: object) -> bytes:
        """Refuse: nothing is copied of a segment that is lent."""
        raise TransportLost("this lease lends the segment to be mapped: ask for another one to copy from it")

    async def gather(self, *_: object, **__: object) -> None:
        """Refuse, as `read` does."""
        await self.read()

    def take(self) -> LentMemory:
        """Return the descriptors, which are the caller's then; none if they were taken before."""
        fds, self._fds = self._fds, ()
        return fds

    def _release(self) -> None:
        close_all(self.take())
