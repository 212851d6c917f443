"""The serving side of the ucxx transport: lets readers in that show a ticket, and sends what they have memory for.

Always true:
- Not a byte is sent before the ticket was good, nor any that lies outside the lease's segment, or that belongs to a
  piece of a half-filled shard which does not stand there yet.
- A lease that was opened and not broken is told to have ended exactly once, whatever its reader did.
- The segment stays mapped until the last send out of it has ended.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
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
from tensorhub_agent.runtime.rejections import REJECTIONS, RejectionKind
from tensorhub_agent.storage.mapping_cache import Mapping, MappingCache
from tensorhub_agent.transports.base import LeaseOpened, TicketRejected
from tensorhub_agent.transports.ucxx.gather_server import BeyondGrant, GatherServer, IsMissing
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
from tensorhub_common.protocol.handshake import Speaks, agreed, speaks
from tensorhub_common.runtime.supervision import Fault, Supervisor

HELLO_S: Final = 2.0
"""A connection that has not shown a ticket within this is closed."""

SILENCE_S: Final = 15.0
"""A reader that says nothing for this long is gone; it renews each second. The lease's own bound is shorter."""

WANTED_BYTES_MAX: Final = 4 * 1024 * 1024 * 1024
"""A reader has memory waiting for so much at most: far more than any window."""

IDLE_S: Final = 120.0
"""A connection that opens no other lease for this long is closed."""

LAST_WORD_S: Final = 0.05
"""A reader whose lease is broken gets so long to hear why; then its connection is closed under it."""

_log: Final = logging.getLogger(__name__)


class Book:
    """Whom the serving side asks about leases: the methods of a `LeaseBook`."""

    def __init__(
        self,
        redeem: Callable[[str, str], LeaseOpened | TicketRejected],
        renew: Callable[[str], bool],
        holds: Callable[[str], bool],
        ended: Callable[[str, bool], None],
    ) -> None:
        """Take the four of them."""
        self.redeem, self.renew, self.holds, self.ended = redeem, renew, holds, ended


