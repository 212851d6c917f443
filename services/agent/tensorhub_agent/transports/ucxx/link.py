"""One connection of UCX as the event loop sees it: frames, batches of bytes, and an end that can be waited for."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from tensorhub_agent.primitives.memory_region import MemoryRegion
from tensorhub_agent.runtime.shield import wait_shielded
from tensorhub_common.errors import TensorHubError


class LinkDown(TensorHubError):
    """The connection failed, or was closed, before a batch had come whole."""


class EngineThread(Protocol):
    """The engine, as far as a link needs it."""

    def do(self, what: Callable[..., None], *args: object) -> None:
        """Have the thread do something, after all that it was told before."""

    def post_frame(self, link: "UcxxLink", data: bytes) -> None:
        """Send a frame, in the thread."""

    def post_batch(self, link: "UcxxLink", batch: "UcxxBatch", tag: int) -> None:
        """Post a batch, in the thread."""

    def post_close(self, link: "UcxxLink") -> None:
        """Close, in the thread."""


PROGRESS_S: Final = 0.25
"""Of a batch that is under way for long, news come so often at most."""


class UcxxBatch:
    """Messages that were posted together. What counts in it is the engine's thread's."""

    def __init__(self, views: Sequence[MemoryRegion], *, receives: bool) -> None:
        """Begin with nothing posted. UCX holds none of the memory that it was given, so the batch does."""
        self.views: Sequence[MemoryRegion] = views
        self.receives = receives
        self.left = 0
        self.is_posted = False
        self.progress: Callable[[int], None] = lambda _: None
        """Told in the event loop how many more bytes have come, now and then."""
        self._count = 0
        self._told_at = time.monotonic()
        self._failure: str | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, why: str) -> None:
        """Remember the first thing that went wrong."""
        self._failure = self._failure or why

    def counts(self, nbytes: int, now: float) -> bool:
        """Count what has come; tells whether it is time for news."""
        self._count += nbytes
        return now >= self._told_at + PROGRESS_S

    def take_count(self) -> int:
        """Return what has come since the last news."""
        count, self._count = self._count, 0
        self._told_at = time.monotonic()
        return count

    def end(self) -> None:
        """No request of the batch is under way any more."""
        self.views = ()
        if not self._ended.done():
            self._ended.set_result(None)

    @property
    def ended(self) -> asyncio.Future[None]:
        """Done once no request of the batch is under way any more, whatever came of it. Never cancel it."""
        return self._ended

    def check(self) -> None:
        """Raise `LinkDown` unless an ended batch came whole."""
        if self._failure is not None:
            raise LinkDown(self._failure)


class UcxxLink:
    """A connection to another agent. Set `on_frame` and `on_down` before the event loop turns."""

    def __init__(self, engine: EngineThread) -> None:
        """Begin; the engine connects it."""
        self._engine = engine
        self.over: str | None = None
        self.on_frame: Callable[[bytes], None] = lambda _: None
        self.on_down: Callable[[str], None] = lambda _: None
        self._closed: asyncio.Future[None] | None = None

    def send(self, data: bytes) -> None:
        """Send a frame. What can't be sent any more is dropped: the link goes down."""
        self._engine.do(self._engine.post_frame, self, data)

    def receive(self, views: Sequence[MemoryRegion], tag: int) -> UcxxBatch:
        """Wait for message i, sent with tag + i, in view i."""
        return self._post(views, tag, receives=True)

    def transmit(self, views: Sequence[MemoryRegion], tag: int) -> UcxxBatch:
        """Send view i with tag + i."""
        return self._post(views, tag, receives=False)

    def _post(self, views: Sequence[MemoryRegion], tag: int, *, receives: bool) -> UcxxBatch:
        batch = UcxxBatch(views, receives=receives)
        self._engine.do(self._engine.post_batch, self, batch, tag)
        return batch

    async def close(self) -> None:
        """Close the connection by force; returns when nothing of it is under way. A cancelled caller waits as well."""
        if self._closed is None:
            self._closed = asyncio.get_running_loop().create_future()
            self.over = self.over or "the connection was closed"
            self._engine.do(self._engine.post_close, self)
        await wait_shielded(self._closed)

    # What the engine tells, in the event loop.

    def took_frame(self, data: bytes) -> None:
        """A frame has come."""
        if self._closed is None:
            self.on_frame(data)

    def went_down(self, why: str) -> None:
        """Nothing more comes. The link has to be closed all the same."""
        if self.over is None:
            self.over = why
            self.on_down(why)

    def has_closed(self) -> None:
        """Nothing of the link is under way any more."""
        if self._closed is not None and not self._closed.done():
            self._closed.set_result(None)
