"""One source of one read: a lease asked for over the modelled network, and a transport session that brings bytes.

Both ends and the path between them may fail by themselves: the source is stopped, killed or slow; the path between the
two agents is cut while both reach NATS; the reader learns of the end of a connection late or never. `byte_stream.py`
has the bytes.

`LeaseInUse` is a lease that its reader holds until it opens the transport, as the agent's `control/lease_client.py`
keeps it. `Confirming` is the reader's question over the connection whether a lease has held until after the last byte.
`Announcements` carries what a half-filled source tells a reader of its pieces.

Invariants:
- Each question of `Confirming` is answered once. A source that is gone, or silent for too long, has said no.
- Announcements come in order. Over a path that is cut they come only when the path is whole again.
- No announcement from before the reader saw that the source was open is lost.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from tensorhub_agent.core.effects import (
    AvailabilityReceived,
    BatchDone,
    BytesReceived,
    ConfirmLease,
    LeaseConfirmed,
    LeaseReceived,
    ReadBatch,
    RequestLease,
    SourceClosed,
    SourceLost,
    SourceOpened,
)
from tensorhub_agent.leases.lease import LeaseTransition
from tensorhub_agent.primitives.digests import digest_at
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.primitives.lease_messages import AvailabilityUpdate, PiecesAvailable, PiecesPromised
from tensorhub_agent.primitives.program_units import UnitAvailability
from tensorhub_agent.primitives.transport_traits import reads_memory
from tensorhub_common.protocol.leases import LeaseGrant, LeaseRefusal, LeaseRequest
from tensorhub_common.protocol.plans import SourceId
from tensorhub_common.protocol.ranges import Range
from tensorhub_simulator.engine.clock import Action
from tensorhub_simulator.faultsim import observations
from tensorhub_simulator.faultsim.models.byte_ranges import PieceBytes, Spans, UnitBytes
from tensorhub_simulator.faultsim.models.deltas import Delta, Overwrites
from tensorhub_simulator.faultsim.models.host import AgentHost
from tensorhub_simulator.faultsim.models.job import Job
from tensorhub_simulator.faultsim.models.segments import Segment
from tensorhub_simulator.faultsim.models.unit_compute import UnitCompute
from tensorhub_simulator.faultsim.observations import PatchesApplied, TicketRedeemed, TicketSent, UnitsArrived
from tensorhub_simulator.faultsim.transfers.byte_stream import STUCK_S, ByteStream, Half, OpenReceives

CONFIRM_S: Final = 2.0


class Confirming:
    """The questions over one connection."""

    def __init__(self, link: "ReadSession") -> None:
        """Begin with none."""
        self._link = link
        self._questions = 0

    def ask(self) -> None:
        """Ask the source."""
        link = self._link
        self._questions += 1
        question = self._questions
        link.at_reader(CONFIRM_S, lambda: self._answered(question, holds=False))
        if not link.source_lives:
            link.at_reader(link.reader.lag(), lambda: self._answered(question, holds=False))
        elif not link.is_cut:
            link.clock.after(link.reader.lag(), link.source, lambda: self._arrives(question))

    def _arrives(self, question: int) -> None:
        link = self._link
        holds = link.source.core.leases.holds(link.lease)
        if not link.is_cut:
            link.at_reader(link.source.lag(), lambda: self._answered(question, holds=holds))

    def _answered(self, question: int, *, holds: bool) -> None:
        link = self._link
        if not link.closed and question == self._questions:
            self._questions += 1
            link.reader.outcome(LeaseConfirmed(link.key, link.number, holds))


HOLD_S: Final = 3.0
HOLD_TIMES: Final = 3


class LeaseInUse:
    """What one link has instead of a transport."""

    def __init__(self, link: "ReadSession") -> None:
        """Hold nothing yet."""
        self._link, self._clock = link, link.clock
        self._grant: LeaseGrant | None = None
        self._over = 0.0
        self.entered = False

    @property
    def holds(self) -> bool:
        """Whether there is a lease, and no transport is wanted yet."""
        return self._grant is not None

    def take(self, grant: LeaseGrant) -> None:
        """Keep a lease that was granted."""
        link = self._link
        self._grant, self._over = grant, self._clock.now + grant.ticket_s
        digests = b"" if link.program is not None else grant.digests
        link.tell(LeaseReceived(link.key, link.number, digests))
        self._again_later()

    def enter(self) -> LeaseGrant | None:
        """The transport is wanted; returns the lease whose ticket is to be shown, if it is there already."""
        self.entered = True
        grant, self._grant = self._grant, None
        return grant

    def _again_later(self) -> None:
        if self._grant is not None:
            self._link.at_reader(self._grant.ticket_s / HOLD_TIMES, self._again)

    def _again(self) -> None:
        """Ask to hold it longer; what is asked or said may be lost."""
        link, grant = self._link, self._grant
        if grant is None or link.closing:
            return
        if self._clock.now >= self._over:
            self._grant = None
            link.lost("its agent did not say that it still holds the lease")
            return
        if link.source_lives and not link.job.network.loses(link.reader, link.source):
            ask = link.question(hold_s=HOLD_S, again=grant.lease)
            self._clock.after(link.reader.lag(), link.source, lambda: self._asked(ask))
        self._again_later()

    def _asked(self, ask: LeaseRequest) -> None:
        link = self._link
        answer = link.source.core.lease_asked(ask, "", "", "here", link.source.now)
        link.source.set_timer()
        if answer is not None and not link.job.network.loses(link.source, link.reader):
            link.at_reader(link.source.lag(), lambda: self._answer(answer))

    def _answer(self, answer: LeaseGrant | LeaseRefusal) -> None:
        if self._grant is None:
            return
        if isinstance(answer, LeaseGrant):
            self._over = self._clock.now + answer.ticket_s
        else:
            self._grant = None
            self._link.lost(answer.reason)


class Announcements:
    """The words of one source to one reader."""

    def __init__(self, link: "ReadSession") -> None:
        """Begin with nothing told."""
        self._link = link
        self.availability: UnitAvailability | None = None
        """Which units stand at a source whose pieces are of another layout."""
        self._early: list[AvailabilityUpdate] = []
        """What has come before the reader saw that it was open."""
        self._untold: deque[AvailabilityUpdate] = deque()
        """What the source has said and the reader has not heard: a connection keeps the order."""

    def announce(self, update: AvailabilityUpdate) -> None:
        """The source tells of its pieces."""
        self._untold.append(update)
        if len(self._untold) == 1:
            self._link.at_reader(self._link.source.lag(), self._hear)

    def _hear(self) -> None:
        if self._link.is_cut and self._link.source_lives:
            self._link.at_reader(STUCK_S, self._hear)
            return
        while self._untold:
            self.heard(self._untold.popleft())

    def opened(self) -> None:
        """The reader hears what came early."""
        for later in self._early:
            self.heard(later)

    def heard(self, update: AvailabilityUpdate) -> None:
        """The reader hears of pieces."""
        link = self._link
        if not link.is_open:
            self._early.append(update)
        elif link.closing:
            return
        elif isinstance(update, PiecesAvailable):
            if self.availability is not None:
                update = PiecesAvailable(self.availability.units(update.pieces))
            link.tell(AvailabilityReceived(link.key, link.number, update))
        else:
            # These come in order, over a connection: an older one does not come again.
            link.reader.outcome(AvailabilityReceived(link.key, link.number, update))


LEASE_ASK_S: Final = 1.5
RENEW_S: Final = 0.5
CLOSE_S_MAX: Final = 0.5
"""A transport's close takes at most so long, whatever its peer does."""
END_LATE_S: Final = 10.0
AGAIN_ODDS: Final = 0.03
"""So often a word comes twice."""

