"""The transport between agents of one host: the reader maps the source's segment and copies out of it.

The source hands a read-only descriptor of the segment over a unix socket, for a ticket. From then on the reader works alone;
the source's processor does nothing for it. The connection is the lease's data path: its end on either side is the end of
the lease, at once and also when a process is killed. A stopped process holds nobody up, since every wait has a bound.

Each frame is four bytes of length (big endian) and a MessagePack object, in this order:

    reader                         source
      Hello(protocol, ticket)  →
                               ←   Welcome + descriptor, or No, and the end
      Renew, each RENEW_S      →
      Confirm(n)               →
                               ←   Holds(n, holds)
                               ←   Broken, and the end (at any time)
      Done, and the end        →

Anything else ends the connection, with one line in the log of whoever saw it.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from tensorhub_agent.copying import CopyJob, CopyPool, CopyStopped, Spans
from tensorhub_agent.mappings import MAPPINGS_MAX, Mapping, MappingCache
from tensorhub_agent.segments import ForeignSegment
from tensorhub_agent.transport import LeaseOpened, OnLost, Refused, TransportLost
from tensorhub_common.errors import AgentUnavailable, BadCommand, TensorHubError
from tensorhub_common.framed import Framed, PeerGone, connect, peer_of
from tensorhub_common.wire.commands import PROTOCOL
from tensorhub_common.wire.transfer import LeaseGrant

FRAME_BYTES_MAX: Final = 4096
CONNECTIONS_MAX: Final = 1024
BACKLOG: Final = 128
SOCKET_PATH_BYTES_MAX: Final = 107

OPEN_S: Final = 2.0
"""A source that doesn't let a reader in within this is left out. Connecting and the ticket take 0.3 ms."""

HELLO_S: Final = 2.0
"""A connection that has not shown a ticket within this is closed."""

RENEW_S: Final = 1.0
SILENCE_S: Final = 15.0
"""A reader that says nothing for this long is gone. The leases' own bound is shorter; this one is the transport's."""

CONFIRM_S: Final = 2.0
SEND_S: Final = 2.0
"""A peer that takes no frame for this long, though its socket has room for thousands, is gone."""

ACCEPT_PAUSE_S: Final = 0.5
"""Without a free descriptor there is nothing to accept; try again after this."""

SWEEP_S: Final = 5.0
"""A removed segment is kept alive by a mapping that nobody uses for this long at most."""

_log: Final = logging.getLogger(__name__)


class Frame(msgspec.Struct, frozen=True, tag_field="t"):
    """The part common to all frames."""


class Hello(Frame, frozen=True, tag="hello"):
    """The reader shows its ticket."""

    protocol: int
    ticket: str
    reader: str


class Welcome(Frame, frozen=True, tag="welcome"):
    """The lease is open. The segment's descriptor comes with this frame."""

    segment: str
    nbytes: int


class No(Frame, frozen=True, tag="no"):
    """The source does not let the reader in."""

    reason: str


class Renew(Frame, frozen=True, tag="renew"):
    """The reader is alive."""


class Confirm(Frame, frozen=True, tag="confirm"):
    """Does the lease still hold?"""

    number: int


class Holds(Frame, frozen=True, tag="holds"):
    """The answer to the `Confirm` of that number."""

    number: int
    holds: bool


class Done(Frame, frozen=True, tag="done"):
    """The reader has all that it wants."""


class Broken(Frame, frozen=True, tag="broken"):
    """The source has ended the lease; its memory may change from now on."""

    reason: str


_encode: Final = msgspec.msgpack.Encoder().encode
_from_reader: Final = msgspec.msgpack.Decoder(Hello | Renew | Confirm | Done)
_from_source: Final = msgspec.msgpack.Decoder(Welcome | No | Holds | Broken)

Redeem = Callable[[str], LeaseOpened | Refused]
Ended = Callable[[str, bool], None]


async def _send(framed: Framed, frame: Frame, fd: int | None = None) -> None:
    try:
        async with asyncio.timeout(SEND_S):
            await framed.send(_encode(frame), fd)
    except TimeoutError:
        raise PeerGone(f"the other side has taken no frame for {SEND_S:g} s") from None


