"""The serving side of the ucxx transport: accepts readers that show a ticket, and sends what they have memory for.

`transports/lease_server.py` describes the life of a lease.

Invariants:
- Not a byte is sent before the ticket was good, nor any that lies outside the lease's segment, or that belongs to a
  piece of a half-filled shard which is not stored yet.
- The segment stays mapped until the last send out of it has ended.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.primitives.lease_messages import AvailabilityUpdate, SourceMessage, split_update
from tensorhub_agent.primitives.memory_region import MemoryRegion
from tensorhub_agent.runtime.rejections import REJECTIONS, RejectionKind
from tensorhub_agent.storage.mapping_cache import DeviceMapping, Mapping, MappingCache
from tensorhub_agent.transports.base import BeyondGrant, ReadableRange
from tensorhub_agent.transports.lease_server import LeaseServer, LeaseState
from tensorhub_agent.transports.ucxx.bounce_buffers import SlotPool
from tensorhub_agent.transports.ucxx.gather_server import GatherServer
from tensorhub_agent.transports.ucxx.host_copies import on_host
from tensorhub_agent.transports.ucxx.link import UcxxLink
from tensorhub_agent.transports.ucxx.pack_server import PackServer
from tensorhub_agent.transports.ucxx.protocol.frames import (
    FetchPacked,
    GatherRequest,
    LeaseClosed,
    PackRequest,
    PatchRequest,
    PieceRequest,
    encode,
    from_reader,
)
from tensorhub_agent.transports.ucxx.protocol.message_plan import MESSAGES_MAX, messages_in
from tensorhub_common.errors import BadCommand, TensorHubError
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.runtime.supervision import Fault, Supervisor, TaskGroup

HELLO_S: Final = 2.0
"""A connection that has not shown a ticket within this time is closed."""

SILENCE_S: Final = 15.0
"""A reader that says nothing for this long is gone; it renews each second. The lease's own bound is shorter."""

WANTED_BYTES_MAX: Final = 4 * 1024 * 1024 * 1024
"""A reader has receives posted for this many bytes at most: far more than any window."""

IDLE_S: Final = 120.0
"""A connection that opens no other lease for this long is closed."""

LAST_WORD_S: Final = 0.05
"""A reader whose lease is broken has this long to read why; then its connection is closed."""

_log: Final = logging.getLogger(__name__)


class _OpenSegment(NamedTuple):
    """The segment of one open lease, and what reads from it."""

    mapping: Mapping | DeviceMapping
    readable: ReadableRange
    patches: Sequence[tuple[bytes, ...] | None]
    gathering: GatherServer
    packing: PackServer
    copying: TaskGroup
    """What is on its way from a GPU's memory to the host's."""


