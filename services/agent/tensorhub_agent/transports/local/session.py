"""The reading side of the local transport: one open lease, and the copies out of its segment, or its segment itself.

Always true:
- `read` and `close` come back only when no byte of theirs can be written any more.
- The owner hears of a loss once, and not after it has called `close`.
- An error that escapes here is a loss of the session, and is told as one.
- A copy under way when the session is lost goes on: the memory stays readable, and its digests judge it.
"""

import asyncio
import contextlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from tensorhub_agent.compute.pool import CopyPool, CopyStopped, PoolBatch, Spans
from tensorhub_agent.compute.strided_copy import copy_boxes
from tensorhub_agent.primitives.forms import InvalidForm
from tensorhub_agent.primitives.lease_messages import (
    RENEW_S,
    ConfirmReply,
    LeaseBroken,
    PiecesAvailable,
    PiecesHandedOff,
    PiecesPromised,
    PromiseRetracted,
    ReaderDone,
    Renew,
)
from tensorhub_agent.runtime.shield import SharedShutdown
from tensorhub_agent.storage.mapping_cache import Mapping, MappingCache
from tensorhub_agent.transports.base import OnAvailability, OnLost, TransportLost, silent
from tensorhub_agent.transports.lease_session import PendingConfirmations
from tensorhub_agent.transports.local.framing import from_source, send
from tensorhub_common.errors import BadCommand, TensorHubError
from tensorhub_common.programs.regions import StridedCopies
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.runtime.framed_socket import FramedSocket, PeerGone
from tensorhub_common.runtime.supervision import Fault, Supervisor

_log: Final = logging.getLogger(__name__)


class LeaseSession(ABC):
    """One open lease, whatever is done with the segment; see `SourceSession`."""

    def __init__(self, framed: FramedSocket, on_lost: OnLost, on_have: OnAvailability) -> None:
        """Take over an opened connection."""
        self._framed = framed
        self._on_lost, self._on_have = on_lost, on_have
        self._over: str | None = None
        self._confirming = PendingConfirmations()
        self._read_bytes = 0
        self._ending = SharedShutdown(self._end)
        self._work = Supervisor("an open lease", self._failed)
        self._work.start(self._listen(), "hearing the source")
        self._work.start(self._renew(), "renewing the lease")

    @abstractmethod
    async def read(
        self, destination: memoryview, spans: Spans, *, digests: bool, progress: Callable[[int], None] = silent
    ) -> bytes:
        """See `SourceSession.read`."""

    @abstractmethod
    async def gather(
        self,
        destination: memoryview,
        regions: StridedCopies,
        *,
        digests: bool,
        progress: Callable[[int], None] = silent,
    ) -> None:
        """See `SourceSession.gather`."""

    async def still_holds(self) -> bool:
        """See `SourceSession.still_holds`."""
        if self._over is not None:
            return False
        question = self._confirming.ask()
        try:
            await send(self._framed, question)
            return await self._confirming.answer(question)
        except TimeoutError as why:
            self._lose(str(why))
        except PeerGone as why:
            self._lose(f"the source is gone: {why}")
        return False

    async def close(self) -> None:
        """See `SourceSession.close`."""
        await self._ending.reached()

    async def _end(self) -> None:
        lost = self._over is not None
        self._over = self._over or "the session was closed"
        await self._stop()
        await self._work.close()
        if not lost:
            with contextlib.suppress(PeerGone):
                await send(self._framed, ReaderDone(self._read_bytes))
        self._confirming.end()
        self._framed.close()
        self._forget()

    @abstractmethod
    async def _stop(self) -> None:
        """Return when nothing is written any more."""

    @abstractmethod
    def _forget(self) -> None:
        """Let go of the segment."""

    def _failed(self, fault: Fault) -> None:
        self._lose(f"this agent has failed with {fault.error!r}")

    def _lose(self, reason: str) -> None:
        if self._over is None:
            self._over = reason
            self._confirming.end()
            self._on_lost(reason)

    async def _listen(self) -> None:
        try:
            while self._over is None:
                match await from_source(self._framed):
                    case ConfirmReply() as holds:
                        self._confirming.answered(holds)
                    case PiecesAvailable() | PiecesPromised() | PromiseRetracted() | PiecesHandedOff() as news:
                        self._on_have(news)
                    case LeaseBroken(reason):
                        self._lose(f"the source has broken the lease: {reason}")
                    case other:
                        raise BadCommand(f"{type(other).__name__} makes no sense on an open lease")
        except PeerGone as why:
            self._lose(f"the source is gone: {why}")
        except (TensorHubError, *MALFORMED) as why:
            _log.warning("a source's lease is given up, for it sent what can't be read: %s", why)
            self._lose(f"the source sent what can't be read: {why}")

    async def _renew(self) -> None:
        try:
            while self._over is None:
                await asyncio.sleep(RENEW_S)
                await send(self._framed, Renew())
        except PeerGone as why:
            self._lose(f"the source is gone: {why}")


