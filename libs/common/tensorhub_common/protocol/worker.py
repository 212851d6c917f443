"""What a worker (a trainer or an engine with the SDK) and its agent say to each other over the agent's unix socket.

Each frame is four bytes of length (big endian) and a MessagePack object. `call` numbers a question of the worker's;
every call gets exactly one `Done`, `Registered` or `Failed`. `Registered`, `Spare`, `Mapped` and, from the worker,
`HandedBack` travel with a segment's file descriptor. A GPU's memory may have a second one, of the file of its locks.
"""

from typing import Final, Literal

import msgspec

from tensorhub_common.protocol.log.commands import VersionRequest
from tensorhub_common.protocol.spans import FinishedSpan

FRAME_BYTES_MAX: Final = 256 * 1024 * 1024
"""A layout of a million tensors fits; anything larger is no frame of ours."""

CALLS_MAX: Final = 4096
"""Limit of calls under way on one connection."""


REGISTERING_MAX: Final = 64
"""Limit of shards of one connection that register at a time: the SDK lets further ones wait for their turn."""


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag_field="t"):
    """The part common to all frames."""


class Attach(Frame, frozen=True, kw_only=True, tag="attach"):
    """The first frame of a connection."""

    protocol: int
    """The oldest protocol that the worker speaks (`handshake.py`)."""
    job: str
    newest: int = 0
    """The newest; 0: that one alone."""
    release: str = ""


class Attached(Frame, frozen=True, kw_only=True, tag="attached"):
    """The agent serves this connection. `nats` is where queries about the job are answered.

    `credentials` and `ca` are paths of files, for a worker that was given none of its own.
    """

    protocol: int
    agent: str
    incarnation: int
    nats: str
    credentials: str | None = None
    ca: str | None = None
    newest: int = 0
    """The newest protocol that the agent speaks; `protocol` is the oldest."""
    release: str = ""
    takes_copied: bool = False
    """It takes `Copied`."""
    takes_handed_back: bool = False
    """It takes `HandedBack`."""


class AttachRefused(Frame, frozen=True, kw_only=True, tag="refused"):
    """The agent does not serve this connection, which ends."""

    error: str
    message: str


class Call(Frame, frozen=True, kw_only=True):
    """A question with a bound."""

    call: int
    timeout_s: float


class RegisterCall(Call, frozen=True, kw_only=True, tag="register"):
    """Bring a shard, or come back to it. `layout` is a Layout as zstd-compressed MessagePack."""

    model: str
    replica: str
    shard: int
    shards: int
    spot: bool
    layout: bytes
    install: str = "in-place"
    device: str = ""
    """The UUID of the GPU in whose memory it is to be; empty: the host's."""
    keeps: bool = False
    """The worker keeps the descriptors of its memory on a GPU, and wants that of its locks too."""
    holds: int | None = None
    """The version that is whole in memory of which `HandedBack` came before this."""
    partial: bool = False
    """A read may have left a part of a version there."""


class HandedBack(Frame, frozen=True, kw_only=True, tag="handed-back"):
    """Comes before `RegisterCall`, with the descriptors of memory that the worker keeps: a GPU's, and of its locks.

    An agent without that memory, which is the next process of the one that made it, takes it back. One that has the
    shard does nothing with it.
    """

    call: int
    """That of the `RegisterCall`."""
    segment: int
    """As in `Registered`."""
    is_live: bool
    """Whether it is the segment that the shard is in; the other one is a staged shard's spare."""
    descriptors: int = 1
    """How many come with it: the memory's, and where there is one that of its locks."""


class ShardCall(Call, frozen=True, kw_only=True):
    """About a shard that this connection has registered; `handle` is what `Registered` said."""

    handle: int


class PublishCall(ShardCall, frozen=True, kw_only=True, tag="publish"):
    """Publish what the shard's memory holds. `traceparent` names the worker's own publish span.

    `copy` is that of the `Copied` frames which told of this memory; None: there were none.
    """

    version: int | None
    traceparent: str | None = None
    copy: int | None = None


class UnpublishCall(ShardCall, frozen=True, kw_only=True, tag="unpublish"):
    """Wait until the memory may be overwritten."""


class ReadCall(ShardCall, frozen=True, kw_only=True, tag="read"):
    """Join the replica's round. `wait_s`: how long a wish for newer waits for one; None means the whole bound.

    `traceparent` names the span that is active in the engine, if there is one; the transfer's is linked to it.
    `segment` is which of its segments holds the tensors of a staged shard, so the other one may be written.
    `has_let_go`: the tensors of a mapped shard show nothing any more, so the shard holds nothing.
    """

    want: VersionRequest
    wait_s: float | None = None
    traceparent: str | None = None
    segment: int | None = None
    has_let_go: bool = False


class ReleaseCall(ShardCall, frozen=True, kw_only=True, tag="release"):
    """Drain the shard and free it."""


class Loaded(Frame, frozen=True, kw_only=True, tag="loaded"):
    """The worker has copied its values in: the memory is whole again, though not published."""

    handle: int


class Copied(Frame, frozen=True, kw_only=True, tag="copied"):
    """A copy to the shard's memory has come so far, so that the agent may hash that while the rest comes.

    It has no answer, and may be lost: only a publication that names the same copy on the same connection goes by it.
    """

    handle: int
    copy: int
    """A number that this process gives to no other copy."""
    nbytes: int
    """The memory's first bytes: they don't change before the next copy."""


class Registered(Frame, frozen=True, kw_only=True, tag="registered"):
    """The shard is registered. `version`: what it holds published; the memory then wins over the worker's values."""

    call: int
    handle: int
    nbytes: int
    version: int | None
    fresh: bool
    """The segment is new: all zero."""
    segment: int = 0
    """Which segment comes with this; 0: that of the host's memory which is behind the descriptor."""
    root: str = ""
    """The root of the digests of `version`; empty without digests, and from an agent that does not say."""
    descriptors: int = 1
    """How many come with it: two of a GPU's memory, for a worker that keeps it."""


