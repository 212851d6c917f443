"""The reading side of `gather` over ucxx: lots of boxes, several of them under way.

A lot's receives are posted straight into the destination where a message lies there in one piece, else into a slot of
bounce memory; then the source is told. When all has come it is compared with what the source says that it sent, and
the slot is copied to where its boxes belong, while the next lots are on the wire.

Invariants:
- `gather` comes back only when no receive is under way and no copy either, into the destination or a slot.
- Nothing goes from a slot into the destination that is not what the source says that it has sent.
- The session has `LOTS_MAX` lots under way at most, and as many slots.
"""

import asyncio
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Final, Protocol

from msgspec.structs import replace

from tensorhub_agent.casting.conversion import check_cast
from tensorhub_agent.compute.batch import PoolBatch
from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.compute.strided_copy import copy_boxes
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES
from tensorhub_agent.primitives.forms import check_boxes, packed_strides
from tensorhub_agent.primitives.memory_region import MemoryRegion
from tensorhub_agent.transports.base import TransportLost
from tensorhub_agent.transports.ucxx.bounce_buffers import BounceBuffers, SlotPool
from tensorhub_agent.transports.ucxx.link import LinkDown, UcxxBatch, UcxxLink
from tensorhub_agent.transports.ucxx.protocol.frames import GatherDigests, encode
from tensorhub_agent.transports.ucxx.protocol.gather_plan import GatherBatch, gather_batches, starts
from tensorhub_common.errors import BadCommand
from tensorhub_common.programs.regions import StridedCopies, StridedForm

LOTS_MAX: Final = 8
"""The lots that a session has under way: with slots of 4 MiB enough for a wire of 25 Gbit/s and 10 ms."""


class SessionHandle(Protocol):
    """The session, as far as this needs it."""

    over: str | None
    """Why the session is over, if it is."""

    def check_open(self) -> None:
        """Raise `TransportLost` if the session is over."""

    def take_tags(self, count: int) -> int:
        """Return the first of tags that were never used. Raises `TransportLost` when there are none."""

    def lose(self, reason: str) -> None:
        """The source is of no more use."""

    async def give_up(self, reason: str) -> None:
        """End the session by force; returns, also to who is cancelled, when no receive is under way any more."""

    async def batch_ended(self, batch: UcxxBatch) -> None:
        """Wait for a batch's end. A cancelled caller ends the session, and waits until its receives have ended."""

    async def finish(self, batch: PoolBatch) -> None:
        """Wait for a batch of the copy pool, which the session's end stops. Raises `TransportLost` then."""


