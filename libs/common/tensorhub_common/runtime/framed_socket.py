"""Frames over a unix socket, with file descriptors beside them.

A frame is four bytes of length (big endian) and its body. Descriptors travel with the first byte of their frame. Both
sides of a connection between a worker and its agent, and between two agents of one host, use this.

Invariants: a frame longer than the bound ends the connection before it is read; one writer at a time writes a whole
frame; descriptors that are not taken are closed with the connection; a peer that sends without a pause leaves the
rest of the process its turn.
"""

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tensorhub_common.errors import TensorHubError

LENGTH: Final = struct.Struct("!I")
READ_BYTES: Final = 256 * 1024
CONNECT_AGAIN_S: Final = 0.01
FDS_MAX: Final = 16
"""Limit of descriptors that arrive with one read, and of those that wait to be taken."""

FRAMES_BURST: Final = 64
"""After this many frames at a stretch, which came faster than they were handled, other tasks have their turn."""

_PEER: Final = struct.Struct("3i")


class FrameTooLarge(TensorHubError):
    """The other side announced a frame over the bound."""


class PeerGone(TensorHubError):
    """The connection has ended."""


class FramedSocket:
    """One connected, non-blocking unix socket that carries frames."""

    def __init__(self, sock: socket.socket, frame_bytes_max: int) -> None:
        """Take over the socket."""
        sock.setblocking(False)  # noqa: FBT003 (the library's own form)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._frame_bytes_max = frame_bytes_max
        self._buffer = bytearray()
        self._fds: deque[int] = deque()
        self._writing = asyncio.Lock()
        self._closed = False
        self._waiting: set[asyncio.Future[None]] = set()
        self._at_a_stretch = 0

    async def send(self, body: bytes, *fds: int) -> None:
        """Send one frame, and with it descriptors, which stay the caller's. Raises `PeerGone`."""
        data = LENGTH.pack(len(body)) + body
        async with self._writing:
            try:
                if fds:
                    data = data[await self._send_fds(data, fds) :]
                elif not self._closed:
                    # Most frames fit into the socket's buffer, and then no turn of the event loop is needed.
                    with contextlib.suppress(BlockingIOError, InterruptedError):
                        data = data[self._sock.send(data) :]
                if data:
                    await self._loop.sock_sendall(self._sock, data)
            except (OSError, ValueError) as why:
                raise PeerGone(f"the connection has ended: {why}") from None

    def send_now(self, body: bytes) -> bool:
        """Send one frame without an event loop; False: the socket did not take all of it, so nothing more goes out."""
        data = LENGTH.pack(len(body)) + body
        if self._closed or self._writing.locked():
            return False
        try:
            return self._sock.send(data) == len(data)
        except (OSError, ValueError):
            return False

    async def _send_fds(self, data: bytes, fds: tuple[int, ...]) -> int:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        while True:
            try:
                return self._sock.sendmsg([data], rights)
            except (BlockingIOError, InterruptedError):
                await self._writable()

    async def _writable(self) -> None:
        await self._ready(self._loop.add_writer, self._loop.remove_writer)

    async def receive(self) -> bytes:
        """Return the next frame's body. Raises `PeerGone` at the end, `FrameTooLarge` for what is too long."""
        self._at_a_stretch += 1
        if self._at_a_stretch > FRAMES_BURST:
            self._at_a_stretch = 0
            await asyncio.sleep(0)
        while True:
            body = self._cut()
            if body is not None:
                return body
            await self._read_more()

    def take_fd(self) -> int:
        """Return the next descriptor that came with the frame just received; it is the caller's now."""
        if not self._fds:
            raise PeerGone("the other side sent no descriptor where one belongs")
        return self._fds.popleft()

    def _cut(self) -> bytes | None:
        if len(self._buffer) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._buffer)
        if length > self._frame_bytes_max:
            raise FrameTooLarge(f"a frame of {length} bytes was announced; at most {self._frame_bytes_max} are taken")
        end = LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(memoryview(self._buffer)[LENGTH.size : end])
        del self._buffer[:end]
        return body

    async def _read_more(self) -> None:
        while True:
            if self._closed:
                raise PeerGone("the connection was closed")
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, READ_BYTES, FDS_MAX)
            except (BlockingIOError, InterruptedError):
                await self._readable()
                self._at_a_stretch = 0
                continue
            except OSError as why:
                raise PeerGone(f"the connection has ended: {why}") from None
            for fd in fds:
                os.set_inheritable(fd, False)  # noqa: FBT003 (the library's own form)
                self._fds.append(fd)
            if len(self._fds) > FDS_MAX:
                raise FrameTooLarge(f"more than {FDS_MAX} descriptors came that were not asked for")
            if not data:
                raise PeerGone("the other side has closed the connection")
            self._buffer += data
            return

    async def _readable(self) -> None:
        await self._ready(self._loop.add_reader, self._loop.remove_reader)

    async def _ready(self, add: Callable[..., None], remove: Callable[[socket.socket], bool]) -> None:
        """Wait until the socket is ready, or closed by us."""
        ready: asyncio.Future[None] = self._loop.create_future()
        self._waiting.add(ready)
        add(self._sock, _wake, ready)
        try:
            await ready
        finally:
            self._waiting.discard(ready)
            if not self._closed:
                remove(self._sock)

    def close(self) -> None:
        """End the connection. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for ready in self._waiting:
            _wake(ready)
        while self._fds:
            os.close(self._fds.popleft())


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process at the other end, as the kernel knows them."""
    pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(pid), int(uid)


def _connected(sock: socket.socket, path: Path) -> bool:
    try:
        sock.connect(str(path))
    except BlockingIOError:
        return False
    return True


async def connect(path: Path, frame_bytes_max: int, timeout_s: float) -> FramedSocket:
    """Connect to a unix socket. Raises `PeerGone` when no process listens there within the bound."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.setblocking(False)  # noqa: FBT003 (the library's own form)
    try:
        async with asyncio.timeout(timeout_s):
            while not _connected(sock, path):  # noqa: ASYNC110 (only trying again tells)
                # The queue of those who wait to be let in is full; asyncio's own connect would take that for success.
                await asyncio.sleep(CONNECT_AGAIN_S)
    except (OSError, TimeoutError) as why:
        sock.close()
        raise PeerGone(f"no process answers on {path}: {why!r}") from None
    return FramedSocket(sock, frame_bytes_max)
