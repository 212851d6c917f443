"""The thread to which everything of UCX belongs, and the links that it carries.

UCX's worker is used by one thread alone: it posts, progresses, sees what has completed and closes, so the event loop
computes nothing of it and UCX needs no locks. The thread gives up the GIL whenever it moves bytes or waits. What it has
seen goes to the event loop in one call a turn.

Invariants:
- A batch ends only when every one of its requests has ended: completed, failed, or cancelled by the close of its link.
  Its views are held until then.
- `UcxxLink.close` ends only when every request of the link has ended. UCX's own close must force: one that flushes
  waits for a peer that is stopped, and that peer, once woken, writes into memory which has long been given to others.
- A turn looks at the links that have something under way, and at those to which a frame has come; the others, however
  many, cost nothing.
- What can't be ended within `CLOSE_S_MAX` is a fault of the process: its end is the only thing left that keeps bytes
  from arriving. So is an error of the thread, and of what the event loop does with its events.
- The thread alone reports events and carries out commands, until it is over; from then on the event loop alone does.
"""

import asyncio
import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from tensorhub_agent.transports.base import TransportUnavailable
from tensorhub_agent.transports.ucxx.library import Library, Streams, load
from tensorhub_agent.transports.ucxx.link import UcxxBatch, UcxxLink
from tensorhub_agent.transports.ucxx.protocol.frames import FrameAssembler, framed
from tensorhub_common.errors import TensorHubError
from tensorhub_common.runtime.supervision import Supervisor

START_S_MAX: Final = 30.0
"""Loading UCX and looking at the machine's devices takes 0.3 s, and seconds on a busy host with many devices."""

CLOSE_S_MAX: Final = 10.0
"""What a closed link has under way must have ended within this. It takes milliseconds."""

LAST_WORDS_S: Final = 0.05
"""Frames that were said before a close get so long to leave."""

IDLE_S: Final = 1.0
"""A thread that has nothing to do looks around this often."""

LINKS_MAX: Final = 1024
"""More connections than this are not let in."""

REASON_CHARS_MAX: Final = 300

Command = tuple[Callable[..., None], tuple[Any, ...]]


class _LinkState:
    """What the thread knows of one link: its endpoint, and the requests that are under way on it."""

    def __init__(self, link: UcxxLink, endpoint: Any) -> None:  # noqa: ANN401 (ucxx has no annotations)
        self.link, self.endpoint = link, endpoint
        self.handle: int = endpoint.handle
        self.inbox = FrameAssembler()
        self.sends: list[tuple[Any, Any]] = []
        """Frames under way, with the memory that they are sent from."""
        self.requests: list[tuple[Any, UcxxBatch, int]] = []
        """What is under way: request, batch, bytes."""
        self.broken = False
        self.down = False
        """The loop has been told that nothing more comes."""
        self.closing_since: float | None = None
        self.is_closed = False
        """Its endpoint is; what was under way may not have ended yet."""

    @property
    def is_busy(self) -> bool:
        """Whether each turn has to look at it."""
        return bool(self.sends or self.requests) or self.closing_since is not None

    @property
    def is_fit(self) -> bool:
        """Whether anything may be posted. UCX never comes back from posting to an endpoint that has failed."""
        return self.closing_since is None and not self.broken and self.endpoint.alive