LEASE_HOLD_S: Final = 1.0
GONE: Final = LeaseTransition.READER_GONE

HOLD_LOOK_S: Final = 0.02
"""How often a question that a source holds is looked at: production wakes it."""

PATCH_ODDS: Final = 0.8
"""So often a source that could has deltas."""

News = LeaseReceived | SourceOpened | AvailabilityReceived | BatchDone | SourceLost | SourceClosed


class ReadSession:
    """A reader's side of one source, with the source's side at the other end."""

    def __init__(self, reader: AgentHost, job: Job, effect: RequestLease) -> None:
        """Begin with the effect that asks for it."""
        self.reader, self.job, self.clock = reader, job, job.clock
        self.key, self.number, self.share = effect.key, effect.source, effect.share
        self.version, self.root, self.turn = effect.version, effect.root, effect.turn
        self.base, self.program = effect.base, effect.program
        self.source = job.hosts[effect.share.source.agent]
        self.source_key = ShardKey(self.key.model, effect.share.source.replica, effect.share.source.shard)
        self.source_life, self.reader_life, self.lease = 0, reader.life, ""
        self.closing = self.closed = self.is_open = self.answered = False
        self.spans = self._spans()
        self.computing: UnitCompute | None = None
        if self.program is not None:
            self.computing = UnitCompute(self.program, self.share.layout or "", effect.table)
        self.telling = Announcements(self)
        self.is_local = reads_memory(self.share.transport)
        self.receives = OpenReceives(self)
        self._wire: ByteStream | None = None
        self._digests = b""
        """What the source says that its pieces hash to."""
        self._tells_progress = reader.happens(0.5)
        self._asks, self._confirming = 0, Confirming(self)
        self._holding = LeaseInUse(self) if effect.hold else None

    def _spans(self) -> Spans:
        if self.program is None:
            return PieceBytes(self.reader.stored[self.key].target.table)
        return UnitBytes(self.program, self.share.layout or "")

    def here(self, number: int) -> Sequence[int]:
        """Return which bytes of the reader's memory a piece or unit is; a partial is none of them."""
        is_partial = self.computing is not None and self.computing.is_partial(number)
        return () if is_partial else self.spans.here(number)

    def __repr__(self) -> str:
        """Name it in a story, which is the same in every process."""
        return f"source {self.number} of {self.key}"

    def at_reader(self, delay_s: float, action: Action) -> None:
        """Plan something in the life of the reader that this belongs to."""
        self.clock.after(delay_s, self.reader, action, self.reader_life)

    def tell(self, update: News) -> None:
        """Tell the reader's core, and now and then once more: nothing may hang on a word coming once."""
        self.reader.outcome(update)
        if self.reader.happens(AGAIN_ODDS):
            self.at_reader(self.reader.lag(), lambda: self.reader.outcome(update))

    def announce(self, update: AvailabilityUpdate) -> None:
        """Carry to the reader what a half-filled source says of its pieces."""
        self.telling.announce(update)

    @property
    def is_cut(self) -> bool:
        """Whether nothing passes between the two agents now, other than by NATS."""
        return not self.is_local and self.job.network.is_cut(self.reader, self.source)

    @property
    def reads(self) -> bool:
        """Whether bytes are under way."""
        return self.is_open and not self.closing and self.receives.awaited

    # Opening.

    def open(self) -> None:
        """Ask for a lease."""
        holds = self._holding is not None and not self._holding.entered
        ask = self.question(hold_s=HOLD_S if holds else 0.0)
        self._asks += 1
        asks = self._asks
        self.at_reader(LEASE_ASK_S, lambda: self._silent(asks))
        if self.job.network.loses(self.reader, self.source):
            return
        self.clock.after(self.reader.lag(), None, lambda: self._ask_arrives(ask))

    def question(self, *, hold_s: float, again: str = "") -> LeaseRequest:
        """Return the question for a lease."""
        reader = self.reader
        me = SourceId(reader.name, reader.core.incarnation, self.key.replica, self.key.shard)
        return LeaseRequest(
            job=self.job.name,
            model=self.key.model,
            source=self.share.source,
            version=self.version,
            root=self.root,
            reader=me,
            turn=self.turn,
            units=self.program is not None,
            nbytes=self.share.nbytes,
            promises=self.share.crosses,
            program=self.program.digest if self.program is not None else None,
            hold_s=hold_s,
            again=again,
        )

    def _silent(self, asks: int) -> None:
        if not self.answered and asks == self._asks:
            self._again_or_lost("its agent did not answer")

    def _again_or_lost(self, reason: str) -> None:
        """Ask a source once more where that is worth it, as `sources/manager.py` of the agent does."""
        if (self.share.crosses or self.share.far) and not self.closing:
            self.job.sessions.pop(self.lease, None)
            self.answered, self.lease = False, ""
            self.open()
            return
        self.answered = True
        self.lost(reason)

    def _ask_arrives(self, ask: LeaseRequest) -> None:
        if not self.source.up:
            self.at_reader(self.reader.lag(), lambda: self._answer(LeaseRefusal(reason="no responders")))
            return
        until = self.clock.now + LEASE_HOLD_S
        self.clock.after(0.0, self.source, lambda: self._asked(ask, until))

    def _asked(self, ask: LeaseRequest, until: float) -> None:
        name, ticket = f"lease-{self.job.number()}", f"ticket-{self.job.number()}"
        answer = self.source.core.lease_asked(ask, name, ticket, "here", self.source.now)
        self.source.set_timer()
        if answer is None and self.clock.now < until:
            self.clock.after(HOLD_LOOK_S, self.source, lambda: self._asked(ask, until))
        elif not self.job.network.loses(self.source, self.reader):
            word = answer or LeaseRefusal(reason="it is not being filled yet", is_early=True)
            self.at_reader(self.source.lag(), lambda: self._answer(word))

    def _answer(self, answer: LeaseGrant | LeaseRefusal) -> None:
        if self.answered:
            return
        self.answered = True
        if isinstance(answer, LeaseRefusal):
            if answer.is_early and self.share.crosses and not self.closing:
                self.answered = False
                self.open()
            else:
                self.lost(answer.reason)
            return
        self.lease = answer.lease
        self.job.observe(TicketSent(self.source.name, answer.ticket))
        self.job.sessions[answer.lease] = self
        if self.closing:
            return
        self.source_life = self.source.life
        if self._holding is not None and not self._holding.entered:
            self._holding.take(answer)
        else:
            self._connect(answer)

    def enter(self) -> None:
        """Open the transport with the lease that is held."""
        grant = self._holding.enter() if self._holding is not None else None
        if grant is not None and not self.closing:
            self._connect(grant)

    def _connect(self, answer: LeaseGrant) -> None:
        if not self.source.up:
            self.lost("the connection was refused")
            return
        self.clock.after(self.reader.lag(), self.source, lambda: self._connected(answer))
        self.source_life = self.source.life
        self.at_reader(LEASE_ASK_S, lambda: self._unconnected(answer))

    def _unconnected(self, grant: LeaseGrant) -> None:
        if not self.is_open and grant.lease == self.lease:
            self._again_or_lost("its transport did not open")

    def _connected(self, grant: LeaseGrant) -> None:
        if self.is_cut or grant.lease != self.lease:
            return
        lease = self.source.core.redeemed(grant.ticket, self.source.now)
        self.source.set_timer()
        if lease is None:
            self.at_reader(self.source.lag(), lambda: self.lost("the ticket is void"))
            return
        self.job.observe(TicketRedeemed(grant.ticket))
        memory, pieces = self.source.stored[lease.key].segment, lease.pieces()
        if lease.promised():
            self.telling.announce(PiecesPromised(lease.promised()))
        delta = None
        if self.base is not None and not self.is_local and pieces is None and self.source.happens(PATCH_ODDS):
            delta = self.source.deltas.between(lease.key, self.base.root, self.root)
        self.at_reader(self.source.lag(), lambda: self._opened(memory, grant, pieces, delta))

    def _opened(
        self, memory: Segment, grant: LeaseGrant, pieces: tuple[Range, ...] | None, delta: Delta | None
    ) -> None:
        if self.closing:
            self._tell_source(LeaseTransition.READER_GONE)
            return
        if grant.lease != self.lease:
            # It was given up, and asked for again; the source hears that its connection has ended.
            self.clock.after(self.reader.lag(), self.source, lambda: self.source.lease_ended(grant.lease, GONE))
            return
        self.is_open = True
        self._wire = ByteStream(self, memory, self._arrived, delta)
        self._digests = digests = grant.digests
        exchanges = False
        if self.program is not None:
            # As `sources/manager.py` of the agent does: units of a program are no pieces of the source.
            digests = b""
            if grant.filling and grant.program == self.program.digest:
                exchanges = grant.promises
            elif grant.filling:
                table = self.job.layouts.table(self.share.layout or "")
                self.telling.availability = UnitAvailability(self.program, self.share.layout or "", table)
                pieces = self.telling.availability.units(pieces or ())
            else:
                pieces = None
        self.job.observe(observations.SourceOpened(grant.promises, exchanges))
        self.tell(SourceOpened(self.key, self.number, digests, pieces, grant.promises))
        self.telling.opened()
        self._renew()

    def _renew(self) -> None:
        if self.closing or not self.source_lives:
            return
        if self.source.runs and not self.is_cut:
            self.source.core.leases.renew(self.lease, self.source.now)
            if self.source.core.leases.waits(self.lease):
                self.at_reader(self.source.lag(), lambda: self.telling.heard(PiecesAvailable()))
        self.at_reader(RENEW_S, self._renew)

    @property
    def source_lives(self) -> bool:
        """Whether the process that granted the lease is there."""
        return self.source.up and self.source.life == self.source_life

    # Copying.

    def post(self, effect: ReadBatch) -> None:
        """Take a batch of pieces to bring."""
        pieces = [piece for first, count in effect.pieces for piece in range(first, first + count)]
        if self.computing is not None:
            self.computing.posted(effect.batch, effect.pieces)
        self.receives.post(effect.batch, pieces)
        if self._wire is not None:
            self._wire.ask(pieces)

    def _arrived(self, half: Half, where: Sequence[int], sent: bytes | Overwrites) -> None:
        if not self.receives.open:
            return
        data = sent if isinstance(sent, bytes) else self._patched(where, sent)
        ended = self.receives.land(half, where, data)
        if ended is None:
            if self._tells_progress:
                self.at_reader(0.0, lambda: self.reader.outcome(BytesReceived(self.key, self.number, len(data))))
            return
        hashes = self.job.config.digests and self.program is None
        found = self.found(ended.pieces) if hashes else b""
        assert self._wire is not None
        wrong = [piece for piece in ended.pieces if self._wire.is_patched(piece) and not self.is_right(piece)]
        if wrong:
            # As `sources/batch_reader.py` of the agent does: they come as they are, and nothing is said of them before.
            self.job.observe(PatchesApplied(len(wrong), right=False))
            self.receives.again(ended, wrong)
            self._wire.ask_plain(wrong)
            return
        if self.program is not None and self.computing is not None:
            self.computing.came(self.number, ended.batch)
            partials = sum(map(self.computing.is_partial, ended.pieces))
            relayed = self.telling.availability is not None
            self.job.observe(UnitsArrived(len(ended.pieces), partials, relayed))
        self.job.observe(PatchesApplied(sum(map(self._wire.is_patched, ended.pieces)), right=True))
        done = BatchDone(self.key, self.number, ended.batch, found)
        self.at_reader(self.reader.lag() * 0.2, lambda: self._done(done))

    def _patched(self, where: Sequence[int], patch: Overwrites) -> bytes:
        """Return what a patch makes of what stands here of the old version."""
        stored = self.reader.stored.get(self.key)
        return patch.over(stored.segment.get(where) if stored is not None else bytes(patch.nbytes))

    def found(self, pieces: list[int]) -> bytes:
        """Hash pieces where they stand."""
        return self.reader.stored[self.key].target.digests(pieces)

    def is_right(self, piece: int) -> bool:
        """Tell whether a piece hashes to what the source says of it."""
        return self.found([piece]) == digest_at(self._digests, piece)

    def _done(self, done: BatchDone) -> None:
        if not self.closed:
            self.tell(done)

    def confirm(self, _effect: ConfirmLease) -> None:
        """Ask whether the lease holds after the last byte."""
        self._confirming.ask()

    # The end.

    def lost(self, reason: str) -> None:
        """The lease or the connection is over."""
        if not self.closing:
            self.tell(SourceLost(self.key, self.number, reason))

    def close(self) -> None:
        """Close the transport; until that is done, bytes still arrive. It does not wait for a source that is away."""
        if self.closing:
            return
        self.closing = True
        away = not self.is_local and (self.is_cut or not self.source.runs)
        self.at_reader(self.reader.messages.random() * CLOSE_S_MAX if away else self.reader.lag(), self._closed)

    def _closed(self) -> None:
        self.receives.close()
        self._gone()

    def _gone(self) -> None:
        """Tell both ends."""
        self.closed = True
        if self.computing is not None:
            self.computing.closed(self.number)
        self._tell_source(LeaseTransition.DONE)
        self.reader.session_ended(self.key, self.number)
        self.job.sessions.pop(self.lease, None)
        self.tell(SourceClosed(self.key, self.number))

    def _tell_source(self, how: LeaseTransition) -> None:
        """Let the source hear of the end; over a path that is cut it hears nothing, and the lease ends by silence."""
        if self.lease and not self.is_cut:
            self.clock.after(self.reader.lag(), self.source, lambda: self._source_hears(how))

    def _source_hears(self, how: LeaseTransition) -> None:
        if self._wire is not None:
            self._wire.stop()
        self.source.lease_ended(self.lease, how)

    def reader_died(self) -> None:
        """The reader's process is gone, and its connection with it."""
        self.closing = self.closed = True
        self.receives.open = False
        self._tell_source(LeaseTransition.READER_GONE)

    def source_died(self) -> None:
        """The source's process is gone; between hosts the end of a connection may be heard late or never."""
        if self._holding is not None and self._holding.holds:
            return
        if self.is_local or self.reader.happens(0.7):
            self.at_reader(self.reader.lag(), lambda: self.lost("its connection ended"))
        elif self.reader.happens(0.5):
            late_s = self.reader.messages.random() * END_LATE_S
            self.at_reader(late_s, lambda: self.lost("its connection ended"))
