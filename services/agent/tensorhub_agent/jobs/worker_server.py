"""The unix socket on which an agent serves the workers of its host.

One connection is one process's hub object. It is taken from processes of the agent's own user only, must begin with
`Attach`, and ends when its process ends, however that comes about: the kernel closes the socket, and a pidfd tells of
a death that a forked child's copy of the socket hides.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from tensorhub_agent.runtime.rejections import REJECTIONS, RejectionKind
from tensorhub_agent.runtime.unix_server import UnixServer
from tensorhub_agent.storage.device_segments import HandedBackSegment
from tensorhub_common.errors import BadCommand, TensorHubError
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.handshake import Speaks, agreed, speaks
from tensorhub_common.protocol.worker import (
    FRAME_BYTES_MAX,
    REGISTERING_MAX,
    Attach,
    AttachRefused,
    Frame,
    FromWorker,
    HandedBack,
)
from tensorhub_common.runtime.framed_socket import FramedSocket, FrameTooLarge, PeerGone
from tensorhub_common.runtime.release import release
from tensorhub_common.runtime.supervision import Supervisor

ATTACH_S_MAX: Final = 5.0
"""A connection that has not said `Attach` within this is closed."""

SEND_S_MAX: Final = 10.0
"""A worker that takes no frame for this long is cut off; it attaches again when it goes on."""

HANDED_BACK_MAX: Final = 2 * REGISTERING_MAX
"""One connection hands back at most this number of segments for registrations that have not ended: two for each."""

DESCRIPTORS_MAX: Final = 2
"""A segment of a GPU has that of its memory, and that of its locks."""

TELLS_WAITING_MAX: Final = 4096
"""A worker with this many frames waiting for it is cut off: it asks and doesn't read the answers."""

_log: Final = logging.getLogger(__name__)
_frames: Final = msgspec.msgpack.Decoder(FromWorker)
_encode: Final = msgspec.msgpack.Encoder().encode


class WorkerConnection:
    """One attached connection."""

    def __init__(self, number: int, pid: int, framed: FramedSocket, job: str, work: Supervisor) -> None:
        """Take over an attached connection."""
        self.number, self.pid, self.job = number, pid, job
        self._framed = framed
        self._sending = work.group()
        self._handed_back: dict[int, list[HandedBackSegment]] = {}
        """Memory that the worker hands back, by the call that is to register it."""

    def tell(self, frame: Frame, *fds: int) -> None:
        """Send a frame, in order; `fds` are closed when it has been sent. A worker that is gone is told nothing."""
        if len(self._sending) >= TELLS_WAITING_MAX:
            # It says more than it hears.
            self._framed.close()
        self._sending.start(self._tell(_encode(frame), fds), "telling a worker", lambda _: self.close())

    async def _tell(self, body: bytes, fds: tuple[int, ...]) -> None:
        try:
            async with asyncio.timeout(SEND_S_MAX):
                await self._framed.send(body, *fds)
        except (PeerGone, TimeoutError):
            self._framed.close()
        finally:
            for fd in fds:
                os.close(fd)

    async def frames(self, handle: Callable[[FromWorker], Awaitable[None]]) -> None:
        """Hand on each frame until the connection ends. Raises `FrameTooLarge` or `BadCommand` for what is no frame."""
        while True:
            body = await self._framed.receive()
            try:
                frame = _frames.decode(body)
            except MALFORMED as why:
                raise BadCommand(f"a frame could not be read: {why}") from None
            if isinstance(frame, HandedBack):
                self._take(frame)
            else:
                await handle(frame)

    def _take(self, frame: HandedBack) -> None:
        if (
            not 1 <= frame.descriptors <= DESCRIPTORS_MAX
            or sum(map(len, self._handed_back.values())) >= HANDED_BACK_MAX
        ):
            raise BadCommand(
                f"'handed-back' comes with one to {DESCRIPTORS_MAX} descriptors, "
                f"and at most {HANDED_BACK_MAX} segments wait for 'register'"
            )
        fds = tuple(self._framed.take_fd() for _ in range(frame.descriptors))
        self._handed_back.setdefault(frame.call, []).append(HandedBackSegment(frame.segment, frame.is_live, fds))

    def handed_back(self, call: int) -> Sequence[HandedBackSegment]:
        """Return the memory that the worker hands back for a call that registers. It stays the connection's."""
        return self._handed_back.get(call, ())

    def drop_handed_back(self, call: int) -> None:
        """Close what the worker has handed back for a call."""
        for each in self._handed_back.pop(call, ()):
            each.close()

    def close(self) -> None:
        """End the connection."""
        self._framed.close()

    def over(self) -> None:
        """The connection has ended: close what no call has taken."""
        for call in list(self._handed_back):
            self.drop_handed_back(call)

    async def end(self) -> None:
        """End the connection when everything that it was told has been sent, which is bounded."""
        await self._sending.ended()
        self.close()