class GatherClient:
    """All that `gather` does in one session."""

    def __init__(self, lease: SessionHandle, link: UcxxLink, pool: CopyPool, store: SlotPool) -> None:
        """Bring boxes for a lease over its link."""
        self._lease, self._link, self._pool = lease, link, pool
        self._bounce = BounceBuffers(store, LOTS_MAX)
        self._room = asyncio.Semaphore(LOTS_MAX)
        self._sums: dict[int, asyncio.Future[bytes]] = {}

    async def gather(
        self, destination: MemoryRegion, regions: StridedCopies, *, digests: bool, progress: Callable[[int], None]
    ) -> None:
        """See `SourceSession.gather`."""
        check_boxes(regions, len(destination))
        if not isinstance(destination, memoryview):
            await self._gather_by_host(destination, regions, digests=digests, progress=progress)
            return
        for form in {id(form): form for form in regions.form if form.cast}.values():
            check_cast(form)
        lots = gather_batches(regions)

        async def worker(own: Iterator[GatherBatch]) -> None:
            for lot in own:
                async with self._room:
                    await self._bring(destination, lot, digests=digests, progress=progress)

        await self._all([asyncio.create_task(worker(chain((first,), lots))) for first in list(islice(lots, LOTS_MAX))])

    async def _gather_by_host(
        self, destination: MemoryRegion, regions: StridedCopies, *, digests: bool, progress: Callable[[int], None]
    ) -> None:
        """Bring the boxes, packed, into memory of the host, and lay them out in a GPU's from there."""
        packed: dict[int, tuple[StridedForm, StridedForm]] = {}
        for form in regions.form:
            if id(form) not in packed:
                strides, size = packed_strides(form.shape, form.to_itemsize), form.to_itemsize
                laid_out = StridedForm(form.shape, form.to_strides, strides, size, size)
                packed[id(form)] = replace(form, to_strides=strides), laid_out
        at = starts([form.nbytes for form in regions.form])
        landing = memoryview(bytearray(sum(form.nbytes for form in regions.form)))
        coming = StridedCopies(at, regions.origin, [packed[id(form)][0] for form in regions.form], regions.amax)
        await self.gather(landing, coming, digests=digests, progress=progress)
        there = StridedCopies(regions.to, at, [packed[id(form)][1] for form in regions.form])
        await self._lease.finish(copy_boxes(self._pool, destination, landing, there))

    async def _all(self, workers: list[asyncio.Task[None]]) -> None:
        """Wait until all have ended. When one fails, or we are cancelled, the session ends and with it the others."""
        waiting, cancelled = set(workers), None
        while waiting:
            try:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
                is_over = any(each.cancelled() or each.exception() is not None for each in done)
            except asyncio.CancelledError as why:
                is_over, cancelled = True, why
            if is_over and waiting:
                for each in waiting:
                    each.cancel()
        failed = [failure for each in workers if not each.cancelled() and (failure := each.exception()) is not None]
        if cancelled is not None or failed:
            await self._lease.give_up(f"a gather of the session ended early: {failed[0] if failed else 'cancelled'}")
        if cancelled is not None:
            raise cancelled
        if failed:
            raise failed[0]

    async def _bring(
        self, destination: MemoryRegion, lot: GatherBatch, *, digests: bool, progress: Callable[[int], None]
    ) -> None:
        if not lot.bounced_bytes:
            await self._receive(destination, memoryview(b""), lot, digests=digests, progress=progress)
            return
        async with self._bounce.slot() as slot:
            await self._receive(destination, slot, lot, digests=digests, progress=progress)
            await self._lease.finish(copy_boxes(self._pool, destination, slot, lot.unpacking()))

    async def _receive(
        self,
        destination: MemoryRegion,
        slot: MemoryRegion,
        lot: GatherBatch,
        *,
        digests: bool,
        progress: Callable[[int], None],
    ) -> None:
        """Have a lot's messages come, and compare them with what the source says of them."""
        self._lease.check_open()
        tag = self._lease.take_tags(len(lot.messages))
        batch = self._link.receive(_views(destination, slot, lot), tag)
        batch.progress = progress
        if digests:
            self._sums[tag] = asyncio.get_running_loop().create_future()
        self._link.send(encode(lot.frame(tag, sums=digests)))
        try:
            await self._lease.batch_ended(batch)
            batch.check()
            if digests:
                await self._compare(destination, slot, lot, await self._sums[tag])
        except LinkDown as why:
            self._lease.lose(f"the source's bytes did not come: {why}")
            raise TransportLost(str(self._lease.over)) from None
        finally:
            self._sums.pop(tag, None)

    async def _compare(self, destination: MemoryRegion, slot: MemoryRegion, lot: GatherBatch, sums: bytes) -> None:
        whole = [message for message in lot.messages if message.is_whole_here]
        here = _cuts(await self._digests(destination, [(each.items[0].to, each.nbytes) for each in whole]))
        bounced = [message.nbytes for message in lot.messages if not message.is_whole_here]
        there = _cuts(await self._digests(slot, list(zip(starts(bounced), bounced, strict=True))))
        if b"".join(next(here if message.is_whole_here else there) for message in lot.messages) != sums:
            why = "the bytes of a box are not what the source has sent"
            self._lease.lose(why)
            raise TransportLost(why)

    async def _digests(self, view: MemoryRegion, spans: list[tuple[int, int]]) -> bytes:
        at = [start for start, _ in spans]
        job = self._pool.digest(view, Spans(at, at, [nbytes for _, nbytes in spans]))
        await self._lease.finish(job)
        return await job.result()

    # What the session tells.

    def took(self, frame: GatherDigests) -> None:
        """The source says what it has sent. Raises `BadCommand` for an answer without a question, or a second one."""
        waiting = self._sums.get(frame.tag)
        if waiting is None or waiting.done():
            raise BadCommand("digests came without a request for them")
        if not frame.sums or len(frame.sums) % PIECE_DIGEST_BYTES:
            raise BadCommand(f"{len(frame.sums)} bytes are no digests")
        waiting.set_result(frame.sums)

    def end(self) -> None:
        """The session is over: end every wait for digests."""
        for waiting in self._sums.values():
            if not waiting.done():
                waiting.set_exception(TransportLost(str(self._lease.over)))
                waiting.exception()  # So that asyncio does not report it where no task waits for it.


def _cuts(digests: bytes) -> Iterator[bytes]:
    return (digests[at : at + PIECE_DIGEST_BYTES] for at in range(0, len(digests), PIECE_DIGEST_BYTES))


def _views(destination: MemoryRegion, slot: MemoryRegion, lot: GatherBatch) -> list[MemoryRegion]:
    views, at = [], 0
    for message in lot.messages:
        if message.is_whole_here:
            to = message.items[0].to
            views.append(destination[to : to + message.nbytes])
        else:
            views.append(slot[at : at + message.nbytes])
            at += message.nbytes
    return views
