"""The transport between agents of one host: the reader maps the source's segment and copies out of it.

For a ticket, the source hands a read-only descriptor of the segment over a unix socket. From then on the reader works
alone; the source's processor does nothing for it. The connection is the lease's data path: its end on either side is
the end of the lease, at once and also when a process is killed. A stopped process holds nobody up, since every wait has
a bound.
`primitives/lease_messages.py` says what the two say to each other.

Always true: a lease that was opened and not broken is told to have ended exactly once, whatever its reader did.
"""

import asyncio
import contextlib
import logging
import os
import socket as sockets
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.primitives.lease_messages import (
    REASON_CHARS_MAX,
    AvailabilityUpdate,
    ConfirmReply,
    ConfirmRequest,
    Denied,
    Hello,
    LeaseBroken,
    PiecesAvailable,
    PiecesPromised,
    ReaderDone,
    Renew,
    Welcome,
    split_update,
)
from tensorhub_agent.primitives.ranges import merge_ranges
from tensorhub_agent.runtime.rejections import REJECTIONS, RejectionKind
from tensorhub_agent.storage.mapping_cache import MAPPINGS_MAX, MappingCache
from tensorhub_agent.transports.base import (
    LeaseOpened,
    OnAvailability,
    OnLost,
    TicketRejected,
    TransportLost,
    TransportSilent,
    unheard,
)
from tensorhub_agent.transports.local.framing import FRAME_BYTES_MAX, from_reader, from_source, send
from tensorhub_agent.transports.local.session import LeaseSession, LocalSession, MappedSession
from tensorhub_common.errors import AgentUnavailable, BadCommand, TensorHubError
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.handshake import OLDEST_PROTOCOL, Speaks, agreed, speaks
from tensorhub_common.protocol.leases import LeaseGrant
from tensorhub_common.protocol.log.commands import PROTOCOL
from tensorhub_common.runtime.framed_socket import FramedSocket, PeerGone, connect, peer_of
from tensorhub_common.runtime.supervision import Fault, OnFault, Supervisor

CONNECTIONS_MAX: Final = 1024
BACKLOG: Final = 128
SOCKET_PATH_BYTES_MAX: Final = 107

OPEN_S: Final = 2.0
"""A source that doesn't let a reader in within this is left out. It takes 0.3 ms when nobody is in the way."""

HELLO_S: Final = 2.0
"""A connection that has not shown a ticket within this is closed."""

SILENCE_S: Final = 15.0
"""A reader that renews nothing for this long is gone. The leases' own bound is shorter; this one is the transport's."""

ACCEPT_PAUSE_S: Final = 0.5
"""Without a free descriptor nobody can be accepted; try again after this."""

SWEEP_S: Final = 5.0
"""A removed segment is kept alive by a mapping that nobody uses for this long at most."""

_log: Final = logging.getLogger(__name__)


class _Served:
    """The serving side of one open lease."""

    def __init__(self, framed: FramedSocket, lease: str, work: Supervisor) -> None:
        self.framed, self.lease, self._work = framed, lease, work
        self.breaking: asyncio.Task[None] | None = None
        self._untold: list[AvailabilityUpdate] = []
        self._telling: asyncio.Task[None] | None = None

    def announce(self, news: AvailabilityUpdate) -> None:
        """Tell the reader of pieces; of what stands here, what comes while it is told goes with the next frame."""
        self._untold.append(news)
        if self._telling is None:
            self._telling = self._work.start(self._tell(), "telling a reader of pieces", self._cut_off)

    async def _tell(self) -> None:
        with contextlib.suppress(PeerGone):
            while self._untold:
                untold, self._untold = self._untold, []
                there = merge_ranges(run for news in untold if isinstance(news, PiecesAvailable) for run in news.pieces)
                said = [news for news in untold if not isinstance(news, PiecesAvailable)]
                for news in (*said, PiecesAvailable(tuple(there))) if there or not said else said:
                    for frame in split_update(news):
                        await send(self.framed, frame)
        self._telling = None

    def hush(self) -> None:
        """Tell the reader of nothing more."""
        if self._telling is not None:
            self._telling.cancel()

    def end(self, reason: str) -> None:
        """Tell the reader, and close the connection, which ends the task that serves it."""
        if self.breaking is None:
            self.breaking = self._work.start(self._end(reason), "breaking a lease", self._cut_off)

    def _cut_off(self, _: Fault) -> None:
        """Something has failed here: the reader's connection ends, and with it the lease."""
        self.framed.close()

    async def _end(self, reason: str) -> None:
        with contextlib.suppress(PeerGone):
            await send(self.framed, LeaseBroken(reason[:REASON_CHARS_MAX]))
        self.framed.close()


