"""The transport between agents of one host: the reader maps the source's segment and copies out of it.

For a ticket, the source hands a read-only descriptor of the segment over a unix socket. From then on the reader works
alone; the source's processor does nothing for it. The connection is the lease's data path: its end on either side is
the end of the lease, at once and also when a process is killed. Every wait has a bound, so a stopped process delays its
peer by that much at most.

`primitives/lease_messages.py` describes the messages, `transports/lease_server.py` the life of a lease.
"""

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Final

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.primitives.lease_messages import (
    AvailabilityUpdate,
    Denied,
    Hello,
    PiecesAvailable,
    PiecesHandedOff,
    PiecesPromised,
    PromiseRetracted,
    ReaderDone,
    SourceMessage,
    Welcome,
    split_update,
)
from tensorhub_agent.primitives.ranges import merge_ranges
from tensorhub_agent.runtime.rejections import REJECTIONS, RejectionKind
from tensorhub_agent.runtime.unix_server import UnixServer
from tensorhub_agent.storage.mapped_descriptors import LentMemory, close_all
from tensorhub_agent.storage.mapping_cache import MAPPINGS_MAX, MappingCache
from tensorhub_agent.transports.base import (
    LeaseAuthority,
    OnAvailability,
    OnLost,
    TransportLost,
    opening,
    unheard,
)
from tensorhub_agent.transports.lease_server import LeaseServer
from tensorhub_agent.transports.local.framing import FRAME_BYTES_MAX, from_reader, from_source, send
from tensorhub_agent.transports.local.session import LocalSession, MappedSession
from tensorhub_common.errors import BadCommand, TensorHubError
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.handshake import OLDEST_PROTOCOL
from tensorhub_common.protocol.leases import LeaseGrant
from tensorhub_common.protocol.log.commands import PROTOCOL
from tensorhub_common.runtime.framed_socket import FramedSocket, PeerGone, connect
from tensorhub_common.runtime.supervision import Fault, OnFault, Supervisor

OPEN_S: Final = 2.0
"""A source that doesn't let a reader in within this time is left out. It takes 0.3 ms on an idle host."""

HELLO_S: Final = 2.0
"""A connection that has not shown a ticket within this time is closed."""

SILENCE_S: Final = 15.0
"""A reader that renews nothing for this long is gone. The leases' own bound is shorter; this one is the transport's."""

SWEEP_S: Final = 5.0
"""An unused mapping keeps a removed segment alive for this long at most."""

_log: Final = logging.getLogger(__name__)


class _Reader:
    """The connection of one reader, seen from the source."""

    def __init__(self, framed: FramedSocket, lease: LeaseServer, work: Supervisor) -> None:
        self.framed, self.lease, self._work = framed, lease, work
        self._is_welcome = False
        self._updates: list[SourceMessage] = []
        self._announcing: asyncio.Task[None] | None = None

    async def welcome(self, welcome: SourceMessage, fds: LentMemory, updates: list[SourceMessage]) -> None:
        """Hand the descriptors over, and then all updates, the first ones first."""
        self._updates = updates + self._updates
        await send(self.framed, welcome, *fds)
        self._is_welcome = True
        self.announce([])

    def announce(self, updates: list[SourceMessage]) -> None:
        """Send updates. What comes while a frame is being sent is merged into the next one."""
        self._updates += updates
        if self._announcing is None and self._is_welcome and self._updates:
            self._announcing = self._work.start(self._announce(), "announcing pieces", self._cut_off)

    async def _announce(self) -> None:
        with contextlib.suppress(PeerGone):
            while self._updates:
                updates, self._updates = self._updates, []
                pieces = merge_ranges(
                    run for each in updates if isinstance(each, PiecesAvailable) for run in each.pieces
                )
                for update in updates:
                    if isinstance(update, PiecesPromised | PromiseRetracted | PiecesHandedOff):
                        await self._send_parts(update)
                if pieces:
                    await self._send_parts(PiecesAvailable(tuple(pieces)))
        self._announcing = None

    async def _send_parts(self, update: AvailabilityUpdate) -> None:
        for frame in split_update(update):
            await send(self.framed, frame)

    def break_off(self, messages: list[SourceMessage]) -> None:
        """Send the last messages, and close the connection, which ends the task that serves it."""
        self._work.start(self._break_off(messages), "breaking a lease", self._cut_off)

    async def _break_off(self, messages: list[SourceMessage]) -> None:
        with contextlib.suppress(PeerGone):
            for message in messages:
                await send(self.framed, message)
        self.framed.close()

    def _cut_off(self, _: Fault) -> None:
        """End the connection, and with it the lease, after an error in serving it."""
        self.framed.close()

    def lost(self) -> None:
        """Send nothing more."""
        if self._announcing is not None:
            self._announcing.cancel()
        self.lease.connection_lost()


