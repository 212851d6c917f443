"""What the agent's pure cores ask their driver to do, and what the driver tells them came of it.

The driver (production's `jobs/driver.py`, or the simulator) carries out the effects of one call in their order. An
effect that takes time is answered later by the event named beside it; an answer without a waiting call is ignored.
"""

import msgspec

from tensorhub_agent.primitives.amax import AmaxTable
from tensorhub_agent.primitives.ids import BaseVersion, ShardKey
from tensorhub_agent.primitives.lease_messages import AvailabilityUpdate
from tensorhub_agent.primitives.program_units import PieceCompletion
from tensorhub_common.programs.amax_reductions import AmaxReductions
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.protocol.call_deadlines import OUTCOME_S_MAX
from tensorhub_common.protocol.log.commands import AnyCommand, VersionRequest
from tensorhub_common.protocol.log.events import Sibling
from tensorhub_common.protocol.plans import PlanAnswer, PlanRequest, ReadPriority, Share
from tensorhub_common.protocol.ranges import Range
from tensorhub_common.protocol.worker import EncodedBytes, ReadReport

# Calls of workers. `call` is the driver's own number; every call is answered once, by Answer or Raise.


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker wants; `deadline` in the machine's time, `session` is the worker's connection."""

    call: int
    session: int
    deadline: float
    outcome_s: float = OUTCOME_S_MAX
    """How long it waits after that for the log's word."""


class CallRegister(Call, frozen=True, kw_only=True):
    """Bring a shard whose segment the driver has made already (or adopted).

    The memory may be handed back, from an earlier process of this agent. `holds` is then the version that the
    worker knows to be whole in it, and `partial` says that a read may have left a part of one. `lent` and `spare_lent`:
    a process has it mapped, or the spare memory.
    """

    holds: int | None = None
    partial: bool = False
    lent: bool = False
    spare_lent: bool = False


class CallPublish(Call, frozen=True, kw_only=True):
    """Publish what the memory holds. `is_handed_back`: others may map it, as before its agent's restart."""

    version: int | None
    is_handed_back: bool = False


class CallUnpublish(Call, frozen=True, kw_only=True):
    """Make the memory writable again."""


class CallRead(Call, frozen=True, kw_only=True):
    """Take part in the replica's round. `patience` is when a wish for newer stops waiting."""

    want: VersionRequest
    patience: float
    has_let_go: bool = False
    """The worker shows no longer what it had mapped."""


class CallRelease(Call, frozen=True, kw_only=True):
    """Drain the shard and free its memory."""


AnyCall = CallRegister | CallPublish | CallUnpublish | CallRead | CallRelease


# Effects.


class Effect(msgspec.Struct, frozen=True):
    """Something for the driver to do."""


class AppendCommand(Effect, frozen=True):
    """Append the command to the log, after all earlier ones of its lane and as often as it takes."""

    command: AnyCommand


class CompleteCall(Effect, frozen=True, kw_only=True):
    """The call returns."""

    call: int
    version: int | None = None
    report: ReadReport | None = None


class FailCall(Effect, frozen=True):
    """The call raises. `report` is how far a read came."""

    call: int
    error: str
    message: str
    report: ReadReport | None = None


class ReportReplicaVersion(Effect, frozen=True):
    """Tell the shard's worker which version its replica holds now."""

    key: ShardKey
    version: int | None


class DigestMemory(Effect, frozen=True):
    """Hash the shard's segment; answered by `Digested(number)`."""

    key: ShardKey
    number: int
    filled: bool = False
    """Hash where reads write: of a staged shard its spare memory."""


class SaveManifest(Effect, frozen=True, kw_only=True):
    """Write the shard's manifest, before any later effect of the same call is carried out.

    That of a copy on a disk is written beside the loop, in its order. What rests on it is said after `Kept`.
    """

    key: ShardKey
    state: str
    partial: bool
    version: int | None = None
    root: str | None = None
    digests: bytes = b""
    swap: bool = False
    """The shard's spare memory is its memory from now on, and the other one is the spare."""


class Keep(Effect, frozen=True, kw_only=True):
    """Have the shard's manifest say that this version was filled in, and stands whole; answered by `Kept(number)`."""

    key: ShardKey
    number: int
    version: int
    root: str
    digests: bytes


