"""The reading side of the ucxx transport: one open lease, and the messages that bring its bytes.

A read posts its receives straight into the destination, tells the source what to send, and when the last message has
come has the copy pool hash the destination. Tiny pieces come packed, and are copied from the transport's own memory.

Invariants:
- `read` and `close` come back only when no receive is under way into their destination: completed, or the link closed
  by force and every cancellation seen.
- A tag is used once: the session's part of it is random, and the count goes up.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.encodings.codec_tasks import PatchTargets, patch_pieces, unpack_pieces
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES, digest_at
from tensorhub_agent.primitives.lease_messages import (
    Denied,
    LeaseMessage,
    ReaderDone,
    Welcome,
)
from tensorhub_agent.primitives.memory_region import MemoryRegion
from tensorhub_agent.runtime.shield import wait_shielded
from tensorhub_agent.transports.base import OnAvailability, OnLost, TransportLost, silent
from tensorhub_agent.transports.lease_session import LeaseSession
from tensorhub_agent.transports.ucxx.bounce_buffers import SlotPool
from tensorhub_agent.transports.ucxx.gather_client import GatherClient
from tensorhub_agent.transports.ucxx.link import LinkDown, UcxxBatch, UcxxLink
from tensorhub_agent.transports.ucxx.protocol.frames import (
    COUNT_BITS,
    FetchPacked,
    GatherDigests,
    LeaseClosed,
    PackReply,
    PackRequest,
    PatchRequest,
    PieceRequest,
    encode,
    from_source,
)
from tensorhub_agent.transports.ucxx.protocol.gather_plan import starts
from tensorhub_agent.transports.ucxx.protocol.message_plan import MessagePlan, messages_in, messages_of
from tensorhub_common.programs.regions import StridedCopies

DONE_S: Final = 0.5
"""A source that was told that all is done says so within this, or the connection is closed by force."""


class UcxxSession(LeaseSession):
    """One open lease. `UcxxTransport.open` makes it; see `SourceSession`."""

    def __init__(
        self,
        link: UcxxLink,
        tag: int,
        pool: CopyPool,
        store: SlotPool,
        on_lost: OnLost,
        on_have: OnAvailability,
        on_idle: Callable[[UcxxLink], None],
    ) -> None:
        """Take over a link. `tag` is the session's, with a count of zero.

        `on_idle` is given the link back if the session ends in order; else the session closes it.
        """
        super().__init__("a source's connection over ucxx", on_lost, on_have)
        self._on_idle = on_idle
        self._idle = asyncio.Event()
        self._is_open = False
        self.unanswered = True
        """Whether the source has said nothing at all yet."""
        self._link, self._pool = link, pool
        self._tag, self._tags_end = tag, tag + (1 << COUNT_BITS)
        self._packs = 0
        self._packing: dict[int, asyncio.Future[list[int]]] = {}
        """What is being packed, by number."""
        self._reading = 0
        """Batches under way."""
        self._welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._gatherer = GatherClient(self, link, pool, store)
        self._renewing: asyncio.Task[None] | None = None
        link.on_frame = self._work.guarded(self._took, "taking a frame")
        link.on_down = self._work.guarded(self.lose, "taking its end")

    async def welcomed(self) -> None:
        """Wait until the source has let us in. Raises `TransportLost` when it doesn't."""
        await self._welcomed
        self._is_open = True
        self._renewing = self._work.start(self.renew(), "renewing the lease")

    async def read(
        self, destination: MemoryRegion, spans: Spans, *, digests: bool, progress: Callable[[int], None] = silent
    ) -> bytes:
        """See `SourceSession.read`."""
        self.check_open()
        if isinstance(destination, memoryview):
            return await self._read(destination, spans, digests=digests, progress=progress)
        at = starts(spans.nbytes)
        landing = memoryview(bytearray(sum(spans.nbytes)))
        await self._read(landing, Spans(at, spans.origin, spans.nbytes), digests=False, progress=progress)
        job = self._pool.copy_and_digest(destination, landing, Spans(spans.to, at, spans.nbytes), digests=digests)
        return await job.result()

    async def _read(
        self, destination: memoryview, spans: Spans, *, digests: bool, progress: Callable[[int], None]
    ) -> bytes:
        """Bring pieces into memory of the host."""
        messages = messages_of(spans.to, spans.origin, spans.nbytes)
        bounce = memoryview(bytearray(messages.bounce_bytes))
        await self._bring(destination, bounce, messages, progress)
        return await self._settle(destination, bounce, spans, messages, digests=digests)

    async def gather(
        self,
        destination: MemoryRegion,
        regions: StridedCopies,
        *,
        digests: bool,
        progress: Callable[[int], None] = silent,
    ) -> None:
        """See `SourceSession.gather`."""
        self.check_open()
        self._reading += 1
        try:
            await self._gatherer.gather(destination, regions, digests=digests, progress=progress)
        finally:
            self._reading -= 1

    async def _bring(
        self, destination: MemoryRegion, bounce: MemoryRegion, messages: MessagePlan, progress: Callable[[int], None]
    ) -> None:
        if messages.nbytes:
            views = _views(destination, bounce, messages)
            await self._received(views, lambda tag: PieceRequest(tag, messages.origin, messages.nbytes), progress)

    async def overwrite(
        self, destination: MemoryRegion, base: MemoryRegion | None, wanted: PatchTargets
    ) -> tuple[bytes, list[bytes]]:
        """See `EncodingSession.overwrite`."""
        self.check_open()
        memory = memoryview(bytearray(sum(wanted.sizes)))
        if memory:
            some = [number for number, size in enumerate(wanted.sizes) if size]
            pieces, sizes = [wanted.pieces[each] for each in some], [wanted.sizes[each] for each in some]
            await self._received(messages_in(memory), lambda tag: PatchRequest(tag, pieces, sizes), silent)
        patches, at = [], 0
        for size in wanted.sizes:
            patches.append(bytes(memory[at : at + size]))
            at += size
        named = [(memoryview(patch), unit) for patch, unit in zip(patches, wanted.units, strict=True)]
        job = patch_pieces(self._pool, destination, base, wanted.spans, named)
        return await job.result(), patches

    async def unpack(self, destination: MemoryRegion, spans: Spans, units: Sequence[int]) -> tuple[bytes, int]:
        """See `EncodingSession.unpack`."""
        self.check_open()
        if isinstance(destination, memoryview):
            return await self._unpack(destination, spans, units)
        at = starts(spans.nbytes)
        landing = memoryview(bytearray(sum(spans.nbytes)))
        found, came = await self._unpack(landing, Spans(at, spans.origin, spans.nbytes), units)
        some = [number for number in range(len(at)) if any(digest_at(found, number))]
        part = Spans(*([column[number] for number in some] for column in (spans.to, at, spans.nbytes)))
        job = self._pool.copy_and_digest(destination, landing, part)
        return _woven(len(at), (some, await job.result())), came

    async def _unpack(self, destination: memoryview, spans: Spans, units: Sequence[int]) -> tuple[bytes, int]:
        """Unpack pieces in memory of the host."""
        self._packs += 1
        number = self._packs
        sizes = await self._packed(PackRequest(number, list(spans.origin), list(spans.nbytes), list(units)))
        memory = memoryview(bytearray(sum(sizes)))
        if memory:
            await self._received(messages_in(memory), lambda tag: FetchPacked(number, tag), silent)
        ends = list(accumulate(sizes))
        coded = [(memory[end - size : end], unit) for end, size, unit in zip(ends, sizes, units, strict=True)]
        return await unpack_pieces(self._pool, destination, spans, coded).result(), len(memory)

    async def _packed(self, frame: PackRequest) -> list[int]:
        """Have pieces packed; return the sizes that they have then. The read's patience ends this wait, by closing."""
        answer: asyncio.Future[list[int]]
        answer = self._packing[frame.number] = asyncio.get_running_loop().create_future()
        self._link.send(encode(frame))
        self._reading += 1
        try:
            sizes = await answer
        finally:
            self._reading -= 1
            del self._packing[frame.number]
        if len(sizes) != len(frame.nbytes) or any(not 0 <= a < b for a, b in zip(sizes, frame.nbytes, strict=True)):
            self.lose("the source packed pieces into more bytes than they have")
            raise TransportLost(str(self.over))
        return sizes

    async def _received(
        self,
        views: Sequence[MemoryRegion],
        frame: Callable[[int], PieceRequest | PatchRequest | FetchPacked],
        progress: Callable[[int], None],
    ) -> None:
        """Post receives, ask for what should go into them, and wait until they have ended."""
        tag = self.take_tags(len(views))
        batch = self._link.receive(views, tag)
        batch.progress = progress
        self._link.send(encode(frame(tag)))
        self._reading += 1
        try:
            await self.batch_ended(batch)
        finally:
            self._reading -= 1
        try:
            batch.check()
        except LinkDown as why:
            self.lose(f"the source's bytes did not come: {why}")
            raise TransportLost(str(self.over)) from None

    async def batch_ended(self, batch: UcxxBatch) -> None:
        """Wait for a batch's end. A cancelled caller closes the link, and waits until its receives have ended."""
        try:
            await asyncio.shield(batch.ended)
        except asyncio.CancelledError:
            with contextlib.suppress(asyncio.CancelledError):
                await self.give_up("a read of the session was cancelled")
            with contextlib.suppress(asyncio.CancelledError):
                await wait_shielded(batch.ended)
            raise

    async def give_up(self, reason: str) -> None:
        """End the session by force; returns, also to who is cancelled, when no receive is under way any more."""
        self.over = self.over or reason
        self._end_waiting()
        await self._link.close()

    def take_tags(self, count: int) -> int:
        """Return the first of tags that were never used. Raises `TransportLost` when there are none."""
        tag = self._tag
        if tag + count > self._tags_end:
            self.lose("the session has used up its tags")
            raise TransportLost(str(self.over))
        self._tag += count
        return tag

    async def _settle(
        self, destination: MemoryRegion, bounce: MemoryRegion, spans: Spans, messages: MessagePlan, *, digests: bool
    ) -> bytes:
        """Copy what came packed to where it belongs, and hash everything there."""
        packed = messages.packed
        if not packed:
            return await self._pool.digest(destination, spans).result() if digests else b""
        part = Spans(
            [spans.to[number] for number in packed], list(packed.values()), [spans.nbytes[number] for number in packed]
        )
        found = await self._pool.copy_and_digest(destination, bounce, part, digests=digests).result()
        if not digests:
            return b""
        others = [number for number in range(len(spans.nbytes)) if number not in packed]
        rest = Spans([spans.to[each] for each in others], [], [spans.nbytes[each] for each in others])
        rest = Spans(rest.to, rest.to, rest.nbytes)
        found_rest = await self._pool.digest(destination, rest).result()
        return _woven(len(spans.nbytes), (list(packed), found), (others, found_rest))

    async def _send(self, message: LeaseMessage) -> None:
        self._link.send(encode(message))

    async def _end(self) -> None:
        is_done = self._is_open and self.over is None and not self._reading and not self._confirmations
        self.over = self.over or "the session was closed"
        if self._renewing is not None:
            self._renewing.cancel()
        self._end_waiting()
        if is_done and await self._hand_back():
            self._on_idle(self._link)
        else:
            await self._link.close()
            await self.stop_copies()

    async def _hand_back(self) -> bool:
        """Say that all is done; tells whether the source has said that nothing of the lease is left."""
        self._link.send(encode(ReaderDone()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DONE_S):
                await self._idle.wait()
        return self._idle.is_set() and self._link.over is None

    # What the source says.

    def _took(self, data: bytes) -> None:
        self.unanswered = False
        with self.receiving():
            match from_source(data):
                case Welcome() if self._welcomed.cancelled() or not self._welcomed.done():
                    self._let_in()
                case Denied(reason):
                    self.lose(f"the source refused: {reason}")
                case GatherDigests() as sums:
                    self._gatherer.took(sums)
                case PackReply(number, sizes) if number in self._packing and not self._packing[number].done():
                    self._packing[number].set_result(sizes)
                case LeaseClosed():
                    self._idle.set()
                case other:
                    self.received(other)

    def _let_in(self) -> None:
        if self._welcomed.cancelled():
            # The caller has given up waiting, and closes: the frame is late, and makes sense all the same.
            self.lose("the source let us in too late")
        else:
            self._welcomed.set_result(None)

    def _end_waiting(self) -> None:
        super()._end_waiting()
        if not self._welcomed.done():
            self._welcomed.set_exception(TransportLost(str(self.over)))
            self._welcomed.exception()  # So that asyncio does not report it where no task waits for it.
        self._gatherer.end()
        for answer in self._packing.values():
            if not answer.done():
                answer.set_exception(TransportLost(str(self.over)))


def _views(destination: MemoryRegion, bounce: MemoryRegion, messages: MessagePlan) -> list[MemoryRegion]:
    views = []
    for number, (to, nbytes) in enumerate(zip(messages.to, messages.nbytes, strict=True)):
        memory = destination if number < messages.bounced else bounce
        views.append(memory[to : to + nbytes])
    return views


def _woven(count: int, *parts: tuple[list[int], bytes]) -> bytes:
    """Put the digests of several jobs into the order of the pieces; each part names its pieces."""
    digests = bytearray(count * PIECE_DIGEST_BYTES)
    for numbers, found in parts:
        for place, number in enumerate(numbers):
            cut = found[place * PIECE_DIGEST_BYTES : (place + 1) * PIECE_DIGEST_BYTES]
            digests[number * PIECE_DIGEST_BYTES : (number + 1) * PIECE_DIGEST_BYTES] = cut
    return bytes(digests)
