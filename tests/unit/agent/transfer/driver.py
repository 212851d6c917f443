"""A transfer and its time, driven by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from tensorhub_agent.core.operations.read_report import report_of
from tensorhub_agent.primitives.digests import piece_digest, root_digest
from tensorhub_agent.rates.source_rate import BatchLimits
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS, TransferLimits
from tensorhub_agent.transfer.plan_requests import NO_ANSWER
from tensorhub_agent.transfer.source import Source
from tensorhub_agent.transfer.source_pool import TransferActions
from tensorhub_agent.transfer.transfer import Transfer, TransferPhase
from tensorhub_common.errors import VersionUnavailable
from tensorhub_common.protocol.log.commands import NO_ROOT
from tensorhub_common.protocol.plans import Plan, Refusal, Share, SourceId, Transport
from tensorhub_common.protocol.ranges import Range

PIECES = 6
PIECE_BYTES = 10
ALL: tuple[Range, ...] = ((0, PIECES),)
STALL_S = DEFAULT_LIMITS.stall_s
PIECE_BATCHES = TransferLimits(
    batches=BatchLimits(memory_bytes=PIECE_BYTES, wire_bytes=PIECE_BYTES, least_bytes=PIECE_BYTES)
)
"""Each batch is one piece."""
RIGHT = [piece_digest(f"right {number}".encode()) for number in range(64)]
WRONG = piece_digest(b"wrong")
LIST = b"".join(RIGHT[:PIECES])
SILENCE = Refusal(error=NO_ANSWER, reason="no planner answered")
NOBODY = Refusal(error=VersionUnavailable.__name__, reason="nobody has it")


def source_id(name: str) -> SourceId:
    return SourceId(name, 1, "trainer", 0)


def numbers_of(ranges: tuple[Range, ...] | list[Range]) -> list[int]:
    return [piece for first, count in ranges for piece in range(first, first + count)]


def share(name: str, *pieces: Range, transport: Transport = "local", **fields: Any) -> Share:
    """Return a share of a plan; its driver gives it its transport."""
    return Share(source=source_id(name), transport=transport, pieces=pieces, nbytes=0, why="", **fields)


class Driven:
    """`actions` is what the transfer wanted last. A method that tells the transfer something returns it."""

    def __init__(
        self,
        *,
        verify: bool = True,
        window_bytes: int = 1000,
        transport: Transport = "local",
        limits: TransferLimits = DEFAULT_LIMITS,
        pieces: int = PIECES,
        sizes: Sequence[int] | None = None,
        **more: Any,
    ) -> None:
        self.now = 0.0
        self.right = RIGHT[:pieces] if verify else [b""] * pieces
        self.transport: Transport = transport
        self.transfer = Transfer(
            version=3,
            root=root_digest(b"".join(self.right)) if verify else NO_ROOT,
            nbytes=sizes or [PIECE_BYTES] * pieces,
            verify=verify,
            limits=replace(limits, window_bytes=window_bytes),
            first_number=1,
            now=0.0,
            **more,
        )
        self.actions = TransferActions()

    # What it has come to.

    def phase(self) -> TransferPhase:
        return self.transfer.phase

    def quiet(self) -> bool:
        return self.transfer.quiet

    @property
    def posts(self) -> list[tuple[int, tuple[Range, ...]]]:
        """What was asked for last: of which source, and which pieces."""
        return [(number, ranges) for number, _, ranges in self.actions.post]

    @property
    def left_out(self) -> tuple[SourceId, ...]:
        return self.transfer.pool.left_out()

    def source(self, number: int) -> Source:
        return self.transfer.sources[number]

    def oldest_batch(self, number: int) -> int:
        return next(iter(self.source(number).in_flight))

    def pieces_of(self, number: int) -> set[int]:
        """Return the pieces that a source is to bring and has not brought."""
        return {piece for place in self.source(number).places() for piece in numbers_of(list(place))}

    def counts(self) -> tuple[int, int, int]:
        """Return what the read tells of itself: got bytes, wasted bytes, retried pieces."""
        report = report_of(self.transfer, [PIECE_BYTES] * PIECES, total_s=0.0)
        return report.got_bytes, report.wasted_bytes, report.retried

    # Time.

    def take(self) -> TransferActions:
        self.actions = self.transfer.take_actions()
        self.transfer.check()
        return self.actions

    def tick(self, seconds: float = 0.0) -> TransferActions:
        self.now += seconds
        self.transfer.tick(self.now)
        return self.take()

    def wait(self, seconds: float = 60.0) -> list[int]:
        """Let time pass as a driver does that ticks at `deadline`, until a source is to be closed; returns which."""
        end = self.now + seconds
        while True:
            when = self.transfer.deadline()
            if when is None or when > end:
                self.now = end
                return []
            self.now = when
            actions = self.tick()
            if actions.close:
                return actions.close

    def wait_exactly(self, seconds: float) -> None:
        """Let time pass with the ticks that are wanted, in which nothing is to be closed."""
        assert self.wait(seconds) == []

    def start(self) -> TransferActions:
        assert self.phase() is TransferPhase.LEASED
        self.transfer.start(self.now)
        return self.take()

    # The planner.

    def planned(self, *shares: Share) -> list[int]:
        """Answer the question for a plan; returns the numbers of the sources that are to be opened."""
        all_shares = tuple(msgspec.structs.replace(each, transport=self.transport) for each in shares)
        self.transfer.planned(Plan(version=3, shares=all_shares, why=""), self.now)
        return [number for number, _ in self.take().open]

    def refused(self, refusal: Refusal = NOBODY) -> TransferActions:
        self.transfer.planned(refusal, self.now)
        return self.take()

    def refused_for_long(self) -> tuple[str, str] | None:
        """Let the planner say for long enough that there is nobody; returns the error of the read."""
        for _ in range(30):
            self.refused()
            self.tick(0.1)
        return self.transfer.error

    # Sources.

    def opened(
        self, number: int, digests: bytes | None = None, there: tuple[Range, ...] | None = None, **more: Any
    ) -> TransferActions:
        """A lease is granted; `there`: by a half-filled source that has these pieces."""
        digests = b"".join(self.right) if digests is None else digests
        self.transfer.opened(number, digests, self.now, there, **more)
        return self.take()

    def available(self, number: int, *pieces: Range) -> TransferActions:
        self.transfer.available(number, pieces, self.now)
        return self.take()

    def done(self, number: int, digests: bytes, batch: int | None = None) -> TransferActions:
        """A batch stands in the destination: the oldest of a source, or this one."""
        batch = self.oldest_batch(number) if batch is None else batch
        self.transfer.batch_done(number, batch, digests, self.now)
        return self.take()

    def brings(self, number: int, after_s: float = 0.0) -> TransferActions:
        """Let a source bring its oldest batch."""
        self.wait_exactly(after_s)
        ranges, _ = self.source(number).in_flight[self.oldest_batch(number)]
        return self.done(number, b"".join(self.right[piece] for piece in numbers_of(ranges)))

    def confirmed(self, number: int, *, holds: bool) -> TransferActions:
        self.transfer.confirmed(number, holds, self.now)
        return self.take()

    def lost(self, number: int, reason: str = "gone", *, is_final: bool = False) -> TransferActions:
        self.transfer.lost(number, reason, self.now, is_final=is_final)
        return self.take()

    def closed(self, number: int) -> TransferActions:
        self.transfer.closed(number, self.now)
        return self.take()

    def is_gone(self, number: int) -> TransferActions:
        """A source is lost, and closed."""
        assert self.lost(number).close == [number]
        return self.closed(number)


def planning(**more: Any) -> Driven:
    """Return a read that has asked for its plan."""
    driven = Driven(**more)
    driven.tick()
    return driven


def running(
    *shares: Share, there: Mapping[str, tuple[Range, ...]] | None = None, promises: bool = False, **more: Any
) -> tuple[Driven, list[int]]:
    """Return a read that has its leases and has begun, with the numbers of its sources.

    Sources in `there` are half-filled and have these pieces, and promise others.
    """
    driven = planning(**more)
    numbers = driven.planned(*shares)
    for number in numbers:
        has = (there or {}).get(driven.source(number).share.source.agent)
        driven.opened(number, there=has, promises=promises and has is not None)
    driven.start()
    return driven, numbers


def reading(*shares: Share, **more: object) -> tuple[Driven, list[int]]:
    """Return a read over the network, of one source unless told otherwise, in batches of one piece."""
    changes: dict[str, object] = {"transport": "ucxx", "limits": PIECE_BATCHES, **more}
    return running(*(shares or (share("a", *ALL),)), **changes)  # type: ignore[arg-type]
