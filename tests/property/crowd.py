"""A read from very many sources, each with rows that only its twin has besides; some are killed, and some stopped.

Twins are sound, so there is always somebody who can bring what is missing. The reader has some columns of each row, as
a tensor-parallel rank has of a fully sharded trainer's. Bytes are numpy's: a row is written into the destination when
its batch lands, out of the memory of the source that brings it.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

import numpy as np

from tensorhub_agent.leases.table import LeaseLimits
from tensorhub_agent.primitives.ranges import set_marks
from tensorhub_agent.transfer.limits import TransferLimits
from tensorhub_agent.transfer.transfer import Transfer, TransferPhase
from tensorhub_common.protocol.plans import Plan, Refusal, Share, SourceId
from tensorhub_common.protocol.ranges import Range

ROWS_OF_EACH: Final = 2
COLUMNS, READ = 16, slice(4, 12)
UNIT_BYTES: Final = READ.stop - READ.start
STALL_S: Final = 5.0
STOPPED_S: Final = 10.0
LOST_S: Final = 3.0
"""The log loses an agent that is gone for so long, and then no plan names it."""
CLOSE_S_MAX: Final = 0.5
CHECK_EVERY: Final = 400
NEVER: Final = float("inf")


@dataclass(eq=False)
class Peer:
    """One agent, which holds the rows of one rank; its twin holds the same."""

    source: SourceId
    rank: int
    dies: float = NEVER
    stops: float = NEVER
    is_heard: bool = True
    """Its connections end when it dies; else nobody hears of it."""

    def wakes(self, when: float) -> float:
        """Return when it does what it would do then."""
        if when >= self.dies:
            return NEVER
        return self.stops + STOPPED_S if self.stops <= when < self.stops + STOPPED_S else when


@dataclass(eq=False)
class Session:
    """What there is with one peer."""

    peer: Peer
    inside: bool
    closed: bool = False
    posted: dict[int, tuple[Range, ...]] = field(default_factory=dict)


LIMITS = TransferLimits(window_bytes=4096, stall_s=STALL_S, sources_lost_s=10.0)


class Crowd:
    """One read; `run` ends it. `kills` and `stops` are parts of the sources."""

    def __init__(
        self,
        rng: Random,
        ranks: int,
        *,
        kills: float = 0.0,
        stops: float = 0.0,
        ends_s: float = 2.0,
        limits: TransferLimits = LIMITS,
    ) -> None:
        """Let those happen to sources within so long."""
        self.rng, self.now, self.events, self.inside_most = rng, 0.0, 0, 0
        self.began = 0.0
        """When all leases were there."""
        self.values = np.random.default_rng(rng.randrange(2**32)).integers(
            1, 256, (ranks * ROWS_OF_EACH, COLUMNS), dtype=np.uint8
        )
        self.memory = np.zeros((ranks * ROWS_OF_EACH, UNIT_BYTES), np.uint8)
        self.peers = {
            peer.source: peer
            for rank in range(ranks)
            for replica in ("trainer", "twin")
            for peer in [Peer(SourceId(f"{replica}-{rank}", 1, replica, rank), rank)]
        }
        for peer in self.peers.values():
            if peer.source.replica == "twin":
                continue
            if rng.random() < kills:
                peer.dies, peer.is_heard = rng.random() * ends_s, rng.random() < 0.7
            if rng.random() < stops:
                peer.stops = rng.random() * ends_s
        self.sessions: dict[int, Session] = {}
        self.writer: dict[int, int] = {}
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0
        self.transfer = Transfer(
            version=1,
            root=None,
            nbytes=[UNIT_BYTES] * (ranks * ROWS_OF_EACH),
            verify=False,
            limits=limits,
            first_number=1,
            now=0.0,
            able=self._able,
        )

    def _able(self, share: Share) -> bytearray:
        marks = bytearray(len(self.values))
        set_marks(marks, [(share.source.shard * ROWS_OF_EACH, ROWS_OF_EACH)])
        return marks

    # Time.

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        """Plan something, unless it never comes."""
        if delay_s < NEVER:
            self._planned += 1
            heapq.heappush(self.heap, (self.now + delay_s, self._planned, what))

    def lag(self) -> float:
        return self.rng.random() * 0.01

    def run(self) -> None:
        """Read until nothing is under way any more."""
        transfer = self.transfer
        self.step()
        while transfer.phase not in (TransferPhase.DONE, TransferPhase.FAILED) or not transfer.quiet:
            if transfer.phase is TransferPhase.LEASED:
                self.began = self.now
                transfer.start(self.now)
                self.step()
            due = transfer.deadline()
            if self.heap and (due is None or self.heap[0][0] <= due):
                self.now, _, what = heapq.heappop(self.heap)
                what()
            else:
                assert due is not None, "nothing is awaited, and it is not over"
                self.now = max(self.now, due)
            self.step()
            self.events += 1
            if not self.events % CHECK_EVERY:
                transfer.check()
        transfer.check()

    def step(self) -> None:
        """Carry out what the transfer wants."""
        self.transfer.tick(self.now)
        todo = self.transfer.take_actions()
        if todo.plan is not None:
            self.plan(*todo.plan)
        for inside, shares in ((True, todo.open), (False, todo.hold)):
            for number, share in shares:
                self.open(number, share, inside=inside)
        for number in todo.enter:
            self.enter(number)
        for number, batch, ranges in todo.post:
            self.post(number, batch, ranges)
        for number in todo.confirm:
            self.confirm(number)
        for number in todo.close:
            self.after(self.rng.random() * CLOSE_S_MAX, lambda number=number: self.closed(number))  # type: ignore[misc]
        inside_now = sum(each.inside for each in self.sessions.values())
        self.inside_most = max(self.inside_most, inside_now)
        assert inside_now <= self.transfer.pool.index.limits.transports_max

    # The planner, which knows who is lost some time after.

    def plan(self, pieces: tuple[Range, ...], avoid: tuple[SourceId, ...]) -> None:
        parts: dict[SourceId, list[Range]] = {}
        for first, count in pieces:
            for unit in range(first, first + count):
                names = (
                    SourceId(f"{who}-{unit // ROWS_OF_EACH}", 1, who, unit // ROWS_OF_EACH)
                    for who in ("trainer", "twin")
                )
                able = [name for name in names if name not in avoid and self.peers[name].dies + LOST_S > self.now]
                if able:
                    parts.setdefault(able[0], []).append((unit, 1))
        shares = tuple(
            Share(source=name, transport="ucxx", pieces=tuple(part), nbytes=0, why="", layout=f"rows-{name.shard}")
            for name, part in parts.items()
        )
        answer = Plan(version=1, shares=shares, why="") if shares else Refusal(error="VersionUnavailable", reason="")
        asked = self.transfer.plan_requests.count

        def come() -> None:
            if asked == self.transfer.plan_requests.count:
                self.transfer.planned(answer, self.now)

        self.after(self.lag(), come)

    # Sources.

    def open(self, number: int, share: Share, *, inside: bool) -> None:
        peer = self.peers[share.source]
        self.sessions[number] = Session(peer, inside)
        when = peer.wakes(self.now + self.lag())
        if when == NEVER:
            self.after(1.5, lambda: self.transfer.lost(number, "its agent did not answer", self.now))
        elif inside:
            self.after(when - self.now, lambda: self.opened(number))
        else:
            self.after(when - self.now, lambda: self.transfer.held(number, b"", self.now))
            # What dies while it is held is found out when it is asked to hold it longer, or to let the reader in.
            self.after(
                peer.dies + LeaseLimits().hold_s_max - self.now, lambda: self.lost(number, "it holds the lease no more")
            )
        if peer.is_heard:
            self.after(peer.dies - self.now, lambda: self.cut(number))

    def enter(self, number: int) -> None:
        session = self.sessions[number]
        assert not session.inside
        assert not session.closed
        session.inside = True
        self.after(session.peer.wakes(self.now + self.lag()) - self.now, lambda: self.opened(number))

    def opened(self, number: int) -> None:
        if not self.sessions[number].closed:
            self.transfer.opened(number, b"", self.now)

    def cut(self, number: int) -> None:
        """Its connection has ended; one that is held has none."""
        if self.sessions[number].inside:
            self.lost(number, "its connection ended")

    def lost(self, number: int, reason: str) -> None:
        if not self.sessions[number].closed:
            self.transfer.lost(number, reason, self.now)

    def post(self, number: int, batch: int, ranges: tuple[Range, ...]) -> None:
        session = self.sessions[number]
        assert session.inside
        assert not session.closed
        rows = [row for first, count in ranges for row in range(first, first + count)]
        for row in rows:
            assert row not in self.writer, f"row {row} has two writers"
            self.writer[row] = number

        def lands() -> None:
            if session.closed:
                return
            for row in rows:
                assert row // ROWS_OF_EACH == session.peer.rank
                self.memory[row] = self.values[row, READ]
                del self.writer[row]
            self.transfer.batch_done(number, batch, b"", self.now)

        self.after(session.peer.wakes(self.now + self.lag()) - self.now, lands)

    def confirm(self, number: int) -> None:
        peer = self.sessions[number].peer
        when = peer.wakes(self.now + self.lag()) - self.now
        self.after(min(when, 2.0), lambda: self.transfer.confirmed(number, when <= 2.0, self.now))

    def closed(self, number: int) -> None:
        session = self.sessions[number]
        session.closed, session.inside = True, False
        self.writer = {row: writer for row, writer in self.writer.items() if writer != number}
        self.transfer.closed(number, self.now)