class LocalTransport:
    """Both sides of the local transport of one agent. See `Transport`."""

    def __init__(
        self,
        *,
        socket: Path,
        agent: str,
        pool: CopyPool,
        leases: LeaseAuthority,
        mappings_max: int = MAPPINGS_MAX,
        on_fault: OnFault | None = None,
    ) -> None:
        """Serve at `socket`, and ask `leases` about tickets. `on_fault` ends the agent."""
        self._agent, self._pool, self._leases = agent, pool, leases
        self._cache = MappingCache(mappings_max)
        self._work = Supervisor(f"the local transport of agent {agent!r}", on_fault)
        self._server = UnixServer(socket, "reader", self._serve, self._work, frame_bytes_max=FRAME_BYTES_MAX)
        self._readers: dict[str, _Reader] = {}
        self.endpoint = str(socket)
        self.served_bytes = 0
        """What the readers that are done say that they took."""

    @property
    def links(self) -> int:
        """How many connections of readers there are."""
        return self._server.connections

    async def start(self) -> None:
        """Listen. A socket that an earlier process left there is replaced."""
        self._server.start()
        self._work.start(self._sweep(), "releasing mappings")

    async def stop(self) -> None:
        """End the served leases, remove the socket and release the mappings that no session uses."""
        await self._work.close()
        self._server.stop()
        self._cache.close()

    def break_lease(self, lease: str, reason: str) -> None:
        """See `Transport.break_lease`."""
        reader = self._readers.get(lease)
        if reader is not None and (messages := reader.lease.break_lease(reason)):
            reader.break_off(messages)

    def announce(self, lease: str, update: AvailabilityUpdate) -> None:
        """See `Transport.announce`."""
        reader = self._readers.get(lease)
        if reader is not None:
            reader.announce(reader.lease.announce(update))

    async def open(
        self, grant: LeaseGrant, *, reader: str, on_lost: OnLost, on_have: OnAvailability = unheard
    ) -> LocalSession | MappedSession:
        """See `Transport.open`."""
        async with opening(grant.endpoint, OPEN_S):
            framed = await _connected(grant)
            try:
                return await self._greet(framed, grant, reader, on_lost, on_have)
            except BaseException:
                framed.close()
                raise

    async def _greet(
        self, framed: FramedSocket, grant: LeaseGrant, reader: str, on_lost: OnLost, on_have: OnAvailability
    ) -> LocalSession | MappedSession:
        await send(framed, Hello(OLDEST_PROTOCOL, grant.ticket, reader, PROTOCOL))
        match await from_source(framed):
            case Welcome(segment, nbytes, origin, device):
                fd = framed.take_fd()
                if grant.mapped:
                    # Of a GPU's memory the lock has a descriptor of its own.
                    fds = (fd, framed.take_fd()) if device else (fd,)
                    return MappedSession(framed, fds, device, on_lost, on_have)
                mapping = self._cache.acquire_any(segment, fd, nbytes, origin, device)
                return LocalSession(framed, mapping, self._pool, self._cache, on_lost, on_have)
            case Denied(reason):
                raise TransportLost(f"the source refused: {reason}")
            case other:
                raise BadCommand(f"its first frame was {type(other).__name__}")

    # The serving side.

    async def _serve(self, framed: FramedSocket, pid: int) -> None:
        """Serve one connection to its end."""
        reader = _Reader(framed, LeaseServer(self._agent, self._leases), self._work)
        try:
            await self._receive(reader, pid)
        except PeerGone:
            pass  # Its lease ends below.
        except TimeoutError:
            _log.warning("the reader of process %d was cut off: it was silent for too long", pid)
        except (TensorHubError, OSError, *MALFORMED) as why:
            REJECTIONS.note(
                RejectionKind.FRAME, f"what the reader of process {pid} said, so its connection ends: {why}"
            )
        finally:
            reader.lost()

    async def _receive(self, reader: _Reader, pid: int) -> None:
        framed, lease = reader.framed, reader.lease
        async with asyncio.timeout(HELLO_S):
            hello = await from_reader(framed)
        first, *updates = lease.receive(hello)
        opened = lease.opened
        if opened is None:
            _log.info("the reader of process %d was refused: %s", pid, first)
            await send(framed, first)
            return
        self._readers[opened.lease] = reader
        try:
            fds = opened.fds or (opened.segment.open_readonly(),)
            try:
                await reader.welcome(first, fds, updates)
            finally:
                close_all(fds)
            while not lease.release():
                async with asyncio.timeout(SILENCE_S):
                    frame = await from_reader(framed)
                for message in lease.receive(frame):
                    await send(framed, message)
                if isinstance(frame, ReaderDone):
                    self.served_bytes += frame.nbytes
        finally:
            del self._readers[opened.lease]

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._cache.sweep()


async def _connected(grant: LeaseGrant) -> FramedSocket:
    try:
        return await connect(Path(grant.endpoint), FRAME_BYTES_MAX, OPEN_S)
    except PeerGone as why:
        raise TransportLost(
            f"{why} (both agents say that they are on one host: if they are not, set TENSORHUB_HOST to a name of its "
            "own on each)"
        ) from why
