"""A transfer and its time, driven by hand."""

from dataclasses import replace
from typing import Any

import msgspec

from tensorhub_agent.primitives.digests import piece_digest, root_digest
from tensorhub_agent.rates.source_rate import BatchLimits
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS, TransferLimits
from tensorhub_agent.transfer.plan_requests import NO_ANSWER
from tensorhub_agent.transfer.source_pool import TransferActions
from tensorhub_agent.transfer.transfer import Transfer, TransferPhase
from tensorhub_common.errors import VersionUnavailable
from tensorhub_common.protocol.log.commands import NO_ROOT
from tensorhub_common.protocol.plans import Plan, Refusal, Share, SourceId, Transport
from tensorhub_common.protocol.ranges import Range

PIECES = 6
PIECE_BYTES = 10
STALL_S = DEFAULT_LIMITS.stall_s
PIECE_BATCHES = TransferLimits(
    batches=BatchLimits(memory_bytes=PIECE_BYTES, wire_bytes=PIECE_BYTES, least_bytes=PIECE_BYTES)
)
"""Each batch is one piece."""
RIGHT = [piece_digest(f"right {number}".encode()) for number in range(64)]
WRONG = piece_digest(b"wrong")
LIST = b"".join(RIGHT[:PIECES])


def source_id(name: str) -> SourceId:
    return SourceId(name, 1, "trainer", 0)


def digests_of(ranges: tuple[Range, ...]) -> bytes:
    return b"".join(RIGHT[piece] for first, count in ranges for piece in range(first, first + count))


def share(name: str, *pieces: Range, transport: Transport = "local", **fields: Any) -> Share:
    """Return a share of a plan; its driver gives it its transport."""
    return Share(source=source_id(name), transport=transport, pieces=pieces, nbytes=0, why="", **fields)


class Driven:
    """`actions` is what the transfer wanted last, summed up."""

    def __init__(
        self,
        *,
        verify: bool = True,
        kept: tuple[bytearray, bytes] | None = None,
        window_bytes: int = 1000,
        transport: Transport = "local",
        limits: TransferLimits = DEFAULT_LIMITS,
        pieces: int = PIECES,
        piece_bytes: int = PIECE_BYTES,
        **more: Any,
    ) -> None:
        self.now = 0.0
        self.digests = b"".join(RIGHT[:pieces])
        self.transport: Transport = transport
        self.transfer = Transfer(
            version=3,
            root=root_digest(self.digests) if verify else NO_ROOT,
            nbytes=[piece_bytes] * pieces,
            verify=verify,
            limits=replace(limits, window_bytes=window_bytes),
            first_number=1,
            now=0.0,
            kept=kept,
            **more,
        )
        self.actions = TransferActions()

    def phase(self) -> TransferPhase:
        return self.transfer.phase

    def quiet(self) -> bool:
        return self.transfer.quiet

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

    def take(self) -> TransferActions:
        self.actions = self.transfer.take_actions()
        self.transfer.check()
        return self.actions

    def planned(self, *shares: tuple[str, tuple[Range, ...]] | Share) -> list[int]:
        """Answer the question for a plan; returns the numbers of the sources that are to be opened."""
        all_shares = tuple(
            msgspec.structs.replace(
                each if isinstance(each, Share) else share(each[0], *each[1]), transport=self.transport
            )
            for each in shares
        )
        self.transfer.planned(Plan(version=3, shares=all_shares, why=""), self.now)
        return [number for number, _ in self.take().open]

    def opened(self, number: int, digests: bytes = LIST) -> TransferActions:
        self.transfer.opened(number, digests, self.now)
        return self.take()

    def done(self, number: int, batch: int, digests: bytes) -> TransferActions:
        self.transfer.batch_done(number, batch, digests, self.now)
        return self.take()

    def closed(self, number: int) -> TransferActions:
        self.transfer.closed(number, self.now)
        return self.take()

    def brings(self, number: int, after_s: float = 0.0) -> TransferActions:
        """Let a source bring its oldest batch."""
        self.wait_exactly(after_s)
        batch, (ranges, _) = next(iter(self.transfer.sources[number].in_flight.items()))
        return self.done(number, batch, digests_of(ranges) if self.transfer.verification.verify else b"")

    @staticmethod
    def nobody(reason: str = "nobody has it") -> Refusal:
        """Return the planner's answer that there is no source, or, with another reason, its silence."""
        error = VersionUnavailable.__name__ if reason == "nobody has it" else NO_ANSWER
        return Refusal(error=error, reason=reason)

    def wait_exactly(self, seconds: float) -> None:
        """Let time pass with the ticks that are wanted, in which nothing is to be closed."""
        assert self.wait(seconds) == []


def running(
    *shares: tuple[str, tuple[Range, ...]],
    verify: bool = True,
    window_bytes: int = 1000,
    transport: Transport = "local",
    limits: TransferLimits = DEFAULT_LIMITS,
) -> tuple[Driven, list[int]]:
    """Return a read that has its leases and has begun, with the numbers of its sources."""
    driven = Driven(verify=verify, window_bytes=window_bytes, transport=transport, limits=limits)
    driven.tick()
    numbers = driven.planned(*shares)
    for number in numbers:
        driven.opened(number, LIST if verify else b"")
    assert driven.phase() is TransferPhase.LEASED
    driven.transfer.start(driven.now)
    driven.take()
    return driven, numbers