class WorkerHandler(Protocol):
    """Who serves the workers' frames."""

    async def attach(self, worker: WorkerConnection, attach: Attach) -> None:
        """Begin to serve; answers with `Attached`. Raises the error that the worker should see."""

    async def frame(self, worker: WorkerConnection, frame: FromWorker) -> None:
        """Take one frame."""

    def gone(self, worker: WorkerConnection) -> None:
        """Take note that the worker's connection has ended."""


class WorkerServer:
    """The listening socket and its connections."""

    def __init__(self, path: Path, desk: WorkerHandler) -> None:
        """Prepare; `start` listens."""
        self._desk = desk
        self._numbers = 0
        self._work = Supervisor("workers' connections")
        self._server = UnixServer(path, "worker", self._serve, self._work, frame_bytes_max=FRAME_BYTES_MAX)

    def start(self) -> None:
        """Listen at the path, with mode 0600. A socket that an earlier process left there is replaced."""
        self._server.start()

    @property
    def connections(self) -> int:
        """How many there are."""
        return self._server.connections

    async def stop(self) -> None:
        """End the connections and remove the socket."""
        await self._work.close()
        self._server.stop()

    async def _serve(self, framed: FramedSocket, pid: int) -> None:
        self._numbers += 1
        number = self._numbers
        death = _watch_death(pid, framed)
        worker = None
        try:
            async with asyncio.timeout(ATTACH_S_MAX):
                attach = _read_attach(await framed.receive())
            worker = WorkerConnection(number, pid, framed, attach.job, self._work)
            await self._desk.attach(worker, attach)
            await worker.frames(lambda frame: self._frame(worker, frame))
        except PeerGone:
            pass
        except TimeoutError:
            _log.warning("process %d connected and said nothing for %g s", pid, ATTACH_S_MAX)
        except TensorHubError as why:
            with contextlib.suppress(PeerGone, TimeoutError):
                async with asyncio.timeout(SEND_S_MAX):
                    await framed.send(_encode(AttachRefused(error=why.code, message=str(why))))
            if isinstance(why, BadCommand | FrameTooLarge):
                REJECTIONS.note(RejectionKind.FRAME, f"what process {pid} said, so its connection ends: {why}")
            else:
                _log.debug("the connection of process %d ends: %s", pid, why)
        finally:
            framed.close()
            if death is not None:
                asyncio.get_running_loop().remove_reader(death)
                os.close(death)
            if worker is not None:
                self._desk.gone(worker)
                worker.over()

    async def _frame(self, worker: WorkerConnection | None, frame: FromWorker) -> None:
        assert worker is not None
        await self._desk.frame(worker, frame)


def _read_attach(body: bytes) -> Attach:
    try:
        attach = msgspec.msgpack.decode(body, type=Attach)
    except MALFORMED as why:
        raise BadCommand(f"the first frame must be 'attach': {why}") from None
    agreed(speaks("this agent", release()), Speaks("the worker", attach.protocol, attach.newest, attach.release))
    return attach


def _watch_death(pid: int, framed: FramedSocket) -> int | None:
    """Close the connection when the process dies, even if a child of it keeps the socket open."""
    try:
        death = os.pidfd_open(pid)
    except OSError:
        # Gone already, or in another pid namespace: then the end of the connection alone tells.
        return None
    asyncio.get_running_loop().add_reader(death, framed.close)
    return death
