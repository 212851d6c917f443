"""One reader of very many sources gets every byte, whoever is killed or stopped, with some of them open at a time.

Each source has rows that only its twin has besides. Twins are sound, so some source can always bring what is missing.
The reader has some columns of each row, as a tensor-parallel rank has of a fully sharded trainer's. Bytes are numpy's:
a row is written into the destination when its batch lands, out of the memory of the source that brings it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples_of import examples

from tensorhub_agent.leases.table import LeaseLimits
from tensorhub_agent.primitives.ranges import set_marks
from tensorhub_agent.transfer.limits import TransferLimits
from tensorhub_agent.transfer.transfer import Transfer, TransferPhase
from tensorhub_common.protocol.plans import Plan, PlanAnswer, Refusal, Share, SourceId
from tensorhub_common.protocol.ranges import Range
from tensorhub_simulator.drivers.transfer import NEVER, Session, TransferDriver

ROWS_OF_EACH: Final = 2
COLUMNS, READ = 16, slice(4, 12)
UNIT_BYTES: Final = READ.stop - READ.start
STALL_S: Final = 5.0
STOPPED_S: Final = 10.0
LOST_S: Final = 3.0
"""The log loses an agent that is gone for so long, and then no plan names it."""
CLOSE_S_MAX: Final = 0.5
CHECK_EVERY: Final = 400
HOLD_S_MAX: Final = LeaseLimits().hold_s_max
LIMITS: Final = TransferLimits(window_bytes=4096, stall_s=STALL_S, sources_lost_s=10.0)


@dataclass(eq=False)
class Peer:
    """One agent, which holds the rows of one rank; its twin holds the same."""

    source: SourceId
    rank: int
    dies: float = NEVER
    stops: float = NEVER
    is_heard: bool = True
    """Its connections end when it dies; else no reader hears of it."""

    def wakes(self, when: float) -> float:
        if when >= self.dies:
            return NEVER
        return self.stops + STOPPED_S if self.stops <= when < self.stops + STOPPED_S else when


def drawn_peers(rng: Random, ranks: int, kills: float, stops: float, ends_s: float) -> dict[SourceId, Peer]:
    peers: dict[SourceId, Peer] = {}
    for rank in range(ranks):
        for replica in ("trainer", "twin"):
            source = SourceId(f"{replica}-{rank}", 1, replica, rank)
            peer = peers[source] = Peer(source, rank)
            if replica == "trainer" and rng.random() < kills:
                peer.dies, peer.is_heard = rng.random() * ends_s, rng.random() < 0.7
            if replica == "trainer" and rng.random() < stops:
                peer.stops = rng.random() * ends_s
    return peers


class Crowd(TransferDriver[Peer]):
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
        super().__init__(drawn_peers(rng, ranks, kills, stops, ends_s), check_every=CHECK_EVERY)
        self.rng, self.began = rng, 0.0
        shape = (ranks * ROWS_OF_EACH, COLUMNS)
        self.values = np.random.default_rng(rng.randrange(2**32)).integers(1, 256, shape, dtype=np.uint8)
        self.memory = np.zeros((ranks * ROWS_OF_EACH, UNIT_BYTES), np.uint8)
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

    def lag(self) -> float:
        return self.rng.random() * 0.01

    def close_after_s(self) -> float:
        return self.rng.random() * CLOSE_S_MAX

    def starts(self) -> bool:
        """All leases are there: note when."""
        self.began = self.now
        return True

    def answer(self, pieces: Sequence[Range], avoid: Sequence[SourceId]) -> tuple[float, PlanAnswer] | None:
        """Answer as a planner that knows which agents are lost some time after."""
        parts: dict[SourceId, list[Range]] = {}
        for unit in (unit for first, count in pieces for unit in range(first, first + count)):
            rank = unit // ROWS_OF_EACH
            names = (SourceId(f"{replica}-{rank}", 1, replica, rank) for replica in ("trainer", "twin"))
            able = [name for name in names if name not in avoid and self.peers[name].dies + LOST_S > self.now]
            if able:
                parts.setdefault(able[0], []).append((unit, 1))
        shares = tuple(
            Share(source=name, transport="ucxx", pieces=tuple(part), nbytes=0, why="", layout=f"rows-{name.shard}")
            for name, part in parts.items()
        )
        none = Refusal(error="VersionUnavailable", reason="")
        return self.lag(), Plan(version=1, shares=shares, why="") if shares else none

    def ask_lease(self, session: Session[Peer]) -> None:
        peer = session.peer
        when = peer.wakes(self.now + self.lag())
        if when == NEVER:
            self.lose(session, 1.5, "its agent did not answer")
        elif session.inside:
            self.after(when - self.now, lambda: self.opened(session))
        else:
            self.after(when - self.now, lambda: self.transfer.held(session.number, b"", self.now))
            # What dies while it is held is found out when it is asked to hold it longer, or to let the reader in.
            self.after(peer.dies + HOLD_S_MAX - self.now, lambda: self.lost(session, "it holds the lease no more"))
        if peer.is_heard:
            self.after(peer.dies - self.now, lambda: self.cut(session))

    def open_transport(self, session: Session[Peer]) -> None:
        self.after(session.peer.wakes(self.now + self.lag()) - self.now, lambda: self.opened(session))

    def opened(self, session: Session[Peer]) -> None:
        if not session.closed:
            self.transfer.opened(session.number, b"", self.now)

    def cut(self, session: Session[Peer]) -> None:
        """Its connection has ended; one that is held has none."""
        if session.inside:
            self.lost(session, "its connection ended")

    def lost(self, session: Session[Peer], reason: str) -> None:
        if not session.closed:
            self.transfer.lost(session.number, reason, self.now)

    def bring(self, session: Session[Peer], batch: int, pieces: Sequence[int]) -> None:
        def lands() -> None:
            if session.closed:
                return
            for row in pieces:
                assert row // ROWS_OF_EACH == session.peer.rank
                self.memory[row] = self.values[row, READ]
            self.landed(session, batch, pieces, b"", 0.0)

        self.after(session.peer.wakes(self.now + self.lag()) - self.now, lands)

    def ask_confirmation(self, session: Session[Peer]) -> None:
        when = session.peer.wakes(self.now + self.lag()) - self.now
        self.after(min(when, 2.0), lambda: self.transfer.confirmed(session.number, when <= 2.0, self.now))


RANKS = 2_048


def read(crowd: Crowd) -> Crowd:
    crowd.run()
    assert crowd.transfer.phase is TransferPhase.DONE, crowd.transfer.error
    assert np.array_equal(crowd.memory, crowd.values[:, READ])
    return crowd


@pytest.mark.long
def test_a_reader_of_as_many_fully_sharded_ranks() -> None:
    crowd = read(Crowd(Random(1), RANKS, kills=0.05, stops=0.03))
    assert crowd.inside_most == LIMITS.transports_max
    left = {source.lost for source in crowd.transfer.sources.values()}
    assert {"", "its connection ended", "it made no progress"} <= left


def test_whoever_is_stopped_keeps_nobody_else_waiting() -> None:
    calm = read(Crowd(Random(2), 400))
    crowd = Crowd(Random(2), 400)
    stopped = [peer for peer in crowd.peers.values() if peer.source.replica == "trainer"][: LIMITS.transports_max // 2]
    for peer in stopped:
        # By then it has granted its lease, and is one of the first to be inside.
        peer.stops = 0.8 * calm.began
    read(crowd)
    others = [each for each in crowd.transfer.sources.values() if each.share.source.shard >= LIMITS.transports_max // 2]
    assert max(each.last_progress_at for each in others) < 3 * calm.now, "those were done long before"
    assert STALL_S < crowd.now < STOPPED_S, "and who stood still was left"


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 12))
@settings(max_examples=examples(0.4))
def test_every_byte_comes_whoever_is_killed_or_stopped(seed: int, ranks: int, inside: int) -> None:
    limits = replace(LIMITS, transports_max=inside, opening_max=max(1, inside // 2))
    read(Crowd(Random(seed), ranks, kills=0.2, stops=0.1, limits=limits))