class LocalSession:
    """The reading side of one open lease. `LocalTransport.open` makes it."""

    def __init__(self, framed: Framed, mapping: Mapping, pool: CopyPool, cache: MappingCache, on_lost: OnLost) -> None:
        """Take over an opened connection and a mapping."""
        self._framed, self._mapping, self._pool, self._cache = framed, mapping, pool, cache
        self._on_lost = on_lost
        self._why: str | None = None
        self._jobs: set[CopyJob] = set()
        self._confirming: dict[int, asyncio.Future[bool]] = {}
        self._confirmed = 0
        self._closing: asyncio.Task[None] | None = None
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._renew())]

    async def read(self, destination: memoryview, spans: Spans, *, digests: bool) -> bytes:
        """See `SourceSession.read`."""
        if self._why is not None:
            raise TransportLost(self._why)
        try:
            job = self._pool.copy_and_digest(destination, self._mapping.view, spans, digests=digests)
        except ValueError as why:
            raise TransportLost(f"the source's segment is not what was asked for: {why}") from why
        self._jobs.add(job)
        try:
            return await job.result()
        except CopyStopped:
            raise TransportLost(self._why or "the session was closed") from None
        finally:
            self._jobs.discard(job)

    async def still_holds(self) -> bool:
        """See `SourceSession.still_holds`."""
        if self._why is not None:
            return False
        self._confirmed = number = self._confirmed + 1
        answer = self._confirming[number] = asyncio.get_running_loop().create_future()
        try:
            await _send(self._framed, Confirm(number))
            async with asyncio.timeout(CONFIRM_S):
                return await answer
        except TimeoutError:
            self._lose(f"the source has not said within {CONFIRM_S:g} s whether the lease holds")
        except PeerGone as why:
            self._lose(str(why))
        finally:
            self._confirming.pop(number, None)
        return False

    async def close(self) -> None:
        """See `SourceSession.close`."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        cancelled: asyncio.CancelledError | None = None
        while not self._closing.done():
            try:
                await asyncio.shield(self._closing)
            except asyncio.CancelledError as why:
                cancelled = why
        if cancelled is not None:
            raise cancelled
        self._closing.result()

    async def _close(self) -> None:
        lost, self._why = self._why, self._why or "the session was closed"
        for job in self._jobs:
            job.stop()
        for job in list(self._jobs):
            await job.ended()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if lost is None:
            with contextlib.suppress(PeerGone):
                await _send(self._framed, Done())
        self._end_confirming()
        self._framed.close()
        self._cache.release(self._mapping)

    def _lose(self, reason: str) -> None:
        """Tell the owner, once. Copies under way go on to their end: the memory stays readable, and digests judge it."""
        if self._why is None:
            self._why = reason
            self._end_confirming()
            self._on_lost(reason)

    def _end_confirming(self) -> None:
        for answer in self._confirming.values():
            if not answer.done():
                answer.set_result(False)

    async def _listen(self) -> None:
        try:
            while True:
                frame = _from_source.decode(await self._framed.receive())
                match frame:
                    case Holds(number, holds) if number in self._confirming:
                        if not self._confirming[number].done():
                            self._confirming[number].set_result(holds)
                    case Holds():
                        pass  # Nobody waits for it any more.
                    case Broken(reason):
                        self._lose(f"the source has broken the lease: {reason}")
                        return
                    case _:
                        raise BadCommand(f"{type(frame).__name__} makes no sense on an open lease")  # noqa: TRY301
        except PeerGone as why:
            self._lose(f"the source is gone: {why}")
        except (TensorHubError, msgspec.MsgspecError) as why:
            _log.warning("a source sent what can't be read, and its lease is given up: %s", why)
            self._lose(f"the source sent what can't be read: {why}")

    async def _renew(self) -> None:
        try:
            while True:
                await asyncio.sleep(RENEW_S)
                await _send(self._framed, Renew())
        except PeerGone as why:
            self._lose(f"the source is gone: {why}")


class _Served:
    """The serving side of one open lease."""

    def __init__(self, framed: Framed, lease: str) -> None:
        self.framed, self.lease = framed, lease
        self.breaking: asyncio.Task[None] | None = None

    def end(self, reason: str) -> None:
        """Tell the reader, and close the connection, which ends the task that serves it."""
        if self.breaking is None:
            self.breaking = asyncio.create_task(self._end(reason))

    async def _end(self, reason: str) -> None:
        try:
            await _send(self.framed, Broken(reason))
        except PeerGone:
            pass
        finally:
            self.framed.close()


class LocalTransport:
    """Both sides of the local transport of one agent. See `Transport`."""

    def __init__(  # noqa: PLR0913
        self,
        *,
        socket: Path,
        agent: str,
        pool: CopyPool,
        redeem: Redeem,
        renew: Callable[[str], None],
        holds: Callable[[str], bool],
        ended: Ended,
        mappings_max: int = MAPPINGS_MAX,
    ) -> None:
        """Serve at `socket`; the four callables are those of `LeaseBook`, and answer at once."""
        self._path, self._agent, self._pool = socket, agent, pool
        self._redeem, self._renew, self._holds, self._ended = redeem, renew, holds, ended
        self._cache = MappingCache(mappings_max)
        self._listening: socket_.socket | None = None