class Served:
    """One connection of a reader, from its arrival to its end."""

    def __init__(
        self,
        link: UcxxLink,
        agent: str,
        book: Book,
        cache: MappingCache,
        pool: CopyPool,
        gathering: Callable[[memoryview, IsMissing | None, Callable[[int], None], Callable[[str], None]], GatherServer],
        gone: Callable[["Served"], None],
        *,
        count: Callable[[int], None],
    ) -> None:
        """Wait for the ticket. `gathering` makes what serves boxes of an open lease's segment.

        `gone` is called when nothing of the connection is left, `count` with what was sent.
        """
        self._count, self._new_gathering = count, gathering
        self._gathering: GatherServer | None = None
        self._packing: PackServer | None = None
        self._pool = pool
        self._link, self._agent, self._book, self._cache, self._gone = link, agent, book, cache, gone
        self.lease: str | None = None
        self._mapping: Mapping | None = None
        self._lacks: Callable[[int, int], bool] | None = None
        self._patches: Sequence[tuple[bytes, ...] | None] = ()
        self._sending_bytes = 0
        self._is_done = self._is_broken = False
        self._ending: asyncio.Task[None] | None = None
        self._work = Supervisor("a reader's connection over ucxx", on_fault=self._failed)
        self._silent = self._call_later(HELLO_S, "it showed no ticket")
        link.on_frame = self._work.guarded(self._took, "taking a frame")
        link.on_down = self._work.guarded(self.end, "taking its end")

    def _call_later(self, delay_s: float, why: str) -> asyncio.TimerHandle:
        return self._work.call_later(delay_s, self.end, why, what="a silence")

    def _failed(self, fault: Fault) -> None:
        """End the connection after an error in serving it. Where that is what fails, the process has to end."""
        if self._ending is not None:
            raise fault.error
        self.end(f"the agent failed: {fault.error!r}")

    def announce(self, news: AvailabilityUpdate) -> None:
        """Tell the reader of the pieces here."""
        if self._ending is None and not self._is_done:
            for frame in split_update(news):
                self._link.send(encode(frame))

    def break_off(self, reason: str) -> None:
        """Tell the reader that its lease is over, and end the connection. The book is not told."""
        if self._ending is None:
            self._is_broken = True
            self._link.send(encode(LeaseBroken(reason[:REASON_CHARS_MAX])))
            self._ending = self._work.start(self._end(LAST_WORD_S), "ending")

    def end(self, why: str) -> None:
        """End the connection, because of what is said."""
        if self._ending is None:
            if self.lease is not None:
                _log.debug("a reader's connection ends: %s", why)
            self._ending = self._work.start(self._end(0), "ending")

    async def ended(self) -> None:
        """Wait for the end that was begun."""
        if self._ending is not None:
            await asyncio.gather(self._ending, return_exceptions=True)

    async def _end(self, after_s: float) -> None:
        self._silent.cancel()
        if self._gathering is not None:
            self._gathering.stop()
        if self.lease is not None and not self._is_broken:
            self._book.ended(self.lease, False)  # noqa: FBT003 (as LeaseBook has it)
        if after_s:
            await asyncio.sleep(after_s)
        await self._link.close()
        if self._gathering is not None:
            await self._gathering.ended()
        if self._packing is not None:
            await self._packing.ended()
        if self._mapping is not None:
            self._cache.release(self._mapping)
        self._gone(self)

    def _took(self, data: bytes) -> None:
        if self._ending is not None:
            return
        self._silent.cancel()
        self._silent = self._call_later(SILENCE_S, "it was silent for too long")
        try:
            frame = from_reader(data)
            if self.lease is None:
                self._let_in(frame)
            elif self._is_done:
                raise BadCommand(f"{type(frame).__name__} may not be said after Done")
            else:
                self._answer(self.lease, frame)
        except (TensorHubError, OSError, *MALFORMED) as why:
            kind = RejectionKind.RANGE if isinstance(why, BeyondGrant) else RejectionKind.FRAME
            REJECTIONS.note(kind, f"what a reader said over ucxx, so its connection ends: {why}")
            self.end(str(why))

    def _let_in(self, hello: object) -> None:
        if not isinstance(hello, Hello):
            raise BadCommand(f"the first frame must be Hello and was {type(hello).__name__}")
        opened = self._opened(hello)
        if isinstance(opened, TicketRejected):
            self._link.send(encode(Denied(opened.reason[:REASON_CHARS_MAX])))
            self._ending = self._work.start(self._end(LAST_WORD_S), "ending")
            return
        self.lease = opened.lease
        segment = opened.segment
        fd = segment.open_readonly()
        self._mapping = self._cache.acquire(segment.name, fd, segment.nbytes, segment.origin)
        self._link.send(encode(Welcome(segment.name, segment.nbytes)))
        self._lacks, self._patches = opened.lacks, opened.patches
        self._gathering = self._new_gathering(self._mapping.view, opened.lacks, self._sent, self.end)
        self._packing = PackServer(self._link, self._pool, self._mapping.view, opened.lacks, self._settle, self.end)
        if opened.pieces is not None:
            self.announce(PiecesAvailable(opened.pieces))
        if opened.promised:
            self.announce(PiecesPromised(opened.promised))

    def _opened(self, hello: Hello) -> LeaseOpened | TicketRejected:
        try:
            agreed(speaks(f"agent {self._agent}"), Speaks(hello.reader, hello.protocol, hello.newest))
        except BadCommand as why:
            return TicketRejected(str(why))
        return self._book.redeem(hello.ticket, hello.reader)

    def _answer(self, lease: str, frame: object) -> None:
        match frame:
            case PieceRequest():
                self._send(frame)
            case GatherRequest():
                self._gather(frame)
            case PackRequest():
                self._pack(frame)
            case FetchPacked():
                assert self._packing is not None
                self._transmit(messages_in(self._packing.fetch(frame)), frame.tag)
            case PatchRequest():
                self._send_patches(frame)
            case Renew():
                if self._book.renew(lease):
                    self.announce(PiecesAvailable())
            case ConfirmRequest(number):
                self._link.send(encode(ConfirmReply(number, self._book.holds(lease))))
            case ReaderDone():
                self._is_done = True
                self._settle()
            case other:
                raise BadCommand(f"{type(other).__name__} may not be said on an open lease")

    def _send(self, want: PieceRequest) -> None:
        assert self._mapping is not None
        view = self._mapping.view
        if not 0 < len(want.nbytes) == len(want.origin) <= MESSAGES_MAX:
            raise BadCommand(f"{len(want.nbytes)} messages from {len(want.origin)} places can't be sent")
        for origin, nbytes in zip(want.origin, want.nbytes, strict=True):
            if origin < 0 or nbytes <= 0 or nbytes > len(view) - origin:
                raise BeyondGrant(f"{nbytes} bytes from {origin} on reach beyond the segment of {len(view)}")
            if self._lacks is not None and self._lacks(origin, nbytes):
                raise BeyondGrant(f"{nbytes} bytes from {origin} on were asked for before they stand here")
        self._transmit(
            [view[origin : origin + nbytes] for origin, nbytes in zip(want.origin, want.nbytes, strict=True)], want.tag
        )

    def _send_patches(self, want: PatchRequest) -> None:
        """Send patches, which are no memory that may change: they go also when the lease has just been broken."""
        if not 0 < len(want.pieces) == len(want.sizes) <= MESSAGES_MAX:
            raise BadCommand(f"{len(want.sizes)} patches of {len(want.pieces)} pieces can't be sent")
        patches: list[bytes] = []
        for piece, size in zip(want.pieces, want.sizes, strict=True):
            steps = self._patches[piece] if 0 <= piece < len(self._patches) else None
            if not steps or sum(map(len, steps)) != size:
                raise BeyondGrant(f"{size} bytes of patches of piece {piece} were asked for, and were not offered")
            patches += steps
        self._transmit(messages_in(memoryview(b"".join(patches))), want.tag)

    def _transmit(self, views: list[memoryview], tag: int) -> None:
        total = sum(map(len, views))
        if self._sending_bytes + total > WANTED_BYTES_MAX:
            raise BeyondGrant(f"more than {WANTED_BYTES_MAX} bytes were asked for at a time")
        batch = self._link.transmit(views, tag)
        self._sending_bytes += total
        batch.ended.add_done_callback(self._work.guarded(lambda _: self._sent(total), "counting what was sent"))

    def _pack(self, frame: PackRequest) -> None:
        assert self._packing is not None
        self._packing.take(frame)

    def _gather(self, frame: GatherRequest) -> None:
        assert self._gathering is not None
        self._sending_bytes += self._gathering.take(frame, WANTED_BYTES_MAX - self._sending_bytes)

    def _sent(self, nbytes: int) -> None:
        self._sending_bytes -= nbytes
        self._count(nbytes)
        self._settle()

    def _settle(self) -> None:
        """End a lease that is done, once the last send has ended, and wait for another ticket."""
        is_packing = self._packing is not None and self._packing.is_busy
        if not self._is_done or self._sending_bytes or is_packing or self._ending is not None:
            return
        assert self.lease is not None
        assert self._mapping is not None
        self._book.ended(self.lease, True)  # noqa: FBT003 (as LeaseBook has it)
        self._cache.release(self._mapping)
        self.lease = self._mapping = self._gathering = self._packing = None
        self._patches = ()
        self._is_done = False
        self._silent.cancel()
        self._silent = self._call_later(IDLE_S, "it opened no other lease")
        self._link.send(encode(LeaseClosed()))