class UcxxEngine:
    """UCX for one agent. Its methods belong to the event loop; the thread talks back by way of that loop."""

    def __init__(self, address: str, on_link: Callable[[UcxxLink], None], on_fault: Callable[[str], None]) -> None:
        """Listen at `address`, an IP. `on_link` is called with each connection of a reader."""
        self._address, self._on_link, self._on_fault = address, on_link, on_fault
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[int] = self._loop.create_future()
        self._commands: deque[Command] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wires: dict[UcxxLink, _LinkState] = {}
        self._by_handle: dict[int, _LinkState] = {}
        """Those whose endpoint is not closed, by what UCX calls it."""
        self._busy: set[_LinkState] = set()
        """Those that the next turn looks at."""
        self._events: list[Command] = []
        self._ending = self._is_over = False
        self._over_lock = threading.Lock()
        """Held where a command is put in line, and where the thread ends."""
        self._work = Supervisor("UCX", on_fault=lambda fault: on_fault(str(fault)))
        self._thread: threading.Thread | None = None
        self._library: Library
        self._worker: Any = None
        self._streams: Streams
        self._listener: Any = None

    @property
    def links(self) -> int:
        """How many links there are, closing ones included."""
        return len(self._wires)

    async def start(self) -> int:
        """Start the thread; returns the port at which it listens. Raises `TransportUnavailable`."""
        self._thread = self._work.thread(self._run, "ucxx")
        self._thread.start()
        try:
            async with asyncio.timeout(START_S_MAX):
                return await self._started
        except TimeoutError:
            # Should it start after all, it is to end at once: no task waits for it, nor for the reason of its failure.
            self._ending = True
            self._kick()
            raise TransportUnavailable(f"UCX did not start within {START_S_MAX:g} s: see 'tensorhub doctor'") from None

    async def stop(self) -> None:
        """Close all links and end the thread."""
        self._ending = True
        self._kick()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_S_MAX)

    def connect(self, address: str, port: int) -> UcxxLink:
        """Begin to connect. A link that can't be made goes down."""
        link = UcxxLink(self)
        self.do(self._connect, link, address, port)
        return link

    def do(self, what: Callable[..., None], *args: object) -> None:
        """Have the thread do something, after all that it was told before."""
        with self._over_lock:
            self._commands.append((what, args))
            if self._is_over:
                self._end_commands()
                return
        self._kick()

    def _kick(self) -> None:
        with contextlib.suppress(BlockingIOError):  # The thread has been woken often enough.
            os.eventfd_write(self._wake, 1)

    # What follows is the thread's.

    def _run(self) -> None:
        try:
            port = self._open()
        except Exception as why:  # noqa: BLE001 (whatever is wrong with UCX here, the agent goes on without it)
            self._events.append((self._fail_start, (TransportUnavailable(f"UCX can't be used here: {why}"),)))
            self._tell()
            return
        self._events.append((self._set_started, (port,)))
        self._tell()
        try:
            self._turn()
        except Exception as why:  # noqa: BLE001 (nothing can be known of the bytes under way any more)
            self._fail("the thread", why)
        self._shut()

    def _fail(self, what: str, why: Exception) -> None:
        """Tell the event loop of an error in the thread."""
        with contextlib.suppress(RuntimeError):  # The loop is closed, and the process at its end.
            self._loop.call_soon_threadsafe(self._work.fault, what, why)

    def _set_started(self, port: int) -> None:
        if not self._started.done():
            self._started.set_result(port)

    def _fail_start(self, why: TransportUnavailable) -> None:
        if not self._started.done():
            self._started.set_exception(why)

    def _open(self) -> int:
        library = self._library = load(self._address)
        self._worker = library.worker()
        self._streams = Streams(self._worker)
        self._listener = library.listen(self._worker, self._arrived)
        self._poll = select.epoll()
        self._poll.register(self._worker.epoll_file_descriptor, select.EPOLLIN)
        self._poll.register(self._wake, select.EPOLLIN)
        return int(self._listener.port)

    def _turn(self) -> None:
        worker, commands = self._worker, self._commands
        while not self._ending:
            while commands:
                what, args = commands.popleft()
                what(*args)
            moved = worker.progress_once()
            self._harvest()
            if self._events:
                self._tell()
            if not moved and not commands and worker.arm():
                self._wait()

    def _wait(self) -> None:
        closing = any(wire.closing_since is not None for wire in self._busy)
        for fd, _ in self._poll.poll(IDLE_S / 100 if closing else IDLE_S):
            if fd == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)

    def _tell(self) -> None:
        events, self._events = self._events, []
        with contextlib.suppress(RuntimeError):  # The loop is closed: no task waits.
            self._loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: list[Command]) -> None:
        """Hand on what the thread has seen, each event by itself. In the event loop."""
        for what, args in events:
            try:
                what(*args)
            except Exception as why:  # noqa: BLE001 (what is not taken now is never told again)
                self._work.fault("a callback", why)

    def _shut(self) -> None:
        """End everything, in the thread that owns it."""
        for wire in self._wires.values():
            if not wire.is_closed:
                self._close_endpoint(wire)
        until = time.monotonic() + CLOSE_S_MAX
        while any(wire.requests for wire in self._wires.values()) and time.monotonic() < until:
            self._worker.cancel_inflight_requests()
            self._worker.progress_once()
            self._harvest()
        links = list(self._wires)
        self._wires.clear()
        self._busy.clear()
        self._listener = None
        self._worker.progress()
        self._poll.close()
        self._worker = None
        with self._over_lock:
            self._is_over = True
            self._events += [(link.has_closed, ()) for link in links]
            self._end_commands()

    def _end_commands(self) -> None:
        """Answer what came too late: without links nothing can be posted, and every close has ended."""
        while self._commands:
            what, args = self._commands.popleft()
            what(*args)
        self._tell()

    # Links.

    def _arrived(self, endpoint: Any) -> None:  # noqa: ANN401
        """Take in a new connection to the listener; UCX calls this within a progress of this thread."""
        if len(self._wires) >= LINKS_MAX:
            # Not here: UCX is in the middle of its progress.
            self._commands.append((endpoint.close_blocking, ()))
            return
        try:
            link = UcxxLink(self)
            self._adopt(link, endpoint)
            self._events.append((self._on_link, (link,)))
        except Exception as why:  # noqa: BLE001 (nothing may escape into UCX)
            self._fail("taking in a connection", why)

    def _connect(self, link: UcxxLink, address: str, port: int) -> None:
        try:
            endpoint = self._library.connect(self._worker, address, port)
        except Exception as why:  # noqa: BLE001 (ucxx raises what it likes)
            self._events.append((link.went_down, (_said(why),)))
            return
        self._adopt(link, endpoint)

    def _adopt(self, link: UcxxLink, endpoint: Any) -> None:  # noqa: ANN401
        wire = self._wires[link] = _LinkState(link, endpoint)
        self._by_handle[wire.handle] = wire

        def broken(*_: object) -> None:
            wire.broken = True
            self._busy.add(wire)

        endpoint.set_close_callback(broken)

    def post_frame(self, link: UcxxLink, data: bytes) -> None:
        """Send a frame. For `UcxxLink`, in the thread."""
        wire = self._wires.get(link)
        if wire is None or not wire.is_fit:
            return
        memory = framed(data)
        try:
            wire.sends.append((wire.endpoint.stream_send(self._library.array(memory)), memory))
            self._busy.add(wire)
        except Exception as why:  # noqa: BLE001
            self._lose(wire, _said(why))

    def post_batch(self, link: UcxxLink, batch: UcxxBatch, tag: int) -> None:
        """Post a batch's sends or receives; view i goes by tag + i. For `UcxxLink`, in the thread."""
        wire = self._wires.get(link)
        if wire is None or not wire.is_fit:
            batch.fail("the connection has ended")
        else:
            post = wire.endpoint.tag_recv if batch.receives else wire.endpoint.tag_send
            self._busy.add(wire)
            try:
                for number, view in enumerate(batch.views):
                    request = post(self._library.array(view), self._library.tag(tag + number))
                    wire.requests.append((request, batch, len(view)))
                    batch.left += 1
            except Exception as why:  # noqa: BLE001
                batch.fail(_said(why))
                self._lose(wire, _said(why))
        batch.is_posted = True
        if not batch.left:
            self._events.append((batch.end, ()))

    def post_close(self, link: UcxxLink) -> None:
        """Close a link by force. For `UcxxLink`, in the thread."""
        wire = self._wires.get(link)
        if wire is None:
            self._events.append((link.has_closed, ()))
        elif wire.closing_since is None:
            wire.closing_since = time.monotonic()
            self._busy.add(wire)

    def _close_endpoint(self, wire: _LinkState) -> None:
        wire.is_closed = True
        del self._by_handle[wire.handle]
        wire.endpoint.close_blocking()
        wire.endpoint.remove_close_callback()

    # What has completed.

    def _harvest(self) -> None:
        for handle in self._streams.ready():
            wire = self._by_handle.get(handle)
            if wire is not None:
                self._take_frames(wire)
        for wire in list(self._busy):
            if wire.sends:
                wire.sends = [each for each in wire.sends if not each[0].completed]
            if wire.requests:
                self._take_ended(wire)
            if wire.closing_since is not None:
                self._see_closed(wire)
            elif wire.broken and not wire.down:
                self._lose(wire, _why_ended(wire.endpoint))
            if not wire.is_busy:
                self._busy.discard(wire)

    def _take_frames(self, wire: _LinkState) -> None:
        if wire.down or wire.closing_since is not None:
            return
        try:
            frames = wire.inbox.take(self._streams.read(wire.handle))
        except (TensorHubError, OSError) as why:
            self._lose(wire, _said(why))
        else:
            self._events += [(wire.link.took_frame, (frame,)) for frame in frames]

    def _take_ended(self, wire: _LinkState) -> None:
        left = []
        for each in wire.requests:
            request, batch, nbytes = each
            if not request.completed:
                left.append(each)
                continue
            try:
                request.check_error()
            except Exception as why:  # noqa: BLE001
                batch.fail(_said(why))
            batch.left -= 1
            if not batch.left and batch.is_posted:
                self._events.append((batch.end, ()))
            elif batch.counts(nbytes, time.monotonic()):
                self._events.append((batch.progress, (batch.take_count(),)))
        wire.requests = left

    def _see_closed(self, wire: _LinkState) -> None:
        assert wire.closing_since is not None
        if not wire.is_closed:
            if not wire.sends or wire.broken or time.monotonic() > wire.closing_since + LAST_WORDS_S:
                self._close_endpoint(wire)
        elif not wire.requests:
            del self._wires[wire.link]
            self._busy.discard(wire)
            self._events.append((wire.link.has_closed, ()))
        elif self._worker.cancel_inflight_requests():
            # Receives of an endpoint that the other side ended outlive our close; ucxx leaves them to this call.
            pass
        elif time.monotonic() > wire.closing_since + CLOSE_S_MAX:
            wire.closing_since = float("inf")
            why = f"UCX has not ended {len(wire.requests)} requests of a closed connection within {CLOSE_S_MAX:g} s"
            self._events.append((self._on_fault, (why,)))

    def _lose(self, wire: _LinkState, why: str) -> None:
        if not wire.down:
            wire.down = True
            self._events.append((wire.link.went_down, (why,)))


def _said(why: Exception) -> str:
    return (str(why) or type(why).__name__)[:REASON_CHARS_MAX]


def _why_ended(endpoint: Any) -> str:  # noqa: ANN401
    try:
        endpoint.raise_on_error()
    except Exception as why:  # noqa: BLE001
        return f"the connection ended: {_said(why)}"
    return "the other side has ended the connection"