class LocalTransport:
    """Both sides of the local transport of one agent. See `Transport`."""

    def __init__(
        self,
        *,
        socket: Path,
        agent: str,
        pool: CopyPool,
        redeem: Callable[[str, str], LeaseOpened | TicketRejected],
        renew: Callable[[str], bool],
        holds: Callable[[str], bool],
        ended: Callable[[str, bool], None],
        mappings_max: int = MAPPINGS_MAX,
        on_fault: OnFault | None = None,
    ) -> None:
        """Serve at `socket`. The four callables are the methods of a `LeaseBook`; `on_fault` ends the agent."""
        self._path, self._agent, self._pool = socket, agent, pool
        self._redeem, self._renew, self._holds, self._ended = redeem, renew, holds, ended
        self._cache = MappingCache(mappings_max)
        self._socket: sockets.socket | None = None
        self._work = Supervisor(f"the local transport of agent {agent!r}", on_fault)
        self._serving: set[asyncio.Task[None]] = set()
        self._served: dict[str, _Served] = {}
        self.served_bytes = 0
        """What the readers that are done say that they took."""

    @property
    def endpoint(self) -> str:
        """The socket's path."""
        return str(self._path)

    @property
    def links(self) -> int:
        """How many readers' connections stand."""
        return len(self._serving)

    async def start(self) -> None:
        """Listen. A socket that an earlier process left there is replaced."""
        self._socket = _listen(self._path)
        self._work.start(self._accept(self._socket), "letting readers in")
        self._work.start(self._sweep(), "letting go of mappings")

    async def stop(self) -> None:
        """End the served leases, remove the socket and let go of the mappings that no session uses."""
        await self._work.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._path.unlink(missing_ok=True)
        self._cache.close()

    def break_lease(self, lease: str, reason: str) -> None:
        """See `Transport.break_lease`."""
        served = self._served.get(lease)
        if served is not None:
            served.end(reason)

    def announce(self, lease: str, news: AvailabilityUpdate) -> None:
        """See `Transport.show`."""
        served = self._served.get(lease)
        if served is not None and served.breaking is None:
            served.announce(news)

    async def open(
        self, grant: LeaseGrant, *, reader: str, on_lost: OnLost, on_have: OnAvailability = unheard
    ) -> LeaseSession:
        """See `Transport.open`."""
        try:
            async with asyncio.timeout(OPEN_S):
                framed = await self._reached(grant)
                try:
                    return await self._greet(framed, grant, reader, on_lost, on_have)
                except BaseException:
                    framed.close()
                    raise
        except TimeoutError:
            raise TransportSilent(f"the source at {grant.endpoint} did not let us in within {OPEN_S:g} s") from None
        except TransportLost:
            raise
        except (TensorHubError, *MALFORMED) as why:
            raise TransportLost(f"the source at {grant.endpoint} can't be read from: {why}") from why

    async def _reached(self, grant: LeaseGrant) -> FramedSocket:
        try:
            return await connect(Path(grant.endpoint), FRAME_BYTES_MAX, OPEN_S)
        except PeerGone as why:
            raise TransportLost(
                f"the source can't be read from: {why} (both agents say that they are on one host: if they are not, "
                "set TENSORHUB_HOST to a name of its own on each)"
            ) from why

    async def _greet(
        self, framed: FramedSocket, grant: LeaseGrant, reader: str, on_lost: OnLost, on_have: OnAvailability
    ) -> LeaseSession:
        await send(framed, Hello(OLDEST_PROTOCOL, grant.ticket, reader, PROTOCOL))
        match await from_source(framed):
            case Welcome(segment, nbytes, origin):
                fd = framed.take_fd()
                if grant.mapped:
                    return MappedSession(framed, fd, on_lost, on_have)
                mapping = self._cache.acquire(segment, fd, nbytes, origin)
                return LocalSession(framed, mapping, self._pool, self._cache, on_lost, on_have)
            case Denied(reason):
                raise TransportLost(f"the source refused: {reason}")
            case other:
                raise BadCommand(f"its first frame was {type(other).__name__}")

    # The serving side.

    async def _accept(self, listening: sockets.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as why:
                _log.warning("no reader can be let in for now: %s", why)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            try:
                pid, uid = peer_of(connection)
            except OSError as why:
                _log.debug("a connection ended before it could be served: %s", why)
                connection.close()
                continue
            if uid != os.geteuid() or len(self._serving) >= CONNECTIONS_MAX:
                kind = RejectionKind.CROWD if uid == os.geteuid() else RejectionKind.USER
                REJECTIONS.note(kind, f"a reader (process {pid} of user {uid}) while {len(self._serving)} are served")
                connection.close()
                continue
            # It closes its connection and ends its lease whatever happens, so that a fault costs this reader alone.
            serving = self._serve(FramedSocket(connection, FRAME_BYTES_MAX), pid)
            task = self._work.start(serving, "serving a reader", lambda _: None)
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, framed: FramedSocket, pid: int) -> None:
        """Serve one connection to its end."""
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await from_reader(framed)
            if not isinstance(hello, Hello):
                raise BadCommand(f"the first frame must be Hello and was {type(hello).__name__}")
            opened = self._let_in(hello)
            if isinstance(opened, TicketRejected):
                _log.info("reader %s (process %d) was refused: %s", hello.reader, pid, opened.reason)
                await send(framed, Denied(opened.reason[:REASON_CHARS_MAX]))
            else:
                await self._serve_lease(framed, opened)
        except PeerGone:
            pass  # Whoever had opened a lease was told of its end.
        except TimeoutError:
            _log.warning("the reader of process %d was cut off: it was silent for too long", pid)
        except (TensorHubError, OSError, *MALFORMED) as why:
            REJECTIONS.note(
                RejectionKind.FRAME, f"what the reader of process {pid} said, so its connection ends: {why}"
            )
        finally:
            framed.close()

    def _let_in(self, hello: Hello) -> LeaseOpened | TicketRejected:
        try:
            agreed(speaks(f"agent {self._agent}"), Speaks(hello.reader, hello.protocol, hello.newest))
        except BadCommand as why:
            return TicketRejected(str(why))
        return self._redeem(hello.ticket, hello.reader)

    async def _serve_lease(self, framed: FramedSocket, opened: LeaseOpened) -> None:
        served = self._served[opened.lease] = _Served(framed, opened.lease, self._work)
        done = False
        try:
            segment = opened.segment
            fd = segment.open_readonly() if opened.fd is None else opened.fd
            try:
                await send(framed, Welcome(segment.name, segment.nbytes, segment.origin), fd)
            finally:
                os.close(fd)
            if opened.pieces is not None:
                served.announce(PiecesAvailable(opened.pieces))
            if opened.promised:
                served.announce(PiecesPromised(opened.promised))
            done = await self._answer(served)
        finally:
            del self._served[opened.lease]
            served.hush()
            if served.breaking is None:
                self._ended(opened.lease, done)

    async def _answer(self, served: _Served) -> bool:
        """Answer a reader until it is done (True). Raises what ends it otherwise."""
        while True:
            async with asyncio.timeout(SILENCE_S):
                frame = await from_reader(served.framed)
            match frame:
                case Renew():
                    if self._renew(served.lease):
                        await send(served.framed, PiecesAvailable())
                case ConfirmRequest(number):
                    await send(served.framed, ConfirmReply(number, self._holds(served.lease)))
                case ReaderDone(nbytes):
                    self.served_bytes += nbytes
                    return True
                case Hello():
                    raise BadCommand("Hello may be said once only")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._cache.sweep()


def _listen(path: Path) -> sockets.socket:
    """Return a socket that listens at the path, which only this user may open."""
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise AgentUnavailable(
            f"the socket path {path} is longer than {SOCKET_PATH_BYTES_MAX} bytes, which is what a unix socket takes: "
            "set TENSORHUB_SOCKET to a shorter one"
        )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    listening = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM | sockets.SOCK_CLOEXEC)
    try:
        listening.setblocking(False)  # noqa: FBT003 (the library's signature)
        path.unlink(missing_ok=True)
        listening.bind(str(path))
        # Between the two lines somebody else could connect, but is refused as another user when accepted.
        path.chmod(0o600)
        listening.listen(BACKLOG)
    except OSError as why:
        listening.close()
        raise AgentUnavailable(f"the agent can't listen at {path} ({why.strerror}); make the folder writable") from why
    return listening
