"""A unix socket that serves the processes of this host: the workers of the agent, and the other agents.

Invariants:
- Only processes of this agent's own user are served, and at most `CONNECTIONS_MAX` at once.
- No process can connect before the socket listens with mode 0600.
- An error in one connection ends that connection alone.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Final

from tensorhub_agent.runtime.rejections import REJECTIONS, RejectionKind
from tensorhub_common.errors import AgentUnavailable
from tensorhub_common.runtime.framed_socket import FramedSocket, peer_of
from tensorhub_common.runtime.supervision import Supervisor

CONNECTIONS_MAX: Final = 1024
BACKLOG: Final = 128
SOCKET_PATH_BYTES_MAX: Final = 107

ACCEPT_PAUSE_S: Final = 0.5
"""Without a free descriptor no connection can be accepted; the server tries again after this time."""

_log: Final = logging.getLogger(__name__)


class UnixServer:
    """A listening socket and its connections."""

    def __init__(
        self,
        path: Path,
        peer: str,
        serve: Callable[[FramedSocket, int], Coroutine[None, None, None]],
        work: Supervisor,
        *,
        frame_bytes_max: int,
    ) -> None:
        """Prepare to serve at `path`; `start` listens.

        `serve` is given each connection and the process at its other end, and the connection is closed when it returns.
        `peer` names such a process in messages. The tasks are those of `work`, which is closed before `stop`.
        """
        self._path, self._peer, self._serve, self._work = path, peer, serve, work
        self._frame_bytes_max = frame_bytes_max
        self._socket: socket.socket | None = None
        self._connections = work.group()

    @property
    def connections(self) -> int:
        """How many connections there are."""
        return len(self._connections)

    def start(self) -> None:
        """Listen. A socket that an earlier process left at the path is replaced. Raises `AgentUnavailable`."""
        self._socket = _listening(self._path)
        self._work.start(self._accept(self._socket), f"accepting {self._peer}s")

    def stop(self) -> None:
        """Remove the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._path.unlink(missing_ok=True)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as why:
                # Processes that connect wait in the backlog meanwhile.
                _log.warning("no %s can be accepted for now: %s", self._peer, why)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            try:
                pid, uid = peer_of(connection)
            except OSError as why:
                _log.debug("a connection ended before it could be served: %s", why)
                connection.close()
                continue
            if uid != os.geteuid() or len(self._connections) >= CONNECTIONS_MAX:
                kind = RejectionKind.CROWD if uid == os.geteuid() else RejectionKind.USER
                REJECTIONS.note(
                    kind, f"a {self._peer} (process {pid} of user {uid}) while {self.connections} are served"
                )
                connection.close()
                continue
            serving = self._served(FramedSocket(connection, self._frame_bytes_max), pid)
            self._connections.start(serving, f"serving a {self._peer}", lambda _: None)

    async def _served(self, framed: FramedSocket, pid: int) -> None:
        try:
            await self._serve(framed, pid)
        finally:
            framed.close()


def _listening(path: Path) -> socket.socket:
    """Return a socket that listens at the path, which only this user may open."""
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise AgentUnavailable(
            f"the socket path {path} is longer than {SOCKET_PATH_BYTES_MAX} bytes, which is what a unix socket takes: "
            "set TENSORHUB_SOCKET to a shorter one"
        )
    temporary = path.with_name(f".{path.name[:60]}.{os.getpid() % 100000}")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listening.setblocking(False)  # noqa: FBT003 (the library's signature)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.unlink(missing_ok=True)
        # Bound under another name and renamed: at `path` there is never a socket that doesn't listen, or that other
        # users may open.
        before = os.umask(0o177)
        try:
            listening.bind(str(temporary))
        finally:
            os.umask(before)
        listening.listen(BACKLOG)
        temporary.rename(path)
    except OSError as why:
        listening.close()
        raise AgentUnavailable(f"the agent can't listen at {path} ({why.strerror}); make the folder writable") from why
    return listening