class ProbeMapping(Effect, frozen=True):
    """Find out whether anybody still maps the shard's memory, or its spare memory; answered by `Probed`."""

    key: ShardKey
    spare: bool
    asks_back: bool = False
    """Who maps it is to see that it is waited for, until a probe finds it free."""


class CopyToSpare(Effect, frozen=True):
    """Copy what stands in the shard's memory into its spare memory; answered by `Duplicated`."""

    key: ShardKey


class DropMapping(Effect, frozen=True):
    """Let go of the memory that a read has taken to be mapped, and that was not swapped in."""

    key: ShardKey


class CompareLayouts(Effect, frozen=True):
    """Compare the layouts of one replica's shards; answered by `SiblingsChecked(number)`."""

    key: ShardKey
    number: int
    siblings: tuple[Sibling, ...]


class AllocateCopy(Effect, frozen=True):
    """Make memory for a shard of a cache replica, whose layout has this digest; answered by `CopyMade`."""

    key: ShardKey
    shards: int
    layout: str
    nbytes: int


class RequestPlan(Effect, frozen=True):
    """Ask the planner; answered by `PlanReceived(number)`."""

    key: ShardKey
    number: int
    demand: PlanRequest


class RequestLease(Effect, frozen=True):
    """Get a lease and open the transport with its ticket; answered by `SourceOpened` or `SourceLost`."""

    key: ShardKey
    source: int
    share: Share
    version: int
    root: str | None
    turn: ReadPriority | None = None
    """Of the reader's round; a half-filled source serves later turns only."""
    mapped: bool = False
    """The source's memory is to be mapped."""
    device: str = ""
    """On the GPU with this UUID, where it is not the host's."""
    program: NumberedProgram | None = None
    """What is asked for are units of this program."""
    base: BaseVersion | None = None
    """Patches that lead from there would do instead of pieces."""
    rate: float | None = None
    """What this agent has got over the source's link before, in bytes a second."""
    table: AmaxTable | None = None
    """Where partials of the program are folded."""
    hold: bool = False
    """Get the lease alone, answered by `LeaseReceived`, and keep it until `OpenTransport`."""


class OpenTransport(Effect, frozen=True):
    """Open the transport of a source whose lease is held; answered by `SourceOpened` or `SourceLost`."""

    key: ShardKey
    source: int


class ReadBatch(Effect, frozen=True):
    """Bring these pieces from the source; answered by `BatchDone(batch)`, or by `SourceLost`.

    For a shard that is mapped: take the memory in which they stand.
    """

    key: ShardKey
    source: int
    batch: int
    pieces: tuple[Range, ...]


class FoldAmax(Effect, frozen=True):
    """Count what a source has said of partials, and then write scales; done when the next effect is carried out."""

    key: ShardKey
    source: int
    partials: tuple[Range, ...]
    scales: tuple[Range, ...]
    table: AmaxTable


class ConfirmLease(Effect, frozen=True):
    """Ask the source whether the lease still holds; answered by `LeaseConfirmed`."""

    key: ShardKey
    source: int


class ReportWrongBytes(Effect, frozen=True):
    """Tell a source's agent that its bytes were wrong though its lease held; comes before its closing."""

    key: ShardKey
    source: int


class CloseSource(Effect, frozen=True):
    """End the transport. `SourceClosed` follows only when no byte of it can reach the destination any more.

    It follows within a bound of the driver's own, whatever the source does: no call ends before it.
    """

    key: ShardKey
    source: int


class BreakLease(Effect, frozen=True):
    """Tell the reader that its lease is over."""

    lease: str
    reason: str


class SendAvailability(Effect, frozen=True):
    """Tell the reader of a half-filled shard which pieces stand there, or are promised, or not any more."""

    lease: str
    update: AvailabilityUpdate


class FreeShard(Effect, frozen=True):
    """Remove the shard's segment and manifest; the shard is gone from the agent."""

    key: ShardKey


class Rejoin(Effect, frozen=True):
    """The log does not know this incarnation any more: take a higher one and tell the core by `begin`."""


class EndFenced(Effect, frozen=True):
    """Another process speaks under this agent's name with a higher incarnation: end, with one clear error."""


# Events.


