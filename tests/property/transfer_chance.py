"""A transfer among sources that stop, slow down, lie, break their leases and die, with words that come late or twice.

Chance decides everything; the model knows what really stands in the destination, and who may write it.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from tensorhub_agent.primitives.digests import piece_digest, root_digest
from tensorhub_agent.rates.source_rate import BatchLimits
from tensorhub_agent.transfer.limits import TransferLimits
from tensorhub_agent.transfer.plan_requests import NO_ANSWER
from tensorhub_agent.transfer.source_pool import TransferActions
from tensorhub_agent.transfer.transfer import Transfer, TransferPhase
from tensorhub_common.protocol.log.commands import NO_ROOT
from tensorhub_common.protocol.plans import Plan, Refusal, Share, SourceId
from tensorhub_common.protocol.ranges import Range

STALL_S: Final = 5.0
CLOSE_S_MAX: Final = 0.5
CONFIRM_S: Final = 2.0
ENDS_WITHIN_S: Final = 600.0
STEPS_MAX: Final = 20_000
FOREVER: Final = 1e6
LOCAL_BATCH_BYTES: Final = 16
"""As the simulation scales it down; the largest there is."""
WRONG: Final = b"wrong"


def right(piece: int) -> bytes:
    return f"right {piece}".encode()


@dataclass
class Peer:
    """An agent that holds the version."""

    source: SourceId
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
        """Whether nothing is ever wrong with it."""
        return (
            self.opens == 1.0
            and not self.stops
            and not self.fills
            and self.damages == 0.0
            and min(self.dies, self.breaks) > FOREVER
        )

    def when_running(self, when: float) -> float:
        for begin, end in self.stops:
            if begin <= when < end:
                return end
        return when


@dataclass
class Session:
    """One open source."""

    peer: Peer
    busy_until: float = 0.0
    closed: bool = False
    inside: bool = True
    """Its transport is wanted, and not closed yet."""
    told: set[int] = field(default_factory=set)
    """Which pieces a half-filled source has told of."""
    flying: dict[int, tuple[tuple[Range, ...], dict[int, bytes]]] = field(default_factory=dict)


class World:
    """One read. `run` returns its phase."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.now, self.steps = rng, 0.0, 0
        self.verify = rng.random() < 0.7
        pieces = rng.randint(1, 24)
        self.sizes = [rng.choice((2, 6, 10)) for _ in range(pieces)]
        digests = b"".join(piece_digest(right(piece)) for piece in range(pieces))
        self.digests = digests if self.verify else b""
        self.memory: list[bytes] = [b""] * pieces
        self.writer: dict[int, int] = {}
        self.sessions: dict[int, Session] = {}
        self.asked_bytes = 0
        self.plans = 0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0
        kept = None
        if self.verify and rng.random() < 0.2:
            done = bytearray(rng.randint(0, 1) for _ in range(pieces))
            kept = (done, digests)
            for piece in range(pieces):
                self.memory[piece] = right(piece) if done[piece] else b""
        self.kept_bytes = sum(size for piece, size in enumerate(self.sizes) if self.memory[piece])
        self.peers = [self._peer(number) for number in range(rng.randint(1, 5))]
        batches = BatchLimits(local_bytes=LOCAL_BATCH_BYTES, ucxx_bytes=LOCAL_BATCH_BYTES, least_bytes=1)
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

    def _peer(self, number: int) -> Peer:
        rng = self.rng
        stops = []
        for _ in range(rng.choice((0, 0, 1, 2))):
            begin = rng.random() * 3
            stops.append((begin, begin + rng.choice((0.3, 2.0, 10.0, FOREVER))))
        never = FOREVER * 2
        half = self.verify and rng.random() < 0.3  # Without digests nobody serves what is half-filled.
        slowness = rng.choice((0.0, 0.3, 3.0))
        fills = [rng.random() * slowness if rng.random() < 0.97 else never for _ in self.sizes] if half else []
        return Peer(
            source=SourceId(f"agent-{number}", 1, "trainer", 0),
            transport=rng.choice(("local", "ucxx", "ucxx")),
            bytes_per_s=rng.choice((5.0, 50.0, 1000.0, 1000.0)),
            opens=rng.choice((0.3, 1.0, 1.0)),
            stops=stops,
            dies=rng.random() * 4 if rng.random() < 0.2 else never,
            breaks=rng.random() * 4 if rng.random() < 0.2 else never,
            damages=0.1 if self.verify and rng.random() < 0.1 else 0.0,
            fills=fills,
        )

    # Time.

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        self._planned += 1
        heapq.heappush(self.events, (self.now + delay_s, self._planned, what))

    def tell(self, delay_s: float, what: Callable[[], None]) -> None:
        """Tell the transfer, now and then once more."""
        self.after(delay_s, what)
        if self.rng.random() < 0.1:
            self.after(delay_s + self.rng.random() * 2, what)

    def lag(self) -> float:
        return self.rng.random() * (0.01 if self.rng.random() < 0.9 else 1.5)

    def run(self) -> TransferPhase:
        transfer = self.transfer
        transfer.tick(0.0)
        self.step()
        while transfer.phase not in (TransferPhase.DONE, TransferPhase.FAILED) or not transfer.quiet:
            assert self.now < ENDS_WITHIN_S, f"{self.now:.0f} s and no end: {transfer.phase}"
            assert self.steps < STEPS_MAX
            self.steps += 1
            if transfer.phase is TransferPhase.LEASED and self.rng.random() < 0.5:
                transfer.start(self.now)
                self.step()
                continue
            self.next()
        self.judge()
        return transfer.phase

    def next(self) -> None:
        """Let the next thing happen; at times the reader itself is asleep first, and finds everything at once."""
        due = self.transfer.deadline()
        when = min(self.events[0][0] if self.events else FOREVER, due if due is not None else FOREVER)
        if when == FOREVER:
            when = self.now + 1.0
        self.now = max(self.now, when)
        if self.rng.random() < 0.01:
            self.now += self.rng.random() * 10
        while self.events and self.events[0][0] <= self.now:
            heapq.heappop(self.events)[2]()
            self.step()
        self.transfer.tick(self.now)
        self.step()

    def step(self) -> None:
        """Carry out what the transfer wants, as production's driver does."""
        self.transfer.tick(self.now)
        todo = self.transfer.take_actions()
        self.transfer.check()
        if todo.plan is not None:
            self.plan(*todo.plan)
        for number, share in todo.open:
            self.open(number, share, self._opened)
        for number, share in todo.hold:
            self.open(number, share, self._held)
        for number in todo.enter:
            self.enter(number)
        for number, batch, ranges in todo.post:
            self.post(number, batch, ranges)
        self.confirm_and_close(todo)
        inside = sum(not session.closed and session.inside for session in self.sessions.values())
        assert inside <= self.limits.transports_max
        flying = [source.in_flight_bytes for source in self.transfer.sources.values() if source.in_flight]
        assert sum(flying) <= self.limits.window_bytes + (2 * len(flying) + 1) * (LOCAL_BATCH_BYTES + max(self.sizes))

    # The planner.

    def plan(self, pieces: tuple[Range, ...], avoid: tuple[SourceId, ...]) -> None:
        rng = self.rng
        self.plans += 1
        able = [peer for peer in self.peers if peer.source not in avoid and peer.dies > self.now]
        if rng.random() < self.silent_planner:
            return
        if not able:
            refusal = Refusal(error="VersionUnavailable", reason="nobody")
            self.tell(self.lag(), lambda: self.transfer.planned(refusal, self.now))
            return
        if rng.random() < self.silent_planner:
            silence = Refusal(error=NO_ANSWER, reason="")
            self.tell(self.lag(), lambda: self.transfer.planned(silence, self.now))
            return
        used = rng.sample(able, rng.randint(1, len(able)))
        parts: list[list[Range]] = [[] for _ in used]
        for first, count in pieces:
            for piece in range(first, first + count):
                if rng.random() < 0.98:
                    parts[rng.randrange(len(used))].append((piece, 1))
        shares = tuple(
            Share(source=peer.source, transport=peer.transport, pieces=tuple(part), nbytes=0, why="")  # type: ignore[arg-type]
            for peer, part in zip(used, parts, strict=True)
            if part
        )
        answer = Plan(version=3, shares=shares, why="")
        asked = self.transfer.plan_requests.count

        def come() -> None:
            # The carrier passes on answers to the last question alone.
            if asked == self.transfer.plan_requests.count:
                self.transfer.planned(answer, self.now)

        self.tell(self.lag(), come)

    # Sources.

    def open(self, number: int, share: Share, granted: Callable[[int], None]) -> None:
        peer = next(peer for peer in self.peers if peer.source == share.source)
        assert number not in self.sessions
        others = (source for source in self.transfer.sources.values() if source.number != number and source.is_live)
        assert share.source not in [source.share.source for source in others], "one live session with a source"
        self.sessions[number] = Session(peer, inside=granted == self._opened)
        when = peer.when_running(self.now) - self.now + self.lag()
        if when > 10 or self.now + when > peer.dies:
            self.tell(1.5, lambda: self.transfer.lost(number, "no answer", self.now))
        elif self.now + when > peer.breaks or self.rng.random() > peer.opens:
            self.tell(when, lambda: self.transfer.lost(number, "refused", self.now))
        else:
            self.tell(when, lambda: granted(number))
        if peer.dies < FOREVER and self.rng.random() < 0.7:
            dies_in = max(peer.dies - self.now, 0) + self.lag()
            self.tell(dies_in, lambda: self.transfer.lost(number, "died", self.now))
        if peer.breaks < FOREVER and self.rng.random() < 0.7:
            breaks_in = max(peer.breaks - self.now, 0) + self.lag()
            self.tell(breaks_in, lambda: self.transfer.lost(number, "broke its lease", self.now))

    def _held(self, number: int) -> None:
        self.transfer.held(number, self.digests, self.now)

    def enter(self, number: int) -> None:
        """Let a source in whose lease is held; it may be away by now."""
        session = self.sessions[number]
        assert not session.inside
        assert not session.closed
        session.inside = True
        when = session.peer.when_running(self.now) - self.now + self.lag()
        if self.now + when > min(session.peer.dies, session.peer.breaks):
            self.tell(when, lambda: self.transfer.lost(number, "the ticket is void", self.now))
        else:
            self.tell(when, lambda: self._opened(number))

    def _opened(self, number: int) -> None:
        """The source is open; a half-filled one tells what it has, and by and by the rest, and that it lives."""
        session, peer = self.sessions[number], self.sessions[number].peer
        if not peer.fills:
            self.transfer.opened(number, self.digests, self.now)
            return
        there = [(piece, 1) for piece, when in enumerate(peer.fills) if when <= self.now]
        session.told.update(piece for piece, _ in there)
        self.transfer.opened(number, self.digests, self.now, there)
        for piece, when in enumerate(peer.fills):
            if self.now < when < peer.dies:
                self._tell_of(number, ((piece, 1),), peer.when_running(when) - self.now)
        for beat in range(1, 60):
            self._tell_of(number, (), peer.when_running(self.now + beat) - self.now)

    def _tell_of(self, number: int, pieces: tuple[Range, ...], delay_s: float) -> None:
        session = self.sessions[number]

        def told() -> None:
            if not session.closed:
                session.told.update(piece for piece, _ in pieces)
                self.transfer.available(number, pieces, self.now)

        if self.now + delay_s < min(session.peer.dies, session.peer.breaks, FOREVER):
            self.tell(delay_s + self.lag(), told)

    def post(self, number: int, batch: int, ranges: tuple[Range, ...]) -> None:
        session = self.sessions[number]
        assert session.inside
        assert not session.closed
        pieces = [piece for first, count in ranges for piece in range(first, first + count)]
        for piece in pieces:
            assert not session.peer.fills or piece in session.told, f"piece {piece} is asked of one that lacks it"
            assert piece not in self.writer, f"piece {piece} has two writers"
            self.writer[piece] = number
        nbytes = sum(self.sizes[piece] for piece in pieces)
        self.asked_bytes += nbytes
        session.flying[batch] = (ranges, {})
        self._bring(number, batch, pieces, nbytes)

    def _bring(self, number: int, batch: int, pieces: Sequence[int], nbytes: int) -> None:
        session, peer = self.sessions[number], self.sessions[number].peer
        begin = peer.when_running(max(self.now, session.busy_until))
        end = peer.when_running(begin + nbytes / peer.bytes_per_s)
        session.busy_until = end
        if end > peer.dies:
            return
        if self.rng.random() < 0.3:
            half = (begin + end) / 2 - self.now
            self.tell(half, lambda: self.transfer.progressed(number, nbytes // 2, self.now))
        self.after(end - self.now, lambda: self._landed(number, batch, pieces))

    def _landed(self, number: int, batch: int, pieces: Sequence[int]) -> None:
        """The batch is written, if the receives are open still; the news of it may come after the close."""
        session = self.sessions[number]
        if session.closed:
            return
        good = self.now < session.peer.breaks
        for piece in pieces:
            assert self.writer.pop(piece) == number
            damaged = not good or self.rng.random() < session.peer.damages
            self.memory[piece] = WRONG if damaged else right(piece)
        session.flying.pop(batch)
        found = b"".join(piece_digest(self.memory[piece]) for piece in pieces) if self.verify else b""
        news_s = self.lag()
        for piece in pieces:
            # Until the reader hears of the end it counts as being written.
            self.writer[piece] = number

        def told() -> None:
            for piece in pieces:
                if self.writer.get(piece) == number:
                    del self.writer[piece]
            self.transfer.batch_done(number, batch, found, self.now)

        self.after(news_s, told)
        if self.rng.random() < 0.1:
            self.after(news_s + 1.0, lambda: self.transfer.batch_done(number, batch, found, self.now))

    def confirm_and_close(self, todo: TransferActions) -> None:
        for number in todo.confirm:
            self._confirm(number)
        for number in todo.close:
            self.tell(self.rng.random() * CLOSE_S_MAX, lambda number=number: self._closed(number))  # type: ignore[misc]

    def _confirm(self, number: int) -> None:
        """Each question is answered once."""
        peer = self.sessions[number].peer
        asked = peer.when_running(self.now + self.lag())
        late = asked - self.now > CONFIRM_S or asked > peer.dies
        holds = not late and asked < peer.breaks
        self.after(CONFIRM_S if late else asked - self.now, lambda: self.transfer.confirmed(number, holds, self.now))

    def _closed(self, number: int) -> None:
        session = self.sessions[number]
        session.closed = True
        session.flying.clear()
        for piece in [piece for piece, writer in self.writer.items() if writer == number]:
            del self.writer[piece]
        self.transfer.closed(number, self.now)

    # The end.

    def judge(self) -> None:
        """What must hold of every read that is over."""
        transfer = self.transfer
        sources = transfer.sources.values()
        for piece, done in enumerate(transfer.verification.done):
            assert not done or self.memory[piece] == right(piece), f"piece {piece} counts and is wrong"
        if transfer.phase is TransferPhase.FAILED:
            assert transfer.error is not None
            sound = [peer.source.agent for peer in self.peers if peer.is_sound]
            assert not sound, f"{sound} could have brought everything: {transfer.error}"
            return
        assert transfer.verification.whole
        got = sum(source.got_bytes for source in sources)
        wasted = sum(source.wasted_bytes for source in sources)
        assert got == sum(self.sizes) - self.kept_bytes
        assert got + wasted == self.asked_bytes, "what was asked for counts, or was wasted"
        posted = len(self.sizes) - transfer.verification.kept + sum(source.retried for source in sources)
        assert posted == sum(source.got_pieces + source.retried for source in sources)

    def story(self) -> Counter[str]:
        """Why sources were left."""
        return Counter(source.lost for source in self.transfer.sources.values())
