"""What is noted of a call while it is under way: times, and the contexts of the spans that will be made of it. Pure.

Times are in ns since the epoch, 0 where something has not happened; the driver takes them.
"""

from dataclasses import dataclass, field

from tensorhub_agent.core.effects import CallPublish, CallRead
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.transfer.source import Source
from tensorhub_common.observability.trace_context import TraceContext
from tensorhub_common.protocol.log.commands import Sender
from tensorhub_common.protocol.plans import PlanAnswer, Share


@dataclass(slots=True)
class PlanRecord:
    """One question to the planner."""

    context: TraceContext
    number: int
    asked: int
    came: int = 0
    answer: PlanAnswer | None = None


@dataclass(slots=True)
class SourceRecord:
    """One source of a read. `reading` is the read's own account of it, whose figures are final when the call ends."""

    share: Share
    reading: Source | None
    lease: TraceContext
    read: TraceContext
    asked: int
    base: int | None = None
    """The version from which it may bring deltas."""
    opened: int = 0
    last: int = 0
    """When its last batch came."""
    over: int = 0
    """When it was lost, or closed."""
    lost: str = ""


@dataclass(slots=True)
class ReadRecord:
    """One call that reads. Until the log decides a version, `context` is in a trace of the call's own."""

    key: ShardKey
    call: CallRead
    context: TraceContext
    began: int
    engine: TraceContext | None
    """The span that was active in the worker's process when it called."""
    wait: TraceContext
    """The context of the span from the call to the log's decision, in a trace of the call's own: a version that is
    waited for is published later, and no span of its trace begins before that."""
    parent: TraceContext | None = None
    published: TraceContext | None = None
    """The version's publish span, where it is not the parent."""
    said_by: Sender | None = None
    round: int | None = None
    attempts: int = 0
    version: int | None = None
    decided: int = 0
    started: int = 0
    filled: int = 0
    ended: int = 0
    error: str | None = None
    nbytes: int = 0
    kept: int = 0
    plans: list[PlanRecord] = field(default_factory=list)
    sources: dict[int, SourceRecord] = field(default_factory=dict)


@dataclass(slots=True)
class PublishRecord:
    """One publication of one shard. `context` is the worker's span; for a wish from outside it is made here."""

    key: ShardKey
    call: CallPublish | None
    context: TraceContext
    began: int
    is_ours: bool
    """No worker makes the publish span, so this agent does."""
    parent: TraceContext | None = None
    said_by: Sender | None = None
    digested_from: int = 0
    digested: int = 0
    said: int = 0
    root: str = ""
    version: int | None = None
    ended: int = 0
    error: str | None = None


CallRecord = ReadRecord | PublishRecord