class LocalSession(LeaseSession):
    """One open lease and the copies out of its segment. `LocalTransport.open` makes it; see `SourceSession`."""

    def __init__(
        self,
        framed: FramedSocket,
        mapping: Mapping,
        pool: CopyPool,
        cache: MappingCache,
        on_lost: OnLost,
        on_have: OnAvailability,
    ) -> None:
        """Take over an opened connection and a mapping."""
        super().__init__(framed, on_lost, on_have)
        self._mapping, self._pool, self._cache = mapping, pool, cache
        self._jobs: set[PoolBatch] = set()

    async def read(
        self,
        destination: memoryview,
        spans: Spans,
        *,
        digests: bool,
        progress: Callable[[int], None] = silent,  # noqa: ARG002 (a batch takes milliseconds)
    ) -> bytes:
        """See `SourceSession.read`."""
        if self._over is not None:
            raise TransportLost(self._over)
        try:
            job = self._pool.copy_and_digest(destination, self._mapping.view, spans, digests=digests)
        except ValueError as why:
            raise TransportLost(f"the source's segment is not what was asked for: {why}") from why
        await self._done(job)
        self._read_bytes += sum(spans.nbytes)
        return await job.result()

    async def gather(
        self,
        destination: memoryview,
        regions: StridedCopies,
        *,
        digests: bool,  # noqa: ARG002 (the bytes are taken from where they stand, so there is nothing to compare)
        progress: Callable[[int], None] = silent,  # noqa: ARG002 (as for `read`)
    ) -> None:
        """See `SourceSession.gather`."""
        if self._over is not None:
            raise TransportLost(self._over)
        try:
            job = copy_boxes(self._pool, destination, self._mapping.view, regions)
        except InvalidForm:
            raise
        except ValueError as why:
            raise TransportLost(f"the source's segment is not what was asked for: {why}") from why
        await self._done(job)
        self._read_bytes += job.origin_nbytes

    async def _done(self, job: PoolBatch) -> None:
        self._jobs.add(job)
        try:
            await job.done()
        except CopyStopped:
            # Only `close` stops a copy whose caller still waits, and it says why before it does.
            raise TransportLost(str(self._over)) from None
        finally:
            self._jobs.discard(job)

    async def _stop(self) -> None:
        for job in self._jobs:
            job.stop()
        for job in list(self._jobs):
            await job.ended()

    def _forget(self) -> None:
        self._cache.release(self._mapping)


class MappedSession(LeaseSession):
    """One open lease on a segment that a worker of this agent is to map; nothing is copied here."""

    def __init__(self, framed: FramedSocket, fd: int, on_lost: OnLost, on_have: OnAvailability) -> None:
        """Take over an opened connection, and a descriptor that carries the source's lock."""
        super().__init__(framed, on_lost, on_have)
        self._fd: int | None = fd

    async def read(self, *_: object, **__: object) -> bytes:
        """Refuse: nothing is copied of a segment that is lent."""
        raise TransportLost("this lease lends the segment to be mapped: ask for another one to copy from it")

    async def gather(self, *_: object, **__: object) -> None:
        """Refuse, as `read` does."""
        await self.read()

    def take(self) -> int | None:
        """Return the descriptor, which is the caller's then; None if it was taken before."""
        fd, self._fd = self._fd, None
        return fd

    async def _stop(self) -> None:
        """Nothing is written here."""

    def _forget(self) -> None:
        fd = self.take()
        if fd is not None:
            os.close(fd)
