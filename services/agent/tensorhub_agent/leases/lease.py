"""One reader's lease on one shard: how far it is, and what it is on. Pure."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from tensorhub_agent.leases.delta_store import PatchOffer
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.primitives.program_units import PieceCompletion
from tensorhub_agent.primitives.ranges import ranges_of_marks
from tensorhub_common.protocol.heartbeat import ReaderLoad
from tensorhub_common.protocol.plans import ReadPriority, Transport
from tensorhub_common.protocol.ranges import Range


class LeaseState(StrEnum):
    """How far a lease is."""

    GRANTED = "granted"
    OPEN = "open"
    ENDED = "ended"
    BROKEN = "broken"


class LeaseTransition(StrEnum):
    """What happens to a lease."""

    REDEEMED = "redeemed"
    DONE = "done"
    READER_GONE = "reader-gone"
    EXPIRED = "expired"
    BROKEN = "broken"


LEASE_TRANSITIONS: Final = {
    (LeaseState.GRANTED, LeaseTransition.REDEEMED): LeaseState.OPEN,
    (LeaseState.GRANTED, LeaseTransition.EXPIRED): LeaseState.ENDED,
    (LeaseState.GRANTED, LeaseTransition.BROKEN): LeaseState.BROKEN,
    (LeaseState.OPEN, LeaseTransition.DONE): LeaseState.ENDED,
    (LeaseState.OPEN, LeaseTransition.READER_GONE): LeaseState.ENDED,
    (LeaseState.OPEN, LeaseTransition.EXPIRED): LeaseState.BROKEN,
    (LeaseState.OPEN, LeaseTransition.BROKEN): LeaseState.BROKEN,
}


@dataclass(slots=True, eq=False)
class LeaseOffer:
    """A shard that stands ready, or will. `version` is None while its publication has not been numbered yet."""

    version: int | None
    root: str | None
    digests: bytes
    granting: bool = True
    leases: "dict[str, Lease]" = field(default_factory=dict)
    turn: ReadPriority | None = None
    """Of the round that fills the shard."""
    has: bytearray | None = None
    """Marks of the pieces that stand there, while it is being filled; None: all do."""
    count: int = 0
    """How many pieces it has, with or without digests."""
    units: PieceCompletion | None = None
    """It is filled by a program: no digests are known before all stands, so only who needs none may read."""
    has_units: bytearray = field(default_factory=bytearray)
    """Marks of the units of that which stand there."""
    promised: bytearray = field(default_factory=bytearray)
    """Marks of the pieces that are promised, while it is being filled, or of units, where it is filled by a program;
    those that stand there may be among them."""
    is_counted_on: bool = False
    """Somebody had a lease that counts on promises."""


@dataclass(slots=True, eq=False)
class Lease:
    """One reader's lease on one shard."""

    name: str
    key: ShardKey
    reader: str
    ticket: str
    deadline: float
    offered: LeaseOffer
    served: ReaderLoad
    """What beats say of its reader."""
    is_told: bool = False
    """Its reader asks for nothing before it is told that it is there."""
    is_mapped: bool = False
    """Its reader's worker maps the memory, and may go on with that when the lease is over."""
    transport: Transport = "local"
    is_promised: bool = False
    """Of what does not stand there yet its reader waits only for what is promised."""
    units: PieceCompletion | None = None
    """Its reader goes by the program by which the shard is filled, and is told of units."""
    state: LeaseState = LeaseState.GRANTED
    base: str | None = None
    """The root of what its reader holds, where a delta from there is being made."""
    patches: PatchOffer | None = None
    """What its reader may have instead of pieces."""

    def pieces(self) -> tuple[Range, ...] | None:
        """Return what its reader may ask for; None: everything, and it knows."""
        if not self.is_told:
            return None
        has = self.offered.has if self.units is None else self.offered.has_units
        whole = self.offered.count if self.units is None else self.units.units
        if self.offered.has is None or has is None:
            return ((0, whole),) if whole else ()
        return tuple(ranges_of_marks(has, 0, len(has)))

    def promised(self) -> tuple[Range, ...]:
        """Return what its reader may wait for, where that is not everything."""
        marks = self.offered.promised if self.is_promised else bytearray()
        return tuple(ranges_of_marks(marks, 0, len(marks)))