class Spare(Frame, frozen=True, kw_only=True, tag="spare"):
    """Comes before `Registered` of a staged shard, with the descriptor of its other segment."""

    call: int
    segment: int = 0
    """As in `Registered`."""
    descriptors: int = 1
    """As in `Registered`."""


class Swapped(Frame, frozen=True, kw_only=True, tag="swapped"):
    """Which of its two segments a staged shard is in; comes before the answer to each call."""

    handle: int
    segment: int


class Mapped(Frame, frozen=True, kw_only=True, tag="mapped"):
    """Comes before the answer to a mapped shard's read, with a read-only descriptor of the holder's segment.

    The descriptor's open file description holds a shared `flock`: it keeps the memory from being overwritten until
    the last mapping and the last descriptor of it are gone. The descriptor of a GPU's memory can hold none, so a second
    one comes behind it, of an empty file, which is kept for as long as the memory is mapped.
    """

    handle: int
    version: int
    descriptors: int = 1
    """How many come with it."""


Encoding = Literal["delta", "zstd"]
"""A way in which pieces come in fewer bytes than they have."""


class EncodedBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that came by an encoding."""

    how: Encoding
    nbytes: int
    """The bytes of pieces that were made from it."""
    wire_bytes: int
    """The bytes that crossed the wire for them."""
    why: str = ""
    """The line's rate for which this encoding was expected to be quicker, when it was last chosen."""


class SourceReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one source gave to a read."""

    agent: str
    replica: str
    transport: str
    nbytes: int
    """The bytes that came from it and count."""
    pieces: int = 0
    retried: int = 0
    """How many of its pieces were asked for again."""
    wasted_bytes: int = 0
    """The bytes that were asked of it and did not count in the end."""
    lost: str = ""
    """Why it was left out before its end; empty if it was not."""
    encoded: tuple[EncodedBytes, ...] = ()
    """Of what came of it, what came otherwise than as it is."""
    why: str


class ReadStages(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of a read by stage, in their order.

    A plan made in mid-read counts to the wire. If the log decided several times, attempts that came to nothing count to
    the plan of the last one.
    """

    round_s: float
    """While nothing was decided: from the call to the log's first decision, and again from where the log took one back,
    since there was nothing to read any more, to the next."""
    plan_s: float
    """Until the plan that the read went by; every second of it was after a decision."""
    lease_s: float
    """Until every source has granted a lease and let this agent in."""
    start_s: float
    """Until every shard of the replica has its leases, and the earlier version is no longer served."""
    first_s: float
    """Until the first batch of pieces is in place."""
    wire_s: float
    """Until the last is, checked against its digests if these are on."""
    verify_s: float
    """Until the whole is verified: without digests that takes the sources' confirmation."""
    ready_s: float
    """Until the log says that the replica is ready."""


class ReadReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a read went. `wire_s` is the time between the first piece asked for and the last verified."""

    nbytes: int
    wire_s: float
    total_s: float
    pieces: int
    retried: int
    """Pieces that were asked for more than once."""
    kept: int
    """Pieces that an earlier failed round of the same version had verified already."""
    got_bytes: int = 0
    """What came in this read and counts: `nbytes` less those of the kept pieces."""
    wasted_bytes: int = 0
    """What was asked for and did not count: wrong, or under way at a source that was left out. It was read again."""
    plans: int = 0
    """How often the planner was asked."""
    root: str = ""
    """The root of the digests of what the shard holds now, as the log has it; empty without digests."""
    base: int | None = None
    """The version that the shard held before, from which deltas lead to this one, if any came."""
    sources: tuple[SourceReport, ...]
    stages: ReadStages | None = None
    unread: tuple[str, ...] = ()
    """Tensors of the version of which this shard has nothing, the first of `unread_count`; its siblings may have."""
    unread_count: int = 0
    unregistered: tuple[str, ...] = ()
    """With one shard of a replica, the first that is not filled by its own pieces: tensors of the version of which none
    of its shards has anything, the first of `unregistered_count`."""
    unregistered_count: int = 0
    failure: str = ""
    """Why an `update` that found a newer version has brought nothing, and returned None. Empty: it did bring it."""


class Done(Frame, frozen=True, kw_only=True, tag="done"):
    """The call's answer."""

    call: int
    version: int | None = None
    report: ReadReport | None = None
    traceparent: str | None = None
    """The span that the worker's own belongs to: the version's publication, or the transfer."""


class Failed(Frame, frozen=True, kw_only=True, tag="failed"):
    """The call raises this error."""

    call: int
    error: str
    message: str
    traceparent: str | None = None


class Traced(Frame, frozen=True, kw_only=True, tag="traced"):
    """Spans that the worker has made of calls that are over, for its agent to keep."""

    spans: tuple[FinishedSpan, ...]


class Progress(Frame, frozen=True, kw_only=True, tag="progress"):
    """How far a read is; sent a few times a second while it lasts."""

    call: int
    done_bytes: int
    total_bytes: int


class HoldingChanged(Frame, frozen=True, kw_only=True, tag="holds"):
    """What the shard's replica holds has changed, or what it holds is not what was published."""

    handle: int
    version: int | None
    trouble: str = ""
    """What is wrong with it, in words for the worker's log."""


FromWorker = (
    Attach | RegisterCall | HandedBack | PublishCall | UnpublishCall | ReadCall | ReleaseCall | Loaded | Copied | Traced
)
FromAgent = Attached | AttachRefused | Registered | Spare | Swapped | Mapped | Done | Failed | Progress | HoldingChanged
