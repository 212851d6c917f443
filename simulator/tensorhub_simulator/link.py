"""One source of one read: a lease asked for over the modelled network, and bytes copied out of present memory.

Bytes are copied at random moments, half a piece at a time, from whatever stands in the source's memory just then, also
after the source has broken the lease, and into the destination until the link is closed. `local` reads the mapped
memory without the source's doing; `ucxx` needs the source to run, and its bytes arrive some time after they were sent.
"""

from collections import deque
from typing import TYPE_CHECKING, Final

from tensorhub_agent.effects import (
    BatchDone,
    Confirm,
    Confirmed,
    Key,
    OpenSource,
    Post,
    SourceClosed,
    SourceLost,
    SourceOpened,
)
from tensorhub_agent.serving import LeaseMove
from tensorhub_common.wire.transfer import LeaseAsk, LeaseGrant, LeaseRefusal, SourceId
from tensorhub_simulator.clock import Action
from tensorhub_simulator.memory import Segment, Violation

if TYPE_CHECKING:
    from tensorhub_simulator.agent import AgentNode

LEASE_ASK_S: Final = 1.5
RENEW_S: Final = 0.5
STUCK_S: Final = 0.05


class Link:
    """A reader's side of one source, with the source's side at the other end."""

    def __init__(self, reader: "AgentNode", effect: OpenSource) -> None:
        """Begin with the effect that asks for it."""
        self.reader, self.clock = reader, reader.world.clock
        self.key, self.number, self.share = effect.key, effect.source, effect.share
        self.version, self.root = effect.version, effect.root
        self.source = reader.world.agents[effect.share.source.agent]
        self.source_key = Key(self.key.model, effect.share.source.replica, effect.share.source.shard)
        self.source_life, self.reader_life = 0, reader.life
        self.lease = ""
        self.closing = self.closed = self.is_open = self.answered = False
        self.memory: Segment | None = None
        self.batches: deque[tuple[int, list[int]]] = deque()
        self._pumping = False
        self._at = 0
        self._wire: tuple[int, bytes] | None = None

    def _at_reader(self, delay_s: float, action: Action) -> None:
        """Plan something in the life of the reader that this belongs to."""
        self.clock.after(delay_s, self.reader, action, self.reader_life)

    # Opening.

    def open(self) -> None:
        """Ask for a lease."""
        world, reader = self.reader.world, self.reader
        core = reader.core
        me = SourceId(reader.name, core.incarnation, self.key.replica, self.key.shard)
        ask = LeaseAsk(
            job=world.job,
            model=self.key.model,
            source=self.share.source,
            version=self.version,
            root=self.root,
            reader=me,
        )
        self._at_reader(LEASE_ASK_S, self._silent)
        if world.net_loses():
            return
        self.clock.after(self.clock.lag(), None, lambda: self._ask_arrives(ask))

    def _silent(self) -> None:
        if not self.answered:
            self.answered = True
            self.lost("its agent did not answer")

    def _ask_arrives(self, ask: LeaseAsk) -> None:
        if not self.source.up:
            self._at_reader(self.clock.lag(), lambda: self._answer(LeaseRefusal(reason="no responders")))
            return
        self.clock.after(0.0, self.source, lambda: self._asked(ask))

    def _asked(self, ask: LeaseAsk) -> None:
        world = self.reader.world
        name = f"lease-{world.number()}"
        answer = self.source.core.lease_asked(ask, name, f"ticket-{world.number()}", "here", self.clock.now)
        self.source.set_timer()
        if not world.net_loses():
            self._at_reader(self.clock.lag(), lambda: self._answer(answer))

    def _answer(self, answer: LeaseGrant | LeaseRefusal) -> None:
        if self.answered:
            return
        self.answered = True
        if isinstance(answer, LeaseRefusal):
            self.lost(answer.reason)
            return
        self.lease = answer.lease
        self.reader.world.links[answer.lease] = self
        if self.closing:
            return
        if not self.source.up:
            self.lost("the connection was refused")
            return
        self.clock.after(self.clock.lag(), self.source, lambda: self._connected(answer))
        self.source_life = self.source.life
        self._at_reader(LEASE_ASK_S, self._unconnected)

    def _unconnected(self) -> None:
        if not self.is_open:
            self.lost("its transport did not open")

    def _connected(self, grant: LeaseGrant) -> None:
        lease = self.source.core.redeemed(grant.ticket, self.clock.now)
        self.source.set_timer()
        if lease is None:
            self._at_reader(self.clock.lag(), lambda: self.lost("the ticket is void"))
            return
        memory = self.source.shelf[lease.key].segment
        self._at_reader(self.clock.lag(), lambda: self._opened(memory, grant))

    def _opened(self, memory: Segment, grant: LeaseGrant) -> None:
        if self.closing:
            self._tell_source(LeaseMove.READER_GONE)
            return
        self.is_open, self.memory = True, memory
        self.reader.news(SourceOpened(self.key, self.number, grant.digests))
        self._renew()

    def _renew(self) -> None:
        if self.closing or not self.source_lives:
            return
        if self.source.runs:
            self.source.core.table.renew(self.lease, self.clock.now)
        self._at_reader(RENEW_S, self._renew)

    @property
    def source_lives(self) -> bool:
        """Whether the process that granted the lease is there."""
        return self.source.up and self.source.life == self.source_life

    # Copying.

    def post(self, effect: Post) -> None:
        """Take a batch of pieces to copy."""
        pieces = [piece for first, count in effect.pieces for piece in range(first, first + count)]
        segment = self.reader.shelf[self.key].segment
        for piece in pieces:
            other = segment.writers.get(piece)
            if other is not None:
                raise Violation("one writer", f"piece {piece} of {self.key} is asked for while {other} may write it")
            segment.writers[piece] = self
        self.batches.append((effect.batch, pieces))
        self._pump()

    def _pump(self) -> None:
        if not self._pumping and self.batches and not self.closed:
            self._pumping = True
            self._at_reader(self.clock.lag() * self.reader.world.slowness, self._copy)

    def _copy(self) -> None:
        """Copy half a piece, or finish the batch."""
        self._pumping = False
        if self.closed or not self.batches or self.memory is None:
            return
        if self._wire is not None:
            self._land()
        elif self.share.transport == "local":
            self._send()
            self._land()
        elif not self.source_lives:
            return
        elif self.source.paused:
            self._pumping = True
            self._at_reader(STUCK_S, self._copy)
            return
        else:
            self._send()
        self._pump()

    def _send(self) -> None:
        assert self.memory is not None
        _, pieces = self.batches[0]
        piece, half = pieces[self._at // 2], self._at % 2
        start, end = self.memory.at[piece], self.memory.at[piece + 1]
        middle = (start + end) // 2
        begin, stop = (middle, end) if half else (start, middle)
        self._wire = (begin, bytes(self.memory.data[begin:stop]))

    def _land(self) -> None:
        assert self._wire is not None
        (at, data), self._wire = self._wire, None
        self.reader.written_by(self, at, data)
        batch, pieces = self.batches[0]
        self._at += 1
        if self._at < 2 * len(pieces):
            return
        self._at = 0
        self.batches.popleft()
        segment = self.reader.shelf[self.key].segment
        found = segment.digests(pieces) if self.reader.world.plan.digests else b""
        for piece in pieces:
            segment.writers.pop(piece, None)
        done = BatchDone(self.key, self.number, batch, found)
        self._at_reader(self.clock.lag() * 0.2, lambda: self._done(done))

    def _done(self, done: BatchDone) -> None:
        if not self.closed:
            self.reader.news(done)

    def confirm(self, _effect: Confirm) -> None:
        """Ask whether the lease holds after the last byte."""
        if not self.source_lives:
            self._at_reader(self.clock.lag(), lambda: self._confirmed(holds=False))
            return
        self.clock.after(self.clock.lag(), self.source, self._asked_whether_holds)

    def _asked_whether_holds(self) -> None:
        holds = self.source.core.table.holds(self.lease)
        self._at_reader(self.clock.lag(), lambda: self._confirmed(holds=holds))

    def _confirmed(self, *, holds: bool) -> None:
        if not self.closed:
            self.reader.news(Confirmed(self.key, self.number, holds))

    # The end.

    def lost(self, reason: str) -> None:
        """The lease or the connection is over."""
        if not self.closing:
            self.reader.news(SourceLost(self.key, self.number, reason))

    def close(self) -> None:
        """Close the transport; until that is done, bytes still arrive."""
        if self.closing:
            return
        self.closing = True
        self._at_reader(self.clock.lag(), self._closed)

    def _closed(self) -> None:
        self.closed = True
        self.batches.clear()
        place = self.reader.shelf.get(self.key)
        if place is not None:
            for piece in [piece for piece, writer in place.segment.writers.items() if writer is self]:
                del place.segment.writers[piece]
        self._tell_source(LeaseMove.DONE)
        self.reader.links.pop((self.key, self.number), None)
        self.reader.world.links.pop(self.lease, None)
        self.reader.news(SourceClosed(self.key, self.number))

    def _tell_source(self, how: LeaseMove) -> None:
        if self.lease:
            self.clock.after(self.clock.lag(), self.source, lambda: self.source.lease_ended(self.lease, how))

    def reader_died(self) -> None:
        """The reader's process is gone, and its connection with it."""
        self.closing = self.closed = True
        self._tell_source(LeaseMove.READER_GONE)

    def source_died(self) -> None:
        """The source's process is gone."""
        self._at_reader(self.clock.lag(), lambda: self.lost("its connection ended"))