class ReaderConnection:
    """One connection of a reader, from its arrival to its end."""

    def __init__(
        self,
        link: UcxxLink,
        lease: LeaseServer,
        cache: MappingCache,
        pool: CopyPool,
        slots: SlotPool,
        gone: Callable[["ReaderConnection"], None],
        *,
        count: Callable[[int], None],
    ) -> None:
        """Wait for the ticket.

        `gone` is called when nothing of the connection is left, `count` with what was sent.
        """
        self._link, self._lease, self._cache, self._pool, self._slots = link, lease, cache, pool, slots
        self._gone, self._count = gone, count
        self._segment: _OpenSegment | None = None
        self._sending_bytes = 0
        self._ending: asyncio.Task[None] | None = None
        self._work = Supervisor("a reader's connection over ucxx", on_fault=self._failed)
        self._silent = self._call_later(HELLO_S, "it showed no ticket")
        link.on_frame = self._work.guarded(self._took, "taking a frame")
        link.on_down = self._work.guarded(self.end, "taking its end")

    @property
    def lease(self) -> str | None:
        """The lease that is open."""
        return None if self._lease.opened is None else self._lease.opened.lease

    def _call_later(self, delay_s: float, why: str) -> asyncio.TimerHandle:
        return self._work.call_later(delay_s, self.end, why, what="a silence")

    def _failed(self, fault: Fault) -> None:
        """End the connection after an error in serving it. Where that is what fails, the process has to end."""
        if self._ending is not None:
            raise fault.error
        self.end(f"the agent failed: {fault.error!r}")

    def announce(self, update: AvailabilityUpdate) -> None:
        """Tell the reader of the pieces here."""
        self._send(self._lease.announce(update))

    def _send(self, messages: Sequence[SourceMessage]) -> None:
        for message in messages:
            parts = split_update(message) if isinstance(message, AvailabilityUpdate) else (message,)
            for part in parts:
                self._link.send(encode(part))

    def break_off(self, reason: str) -> None:
        """Tell the reader that its lease is over, and end the connection. The authority is not told."""
        if self._ending is None:
            self._send(self._lease.break_lease(reason))
            self._ending = self._work.start(self._end(LAST_WORD_S), "ending")

    def end(self, why: str) -> None:
        """End the connection, because of what is said."""
        if self._ending is None:
            if self._segment is not None:
                _log.debug("a reader's connection ends: %s", why)
            self._ending = self._work.start(self._end(0), "ending")

    async def ended(self) -> None:
        """Wait for the end that was begun."""
        if self._ending is not None:
            await asyncio.gather(self._ending, return_exceptions=True)

    async def _end(self, after_s: float) -> None:
        self._silent.cancel()
        segment = self._segment
        if segment is not None:
            segment.gathering.stop()
        self._lease.connection_lost()
        if after_s:
            await asyncio.sleep(after_s)
        await self._link.close()
        if segment is not None:
            await segment.gathering.ended()
            await segment.packing.ended()
            await segment.copying.ended()
            self._cache.release(segment.mapping)
        self._gone(self)

    def _took(self, data: bytes) -> None:
        if self._ending is not None:
            return
        self._silent.cancel()
        self._silent = self._call_later(SILENCE_S, "it was silent for too long")
        try:
            frame = from_reader(data)
            if self._lease.state is not LeaseState.OPEN:
                self._open(frame)
            elif self._segment is not None:
                self._answer(self._segment, frame)
        except (TensorHubError, OSError, *MALFORMED) as why:
            kind = RejectionKind.RANGE if isinstance(why, BeyondGrant) else RejectionKind.FRAME
            REJECTIONS.note(kind, f"what a reader said over ucxx, so its connection ends: {why}")
            self.end(str(why))

    def _open(self, frame: object) -> None:
        messages = self._lease.receive(frame)
        opened = self._lease.opened
        if self._lease.state is not LeaseState.OPEN or opened is None:
            self._send(messages)
            self._ending = self._work.start(self._end(LAST_WORD_S), "ending")
            return
        segment, link, pool = opened.segment, self._link, self._pool
        fd = segment.open_readonly()
        mapping = self._cache.acquire_any(segment.name, fd, segment.nbytes, segment.origin, segment.device)
        readable = ReadableRange(mapping.view, opened.lacks)
        gathering = GatherServer(link, pool, self._slots, readable, self._sent, self.end)
        packing = PackServer(link, pool, readable, self._settle, self.end)
        self._segment = _OpenSegment(mapping, readable, opened.patches, gathering, packing, self._work.group())
        self._send(messages)

    def _answer(self, segment: _OpenSegment, frame: object) -> None:
        match frame:
            case PieceRequest():
                self._send_pieces(segment, frame)
            case GatherRequest():
                self._sending_bytes += segment.gathering.take(frame, WANTED_BYTES_MAX - self._sending_bytes)
            case PackRequest():
                segment.packing.take(frame)
            case FetchPacked():
                self._transmit(messages_in(segment.packing.fetch(frame)), frame.tag)
            case PatchRequest():
                self._send_patches(segment, frame)
            case _:
                self._send(self._lease.receive(frame))
                self._settle()

    def _send_pieces(self, segment: _OpenSegment, want: PieceRequest) -> None:
        if not 0 < len(want.nbytes) == len(want.origin) <= MESSAGES_MAX:
            raise BadCommand(f"{len(want.nbytes)} messages from {len(want.origin)} places can't be sent")
        segment.readable.check(want.origin, want.nbytes)
        view = segment.readable.view
        if isinstance(view, memoryview):
            self._transmit([view[at : at + size] for at, size in zip(want.origin, want.nbytes, strict=True)], want.tag)
        else:
            total = self._counted(want.nbytes)
            segment.copying.start(self._send_copied(view, want, total), "copying pieces to the host")

    async def _send_copied(self, view: MemoryRegion, want: PieceRequest, total: int) -> None:
        """Send pieces by way of the host's memory, which the batch holds until its last send has ended."""
        copied, at = await on_host(self._pool, view, want.origin, want.nbytes)
        batch = self._link.transmit([copied[a : a + size] for a, size in zip(at, want.nbytes, strict=True)], want.tag)
        batch.ended.add_done_callback(self._work.guarded(lambda _: self._sent(total), "counting what was sent"))

    def _send_patches(self, segment: _OpenSegment, want: PatchRequest) -> None:
        """Send patches, which are no memory that may change: they go also when the lease has just been broken."""
        if not 0 < len(want.pieces) == len(want.sizes) <= MESSAGES_MAX:
            raise BadCommand(f"{len(want.sizes)} patches of {len(want.pieces)} pieces can't be sent")
        patches: list[bytes] = []
        for piece, size in zip(want.pieces, want.sizes, strict=True):
            steps = segment.patches[piece] if 0 <= piece < len(segment.patches) else None
            if not steps or sum(map(len, steps)) != size:
                raise BeyondGrant(f"{size} bytes of patches of piece {piece} were asked for, and were not offered")
            patches += steps
        self._transmit(messages_in(memoryview(b"".join(patches))), want.tag)

    def _transmit(self, views: Sequence[MemoryRegion], tag: int) -> None:
        total = self._counted([len(view) for view in views])
        batch = self._link.transmit(views, tag)
        batch.ended.add_done_callback(self._work.guarded(lambda _: self._sent(total), "counting what was sent"))

    def _counted(self, sizes: Sequence[int]) -> int:
        """Count what is about to be sent; return its bytes. Raises `BeyondGrant`."""
        total = sum(sizes)
        if self._sending_bytes + total > WANTED_BYTES_MAX:
            raise BeyondGrant(f"more than {WANTED_BYTES_MAX} bytes were asked for at a time")
        self._sending_bytes += total
        return total

    def _sent(self, nbytes: int) -> None:
        self._sending_bytes -= nbytes
        self._count(nbytes)
        self._settle()

    def _settle(self) -> None:
        """End a lease that is done, once nothing of it is under way, and wait for another ticket."""
        segment = self._segment
        if self._sending_bytes or self._ending is not None or segment is None or segment.packing.is_busy:
            return
        if not self._lease.release():
            return
        self._cache.release(segment.mapping)
        self._segment = None
        self._silent.cancel()
        self._silent = self._call_later(IDLE_S, "it opened no other lease")
        self._link.send(encode(LeaseClosed()))
