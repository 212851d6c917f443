"""One connection to an agent: frames out without waiting, frames in as they come, descriptors beside them.

The agent attaches one descriptor to each frame of `WITH_FD`, or as many as it says; the kernel keeps descriptors in the
order of the bytes, so they belong to these frames in their order.

Invariants: frames go out whole and in the order of `send`, also where a sender is cancelled; after the connection has
ended `on_end` has been called once, unless this side ended it, and nothing more is handed over.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from tensorhub_common.errors import AgentUnavailable, TensorHubError
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.worker import FRAME_BYTES_MAX, Frame, FromAgent, Mapped, Registered, Spare
from tensorhub_common.runtime.framed_socket import FramedSocket
from tensorhub_common.runtime.supervision import Fault, Supervisor

UNSENT_BYTES_MAX: Final = 2 * FRAME_BYTES_MAX
"""What waits for an agent that doesn't read; on top of that, a frame is refused."""

WITH_FD: Final = (Registered, Spare, Mapped)
"""Frames that a descriptor belongs to."""

OnFrame = Callable[[FromAgent, tuple[int, ...]], None]
"""Takes a frame, and with those of `WITH_FD` the descriptors of a segment, which are then the taker's to close."""

OnEnd = Callable[[str], None]
"""Takes the reason why the connection ended."""

_frames: Final[msgspec.msgpack.Decoder[FromAgent]] = msgspec.msgpack.Decoder(FromAgent)
_encode: Final = msgspec.msgpack.Encoder().encode


class Connection:
    """One connection to an agent. Make it with `dial`; it belongs to the event loop that made it."""

    def __init__(
        self,
        sock: socket.socket,
        on_frame: OnFrame,
        on_end: OnEnd,
        work: Supervisor,
        last_words: Callable[[], None] | None = None,
    ) -> None:
        self._socket = sock
        self._last_words = last_words
        self._framed = FramedSocket(sock, FRAME_BYTES_MAX)
        self._on_frame = on_frame
        self._on_end = on_end
        self._unsent: asyncio.Queue[tuple[bytes, tuple[int, ...]]] = asyncio.Queue()
        self._unsent_bytes = 0
        self._open = True
        self._tasks = (
            work.start(self._read(), "reading what the agent says", self._on_fault),
            work.start(self._write(), "writing to the agent", self._on_fault),
        )

    @property
    def is_open(self) -> bool:
        """Whether neither side has ended it, as far as is known."""
        return self._open

    def send(self, frame: Frame, *fds: int) -> None:
        """Send a frame, after all earlier ones, and with it descriptors, which stay the caller's.

        On a connection that has ended nothing happens: `on_end` was called. Raises `AgentUnavailable` for a frame that
        is too large, while too much waits to be read, and without descriptors to spare.
        """
        body = _encode(frame)
        if len(body) > FRAME_BYTES_MAX:
            raise AgentUnavailable(
                f"a frame of {len(body)} bytes is more than an agent takes ({FRAME_BYTES_MAX}): use more shards"
            )
        if self._unsent_bytes + len(body) > UNSENT_BYTES_MAX:
            raise AgentUnavailable(
                f"the agent has not read {self._unsent_bytes} bytes that were sent to it: see 'tensorhub doctor'"
            )
        if self._open:
            own = _duplicated(fds)
            self._unsent_bytes += len(body)
            self._unsent.put_nowait((body, own))

    async def _write(self) -> None:
        try:
            while True:
                body, fds = await self._unsent.get()
                try:
                    await self._framed.send(body, *fds)
                finally:
                    _close_all(fds)
                self._unsent_bytes -= len(body)
                self._unsent.task_done()
        except TensorHubError as error:
            self._end(str(error))
        except asyncio.CancelledError:
            if self._open and self._last_words is not None:
                # The event loop ends, and the hub was not closed.
                self._last_words()
                self.push()
            raise

    def push(self) -> None:
        """Send what waits, as far as the socket takes it at once: the event loop turns no more."""
        while self._open and not self._unsent.empty():
            body, fds = self._unsent.get_nowait()
            _close_all(fds)
            if fds or not self._framed.send_now(body):
                return

    async def _read(self) -> None:
        try:
            while True:
                body = await self._framed.receive()
                frame = _frames.decode(body)
                count = frame.descriptors if isinstance(frame, WITH_FD) else 0
                self._on_frame(frame, tuple(self._framed.take_fd() for _ in range(count)))
        except TensorHubError as error:
            self._end(str(error))
        except MALFORMED as error:
            self._end(f"the agent sent a frame that this version can't read ({error})")

    def _on_fault(self, fault: Fault) -> None:
        """A fault of this program ends the connection: what was asked on it is asked anew on the next one."""
        self._end(f"this program failed with {type(fault.error).__name__}; its log says where")

    def _end(self, reason: str) -> None:
        if self._open:
            self.close()
            self._on_end(reason)

    async def drain(self, timeout_s: float) -> None:
        """Let what was sent go out, for at most so long."""
        if self._open:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._unsent.join()

    def close(self) -> None:
        """End the connection without a word to `on_end`. A second call does nothing."""
        self._open = False
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        while not self._unsent.empty():
            _close_all(self._unsent.get_nowait()[1])
        self._framed.close()

    def abandon(self) -> None:
        """In a child of `fork`: close its copy of the socket, which would hide the parent's end, and touch no loop."""
        self._open = False
        self._socket.close()


def _duplicated(fds: tuple[int, ...]) -> tuple[int, ...]:
    own: list[int] = []
    try:
        own.extend(map(os.dup, fds))
    except OSError as why:
        _close_all(own)
        raise AgentUnavailable(
            f"this process can't hand memory to its agent just now ({why.strerror}): it is tried again; allow it more "
            "open files (ulimit -n)"
        ) from why
    return tuple(own)


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


async def dial(
    path: Path, on_frame: OnFrame, on_end: OnEnd, work: Supervisor, last_words: Callable[[], None] | None = None
) -> Connection:
    """Connect to an agent's socket. Raises `OSError`. The caller bounds the time.

    `last_words` is called where the event loop ends before the connection: what it sends still goes out.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.setblocking(False)  # noqa: FBT003 (the library's own form)
    try:
        await asyncio.get_running_loop().sock_connect(sock, str(path))
    except BaseException:
        sock.close()
        raise
    return Connection(sock, on_frame, on_end, work, last_words)