class Digested(msgspec.Struct, frozen=True):
    """The segment's piece digests (empty with digests off)."""

    key: ShardKey
    number: int
    digests: bytes


class Kept(msgspec.Struct, frozen=True):
    """The next process of this agent will find what was filled in, or why it may not."""

    key: ShardKey
    number: int
    failure: str | None = None


class Probed(msgspec.Struct, frozen=True):
    """Whether somebody maps the memory."""

    key: ShardKey
    spare: bool
    lent: bool


class Duplicated(msgspec.Struct, frozen=True):
    """The spare memory has the same bytes."""

    key: ShardKey


class SiblingsChecked(msgspec.Struct, frozen=True):
    """Why the siblings' layouts clash, or None."""

    key: ShardKey
    number: int
    mismatch: str | None


class CopyMade(msgspec.Struct, frozen=True):
    """The bytes of the copy's pieces, or why there is no memory for it."""

    key: ShardKey
    shards: int
    layout: str
    nbytes: tuple[int, ...] = ()
    failure: str | None = None


class PlanReceived(msgspec.Struct, frozen=True):
    """The planner's answer; a planner that does not answer is a Refusal too."""

    key: ShardKey
    number: int
    answer: PlanAnswer
    program: NumberedProgram | None = None
    """The transfer program that the plan names."""
    completion: PieceCompletion | None = None
    """What its units make of the shard's own pieces."""
    folds: AmaxReductions | None = None
    """What of it has to be folded, if anything has; and memory for that."""
    table: AmaxTable | None = None


class LeaseReceived(msgspec.Struct, frozen=True):
    """The lease stands, and is kept until the transport is wanted. `digests` of all of the source's pieces."""

    key: ShardKey
    source: int
    digests: bytes


class SourceOpened(msgspec.Struct, frozen=True):
    """The lease stands and the transport is open. `digests` of all of the source's pieces.

    `pieces` are those that a half-filled source has so far; None: it has everything. `promises`: of the others the
    reader waits for what the source promises, no more.
    """

    key: ShardKey
    source: int
    digests: bytes
    pieces: tuple[Range, ...] | None = None
    promises: bool = False


class AvailabilityReceived(msgspec.Struct, frozen=True):
    """A half-filled source lives, and tells of its pieces, beside those that it has told of."""

    key: ShardKey
    source: int
    update: AvailabilityUpdate


class BytesReceived(msgspec.Struct, frozen=True):
    """`nbytes` more of the source's batches have come; reported a few times a second at most, or never."""

    key: ShardKey
    source: int
    nbytes: int


class BatchDone(msgspec.Struct, frozen=True):
    """The batch stands in the destination; `digests` were taken there (empty with digests off)."""

    key: ShardKey
    source: int
    batch: int
    digests: bytes
    encoded: tuple[EncodedBytes, ...] = ()
    """What of it came otherwise than as it is."""


class LeaseConfirmed(msgspec.Struct, frozen=True):
    """Whether the lease still holds after the last byte."""

    key: ShardKey
    source: int
    holds: bool


class SourceLost(msgspec.Struct, frozen=True):
    """The source refused, broke the lease, or its connection ended."""

    key: ShardKey
    source: int
    reason: str
    is_final: bool = False
    """It will never serve this reader."""


class SourceClosed(msgspec.Struct, frozen=True):
    """Nothing of the source can reach the destination any more."""

    key: ShardKey
    source: int


AnyEffect = (
    AppendCommand
    | CompleteCall
    | FailCall
    | ReportReplicaVersion
    | DigestMemory
    | SaveManifest
    | Keep
    | ProbeMapping
    | CopyToSpare
    | DropMapping
    | CompareLayouts
    | AllocateCopy
    | RequestPlan
    | RequestLease
    | OpenTransport
    | ReadBatch
    | FoldAmax
    | ConfirmLease
    | ReportWrongBytes
    | CloseSource
    | BreakLease
    | SendAvailability
    | FreeShard
    | Rejoin
    | EndFenced
)
ReadEvent = (
    PlanReceived
    | LeaseReceived
    | SourceOpened
    | AvailabilityReceived
    | BytesReceived
    | BatchDone
    | LeaseConfirmed
    | SourceLost
    | SourceClosed
)
EffectOutcome = Digested | Kept | Probed | Duplicated | SiblingsChecked | ReadEvent
