"""What the parts of a world report: invariants and the director subscribe to these, and totals count them.

An observation has values and production types only. So this module imports nothing else of the simulation, and every
part may report.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tensorhub_agent.core.agent import AgentCore
from tensorhub_agent.core.effects import AnyCall, CallRead, CompleteCall, FailCall
from tensorhub_agent.core.shard_state import ShardSpec
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.layout.layout import PieceTable
from tensorhub_common.protocol.log.commands import AnyCommand, Filled, Sender, Unreadable
from tensorhub_common.protocol.log.events import AnyEvent, VersionPublished

Counts = Iterable[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Observation:
    """Something that happened. `counted` says what of it the totals of a run count; `group: name` counts in a group."""

    def counted(self) -> Counts:
        """Count nothing."""
        return ()


@dataclass(frozen=True, slots=True)
class CommandFolded(Observation):
    """A command was stored, and the log was folded as far. `catalog` is the state after it."""

    seq: int
    msg_id: str
    command: AnyCommand | Unreadable
    events: tuple[AnyEvent, ...]
    catalog: Catalog

    def counted(self) -> Counts:
        """Count it, and what it published."""
        published = sum(isinstance(event, VersionPublished) for event in self.events)
        return ("commands", 1), ("versions", published)


@dataclass(frozen=True, slots=True)
class EventStored(Observation):
    """An event was stored."""

    seq: int
    event: AnyEvent

    def counted(self) -> Counts:
        """Count it."""
        return (("events", 1),)


@dataclass(frozen=True, slots=True)
class ShardOffered(Observation):
    """An agent offers the bytes of a shard to the log."""

    by: Sender
    spec: ShardSpec
    data: bytes


@dataclass(frozen=True, slots=True)
class ShardCommitted(Observation):
    """An agent tells the log that a shard is filled. `is_kept`: its next process will find that."""

    command: Filled
    spec: ShardSpec
    data: bytes
    root: str
    is_kept: bool


@dataclass(frozen=True, slots=True)
class CallEnded(Observation):
    """A worker's call ended. `spec`, `data` and `memory` are of its shard then, if its agent has the shard."""

    agent: str
    key: ShardKey
    call: AnyCall
    end: CompleteCall | FailCall
    core: AgentCore
    spec: ShardSpec | None
    data: bytes
    is_written: bool
    """Something may still be written into the memory, and no other call is under way."""
    has_swapped: bool
    """The shard is in another segment than when the call began."""
    want_by: Sender | None
    """The command by which a read joined its round."""

    def counted(self) -> Counts:
        """Count reads that ended with a version, and errors."""
        if isinstance(self.end, FailCall):
            return ((f"raised: {self.end.error}", 1),)
        return (("reads", int(isinstance(self.call, CallRead) and self.end.version is not None)),)


@dataclass(frozen=True, slots=True)
class PieceSent(Observation):
    """A source gives half a piece or unit. `source` is None once the process that granted the lease is gone."""

    source: AgentCore | None
    key: ShardKey
    lease: str
    piece: int
    where: Sequence[int]
    table: PieceTable


@dataclass(frozen=True, slots=True)
class BytesWritten(Observation):
    """A read wrote into the memory of a shard. `memory` is that memory, and is only compared."""

    key: ShardKey
    memory: object
    is_spare: bool


@dataclass(frozen=True, slots=True)
class ScalesFolded(Observation):
    """Scales were computed of partials."""

    count: int

    def counted(self) -> Counts:
        """Count them."""
        return (("scales", self.count),)


@dataclass(frozen=True, slots=True)
class UnitsArrived(Observation):
    """A batch of a read by a program arrived. `relayed`: from a half-filled source of another layout."""

    units: int
    partials: int
    relayed: bool

    def counted(self) -> Counts:
        """Count its units."""
        return ("units", self.units), ("partials", self.partials), ("relayed", self.units if self.relayed else 0)


@dataclass(frozen=True, slots=True)
class PatchesApplied(Observation):
    """Pieces were patched. `right`: their digests are those of the source; else they come again as they are."""

    pieces: int
    right: bool

    def counted(self) -> Counts:
        """Count them."""
        return (("patched" if self.right else "mispatched", self.pieces),)


@dataclass(frozen=True, slots=True)
class SourceOpened(Observation):
    """A reader saw that a source is open. `promises`: it counts on what a half-filled source promises."""

    promises: bool
    exchanges: bool
    """It does, and is told of units."""

    def counted(self) -> Counts:
        """Count promises."""
        return ("promises", int(self.promises)), ("exchanges", int(self.exchanges))


@dataclass(frozen=True, slots=True)
class SourceClosed(Observation):
    """A read closed a source; `reason` is empty where nothing was left to read."""

    reason: str

    def counted(self) -> Counts:
        """Count it by its reason."""
        return ((f"closed: {self.reason}", 1),)


@dataclass(frozen=True, slots=True)
class TicketSent(Observation):
    """An agent granted a lease, and its ticket is on the way."""

    agent: str
    ticket: str


@dataclass(frozen=True, slots=True)
class TicketRedeemed(Observation):
    """A ticket opened a session."""

    ticket: str


@dataclass(frozen=True, slots=True)
class MemoryMapped(Observation):
    """A worker mapped published memory."""

    def counted(self) -> Counts:
        """Count it."""
        return (("mappings", 1),)


@dataclass(frozen=True, slots=True)
class PlanAsked(Observation):
    """A planner is about to answer by this catalog."""

    catalog: Catalog


@dataclass(frozen=True, slots=True)
class Stepped(Observation):
    """A process has acted, so what holds of it must be looked at again."""

    process: str


@dataclass(frozen=True, slots=True)
class AgentDied(Observation):
    """An agent's process is gone."""

    agent: str


@dataclass(frozen=True, slots=True)
class FaultStruck(Observation):
    """A fault struck, named by the kind that is counted: `kills`, or `stops`."""

    kind: str

    def counted(self) -> Counts:
        """Count it by its kind."""
        return ((f"faults: {self.kind}", 1),)
