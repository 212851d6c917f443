"""The driver of one read: it carries out what a `Transfer` wants, in virtual time, with modelled sources.

A subclass says how its sources behave: what the planner answers, whether a lease is granted and when, when a batch
lands, and whether a lease has held. The driver has what is the same for all: time, sessions, who may write which piece,
and the order in which a driver of production carries out actions.

Invariants, asserted at every step:
- One session with a source is live at a time, and at most `transports_max` are inside at once.
- A piece has one writer, from the request until the reader hears of the end.
- A read ends.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from tensorhub_agent.transfer.transfer import Transfer, TransferPhase
from tensorhub_common.protocol.plans import PlanAnswer, Share, SourceId
from tensorhub_common.protocol.ranges import Range
from tensorhub_simulator.engine.agenda import Agenda

NEVER: Final = float("inf")
ENDS_WITHIN_S: Final = 600.0
STEPS_MAX: Final = 1_000_000

P = TypeVar("P")


@dataclass(eq=False)
class Session(Generic[P]):
    """One source of the read: its lease, its transport, and what it was asked for."""

    number: int
    peer: P
    share: Share
    inside: bool
    """Its transport is wanted, and not closed yet."""
    closed: bool = False
    busy_until: float = 0.0
    told: set[int] = field(default_factory=set)
    """The pieces that a half-filled source has announced."""


class TransferDriver(ABC, Generic[P]):
    """One read. `run` ends it."""

    transfer: Transfer

    def __init__(self, peers: dict[SourceId, P], *, check_every: int = 1) -> None:
        """Take the sources. The subclass makes the transfer. `check_every`: steps between two checks of the core."""
        self.peers, self.agenda = peers, Agenda()
        self.sessions: dict[int, Session[P]] = {}
        self.writer: dict[int, int] = {}
        """By piece, the source that may write it."""
        self.plans = self.steps = self.inside_most = 0
        self._check_every = check_every

    # How sources behave.

    @abstractmethod
    def answer(self, pieces: Sequence[Range], avoid: Sequence[SourceId]) -> tuple[float, PlanAnswer] | None:
        """Return the planner's answer and when it arrives; None: the planner is silent."""

    @abstractmethod
    def ask_lease(self, session: Session[P]) -> None:
        """Grant the lease by `granted`, or lose the source."""

    @abstractmethod
    def open_transport(self, session: Session[P]) -> None:
        """Open the transport of a source whose lease is held, by `opened`, or lose the source."""

    @abstractmethod
    def bring(self, session: Session[P], batch: int, pieces: Sequence[int]) -> None:
        """Let a batch land, by `landed`."""

    @abstractmethod
    def ask_confirmation(self, session: Session[P]) -> None:
        """Say whether the lease has held after the last byte, by `Transfer.confirmed`."""

    def close_after_s(self) -> float:
        """Return how long a transport takes to close."""
        return 0.0

    def starts(self) -> bool:
        """Tell whether the read may begin to write, now that it has its leases."""
        return True

    def stays_away_s(self) -> float:
        """Return how long the reader itself is stopped before it goes on."""
        return 0.0

    # Time.

    @property
    def now(self) -> float:
        """The virtual time."""
        return self.agenda.now

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Plan something; what is planned for never does not happen."""
        if delay_s < NEVER:
            self.agenda.after(delay_s, action)

    def tell(self, delay_s: float, action: Callable[[], None]) -> None:
        """Plan news for the transfer. A subclass may let news come twice."""
        self.after(delay_s, action)

    def lose(self, session: Session[P], delay_s: float, reason: str) -> None:
        """Tell the transfer later that a source is lost."""
        self.tell(delay_s, lambda: self.transfer.lost(session.number, reason, self.now))

    def run(self) -> TransferPhase:
        """Read until nothing is under way any more."""
        transfer = self.transfer
        self._step()
        while transfer.phase not in (TransferPhase.DONE, TransferPhase.FAILED) or not transfer.quiet:
            assert self.now < ENDS_WITHIN_S, f"{self.now:.0f} s and no end: {transfer.phase}"
            assert self.steps < STEPS_MAX
            if transfer.phase is TransferPhase.LEASED and self.starts():
                transfer.start(self.now)
            else:
                self._next()
            self._step()
        transfer.check()
        return transfer.phase

    def _next(self) -> None:
        """Let the next thing happen. After the reader was stopped, everything that is due happens at once."""
        due, event = self.transfer.deadline(), self.agenda.next_at
        if due is not None and (event is None or due < event):
            self.agenda.at(due, lambda: None)
        elif event is None:
            self.agenda.after(1.0, lambda: None)
        self.agenda.step()
        until = self.now + self.stays_away_s()
        while until > self.now:
            self._step_past(until)

    def _step_past(self, until: float) -> None:
        if self.agenda.next_at is None or self.agenda.next_at > until:
            self.agenda.at(until, lambda: None)
        self.agenda.step()

    # What the transfer wants.

    def _step(self) -> None:
        self.steps += 1
        self.transfer.tick(self.now)
        wanted = self.transfer.take_actions()
        if self.steps % self._check_every == 0:
            self.transfer.check()
        if wanted.plan is not None:
            self._plan(*wanted.plan)
        for inside, shares in ((True, wanted.open), (False, wanted.hold)):
            for number, share in shares:
                self._open(number, share, inside=inside)
        for number in wanted.enter:
            session = self._live(number, inside=False)
            session.inside = True
            self.open_transport(session)
        for number, batch, ranges in wanted.post:
            self._post(number, batch, ranges)
        for number in wanted.confirm:
            self.ask_confirmation(self.sessions[number])
        for number in wanted.close:
            self.tell(self.close_after_s(), lambda number=number: self._closed(number))  # type: ignore[misc]
        inside_now = sum(session.inside and not session.closed for session in self.sessions.values())
        self.inside_most = max(self.inside_most, inside_now)
        assert inside_now <= self.transfer.pool.index.limits.transports_max

    def _plan(self, pieces: Sequence[Range], avoid: Sequence[SourceId]) -> None:
        self.plans += 1
        answered, asked = self.answer(pieces, avoid), self.transfer.plan_requests.count
        if answered is None:
            return
        delay_s, answer = answered

        def come() -> None:
            # As the agent's read driver does: only an answer to the last request is passed on.
            if asked == self.transfer.plan_requests.count:
                self.transfer.planned(answer, self.now)

        self.tell(delay_s, come)

    def _open(self, number: int, share: Share, *, inside: bool) -> None:
        assert number not in self.sessions
        others = (each for each in self.transfer.sources.values() if each.number != number and each.is_live)
        assert share.source not in [each.share.source for each in others], "one live session with a source"
        session = self.sessions[number] = Session(number, self.peers[share.source], share, inside)
        self.ask_lease(session)

    def _live(self, number: int, *, inside: bool) -> Session[P]:
        session = self.sessions[number]
        assert session.inside is inside
        assert not session.closed
        return session

    def _post(self, number: int, batch: int, ranges: Sequence[Range]) -> None:
        session = self._live(number, inside=True)
        pieces = [piece for first, count in ranges for piece in range(first, first + count)]
        for piece in pieces:
            assert piece not in self.writer, f"piece {piece} has two writers"
            self.writer[piece] = number
        self.bring(session, batch, pieces)

    def landed(self, session: Session[P], batch: int, pieces: Sequence[int], digests: bytes, news_s: float) -> None:
        """A batch was written: tell the transfer after a while. Until then its pieces count as being written."""

        def told() -> None:
            for piece in pieces:
                if self.writer.get(piece) == session.number:
                    del self.writer[piece]
            self.transfer.batch_done(session.number, batch, digests, self.now)

        self.after(news_s, told)

    def _closed(self, number: int) -> None:
        self.sessions[number].closed = True
        for piece in [piece for piece, writer in self.writer.items() if writer == number]:
            del self.writer[piece]
        self.transfer.closed(number, self.now)

    # The end.

    def source_faults(self) -> list[str]:
        """Say why each source was closed; empty where nothing was left to read."""
        return [source.lost for source in self.transfer.sources.values()]
