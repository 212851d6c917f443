"""What holds of every read, whatever its sources do: one writer for a piece, nothing counts that is wrong, an end."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_agent.primitives.digests import piece_digest, root_digest
from tensorhub_agent.rates.source_rate import BatchLimits
from tensorhub_agent.transfer.limits import TransferLimits
from tensorhub_agent.transfer.plan_requests import NO_ANSWER, PLANS_MAX
from tensorhub_agent.transfer.transfer import Transfer, TransferPhase
from tensorhub_common.protocol.log.commands import NO_ROOT
from tensorhub_common.protocol.plans import Plan, PlanAnswer, Refusal, Share, SourceId, Transport
from tensorhub_common.protocol.ranges import Range
from tensorhub_simulator.drivers.transfer import NEVER, Session, TransferDriver
from tensorhub_simulator.faultsim.runner.run import scaled_down

CLOSE_S_MAX: Final = 0.5
CONFIRM_S: Final = 2.0
FOREVER: Final = 1e6
LOCAL_BATCH_BYTES: Final = 16
"""As the simulation scales it down; the largest there is."""
WRONG: Final = b"wrong"


def right(piece: int) -> bytes:
    return f"right {piece}".encode()


@dataclass
class Peer:
    """An agent that holds the version."""

    transport: str
    bytes_per_s: float
    opens: float
    """How likely it is that it grants a lease."""
    stops: list[tuple[float, float]]
    """When it stands still, from and until."""
    dies: float
    breaks: float
    """When it breaks its leases: from then on it sends other bytes."""
    damages: float
    """How likely a piece of it is wrong though its lease holds; never without digests."""
    fills: list[float]
    """Of a half-filled one, when it has each piece; at times never. Empty: it is ready."""

    @property
    def is_sound(self) -> bool:
        troubles = self.stops or self.fills or self.damages or self.opens < 1.0
        return not troubles and self.dies == self.breaks == NEVER

    def when_running(self, when: float) -> float:
        return next((end for begin, end in self.stops if begin <= when < end), when)


def drawn_peer(rng: Random, pieces: int, *, verify: bool) -> Peer:
    begins = [rng.random() * 3 for _ in range(rng.choice((0, 0, 1, 2)))]
    half = verify and rng.random() < 0.3  # Without digests a half-filled shard serves no reader.
    slowness = rng.choice((0.0, 0.3, 3.0))
    fills = [rng.random() * slowness if rng.random() < 0.97 else NEVER for _ in range(pieces)] if half else []
    return Peer(
        transport=rng.choice(("local", "ucxx", "ucxx")),
        bytes_per_s=rng.choice((5.0, 50.0, 1000.0, 1000.0)),
        opens=rng.choice((0.3, 1.0, 1.0)),
        stops=[(begin, begin + rng.choice((0.3, 2.0, 10.0, FOREVER))) for begin in begins],
        dies=rng.random() * 4 if rng.random() < 0.2 else NEVER,
        breaks=rng.random() * 4 if rng.random() < 0.2 else NEVER,
        damages=0.1 if verify and rng.random() < 0.1 else 0.0,
        fills=fills,
    )


class World(TransferDriver[Peer]):
    """One read. `run` judges it, and returns its phase."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.verify = rng.random() < 0.7
        pieces = rng.randint(1, 24)
        self.sizes = [rng.choice((2, 6, 10)) for _ in range(pieces)]
        digests = b"".join(piece_digest(right(piece)) for piece in range(pieces))
        self.digests = digests if self.verify else b""
        self.memory: list[bytes] = [b""] * pieces
        self.asked_bytes = 0
        kept = None
        if self.verify and rng.random() < 0.2:
            kept = (bytearray(rng.randint(0, 1) for _ in range(pieces)), digests)
            self.memory = [right(piece) if done else b"" for piece, done in enumerate(kept[0])]
        self.kept_bytes = sum(size for piece, size in enumerate(self.sizes) if self.memory[piece])
        peers = [drawn_peer(rng, pieces, verify=self.verify) for _ in range(rng.randint(1, 5))]
        super().__init__({SourceId(f"agent-{n}", 1, "trainer", 0): peer for n, peer in enumerate(peers)})
        batches = BatchLimits(memory_bytes=LOCAL_BATCH_BYTES, wire_bytes=LOCAL_BATCH_BYTES, least_bytes=1)
        self.limits = TransferLimits(window_bytes=rng.choice((8, 32, 1000)), batches=batches)
        self.silent_planner = 0.1 if rng.random() < 0.3 else 0.0
        self.transfer = Transfer(
            version=3,
            root=root_digest(digests) if self.verify else NO_ROOT,
            nbytes=self.sizes,
            verify=self.verify,
            limits=self.limits,
            first_number=1,
            now=0.0,
            kept=kept,
        )

    def run(self) -> TransferPhase:
        phase = super().run()
        self.judge()
        return phase

    # Time.

    def tell(self, delay_s: float, action: Callable[[], None]) -> None:
        """Tell the transfer, now and then once more."""
        super().tell(delay_s, action)
        if self.rng.random() < 0.1:
            self.after(delay_s + self.rng.random() * 2, action)

    def lag(self) -> float:
        return self.rng.random() * (0.01 if self.rng.random() < 0.9 else 1.5)

    def starts(self) -> bool:
        return self.rng.random() < 0.5

    def stays_away_s(self) -> float:
        return self.rng.random() * 10 if self.rng.random() < 0.01 else 0.0

    def close_after_s(self) -> float:
        return self.rng.random() * CLOSE_S_MAX

    # The planner.

    def answer(self, pieces: Sequence[Range], avoid: Sequence[SourceId]) -> tuple[float, PlanAnswer] | None:
        rng = self.rng
        able = [source for source, peer in self.peers.items() if source not in avoid and peer.dies > self.now]
        if rng.random() < self.silent_planner:
            return None
        if not able:
            return self.lag(), Refusal(error="VersionUnavailable", reason="nobody")
        if rng.random() < self.silent_planner:
            return self.lag(), Refusal(error=NO_ANSWER, reason="")
        used = rng.sample(able, rng.randint(1, len(able)))
        parts: list[list[Range]] = [[] for _ in used]
        for piece in (piece for first, count in pieces for piece in range(first, first + count)):
            if rng.random() < 0.98:
                rng.choice(parts).append((piece, 1))
        shares = tuple(
            Share(
                source=each,
                transport=cast("Transport", self.peers[each].transport),
                pieces=tuple(part),
                nbytes=0,
                why="",
            )
            for each, part in zip(used, parts, strict=True)
            if part
        )
        return self.lag(), Plan(version=3, shares=shares, why="")

    # Sources.

    def ask_lease(self, session: Session[Peer]) -> None:
        peer, number = session.peer, session.number
        when = peer.when_running(self.now) - self.now + self.lag()
        if when > 10 or self.now + when > peer.dies:
            self.lose(session, 1.5, "no answer")
        elif self.now + when > peer.breaks or self.rng.random() > peer.opens:
            self.lose(session, when, "refused")
        elif session.inside:
            self.tell(when, lambda: self.opened(session))
        else:
            self.tell(when, lambda: self.transfer.held(number, self.digests, self.now))
        for end, why in ((peer.dies, "died"), (peer.breaks, "broke its lease")):
            if end < NEVER and self.rng.random() < 0.7:
                self.lose(session, max(end - self.now, 0) + self.lag(), why)

    def open_transport(self, session: Session[Peer]) -> None:
        """The source may be away by now."""
        when = session.peer.when_running(self.now) - self.now + self.lag()
        if self.now + when > min(session.peer.dies, session.peer.breaks):
            self.lose(session, when, "the ticket is void")
        else:
            self.tell(when, lambda: self.opened(session))

    def opened(self, session: Session[Peer]) -> None:
        """The source is open; a half-filled one tells what it has, and by and by the rest, and that it lives."""
        peer = session.peer
        if not peer.fills:
            self.transfer.opened(session.number, self.digests, self.now)
            return
        there = [(piece, 1) for piece, when in enumerate(peer.fills) if when <= self.now]
        session.told.update(piece for piece, _ in there)
        self.transfer.opened(session.number, self.digests, self.now, there)
        for piece, when in enumerate(peer.fills):
            if self.now < when < peer.dies:
                self._announce(session, ((piece, 1),), peer.when_running(when) - self.now)
        for beat in range(1, 60):
            self._announce(session, (), peer.when_running(self.now + beat) - self.now)

    def _announce(self, session: Session[Peer], pieces: tuple[Range, ...], delay_s: float) -> None:
        def told() -> None:
            if not session.closed:
                session.told.update(piece for piece, _ in pieces)
                self.transfer.available(session.number, pieces, self.now)

        if self.now + delay_s < min(session.peer.dies, session.peer.breaks, FOREVER):
            self.tell(delay_s + self.lag(), told)

    def bring(self, session: Session[Peer], batch: int, pieces: Sequence[int]) -> None:
        peer, nbytes = session.peer, sum(self.sizes[piece] for piece in pieces)
        assert not peer.fills or session.told.issuperset(pieces), f"{pieces} are asked of one that lacks some"
        flying = [source.in_flight_bytes for source in self.transfer.sources.values() if source.in_flight]
        assert sum(flying) <= self.limits.window_bytes + (2 * len(flying) + 1) * (LOCAL_BATCH_BYTES + max(self.sizes))
        self.asked_bytes += nbytes
        begin = peer.when_running(max(self.now, session.busy_until))
        end = session.busy_until = peer.when_running(begin + nbytes / peer.bytes_per_s)
        if end > peer.dies:
            return
        if self.rng.random() < 0.3:
            half = (begin + end) / 2 - self.now
            self.tell(half, lambda: self.transfer.progressed(session.number, nbytes // 2, self.now))
        self.after(end - self.now, lambda: self._written(session, batch, pieces))

    def _written(self, session: Session[Peer], batch: int, pieces: Sequence[int]) -> None:
        """The batch is written, if the receives are open still; the news of it may come after the close, and twice."""
        if session.closed:
            return
        for piece in pieces:
            assert self.writer[piece] == session.number
            damaged = self.now >= session.peer.breaks or self.rng.random() < session.peer.damages
            self.memory[piece] = WRONG if damaged else right(piece)
        found = b"".join(piece_digest(self.memory[piece]) for piece in pieces) if self.verify else b""
        news_s = self.lag()
        self.landed(session, batch, pieces, found, news_s)
        if self.rng.random() < 0.1:
            self.after(news_s + 1.0, lambda: self.transfer.batch_done(session.number, batch, found, self.now))

    def ask_confirmation(self, session: Session[Peer]) -> None:
        """Each question is answered once."""
        peer = session.peer
        asked = peer.when_running(self.now + self.lag())
        late = asked - self.now > CONFIRM_S or asked > peer.dies
        holds, wait_s = not late and asked < peer.breaks, CONFIRM_S if late else asked - self.now
        self.after(wait_s, lambda: self.transfer.confirmed(session.number, holds, self.now))

    # The end.

    def judge(self) -> None:
        """What must hold of every read that is over."""
        transfer = self.transfer
        sources = transfer.sources.values()
        for piece, done in enumerate(transfer.verification.done):
            assert not done or self.memory[piece] == right(piece), f"piece {piece} counts and is wrong"
        if transfer.phase is TransferPhase.FAILED:
            assert transfer.error is not None
            sound = [source.agent for source, peer in self.peers.items() if peer.is_sound]
            assert not sound, f"{sound} could have brought everything: {transfer.error}"
            return
        assert transfer.pool.is_whole
        got = sum(source.got_bytes for source in sources)
        wasted = sum(source.wasted_bytes for source in sources)
        assert got == sum(self.sizes) - self.kept_bytes
        assert got + wasted == self.asked_bytes, "what was asked for counts, or was wasted"
        posted = len(self.sizes) - transfer.verification.kept + sum(source.retried for source in sources)
        assert posted == sum(source.got_pieces + source.retried for source in sources)

    def story(self) -> Counter[str]:
        return Counter(self.source_faults())


@given(st.integers(0, 2**32))
def test_every_read_ends_with_right_bytes_or_an_error(seed: int) -> None:
    world = World(Random(seed))
    with scaled_down():
        world.run()
    assert world.plans <= PLANS_MAX


@pytest.mark.long
def test_chance_goes_everywhere() -> None:
    left, ends = Counter[str](), Counter[TransferPhase]()
    reasons = ("it made no progress", "it was slow, and another source had nothing left to bring")
    with scaled_down():
        for seed in range(400):
            world = World(Random(seed))
            ends[world.run()] += 1
            left += world.story()
            if ends[TransferPhase.DONE] > ends[TransferPhase.FAILED] > 0 and all(left[reason] for reason in reasons):
                return
    pytest.fail(f"400 reads came to {ends}, and left sources for {left}")
