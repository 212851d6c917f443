"""All events of a job's log that this version knows, as message types.

`Event` has the fields of all events. `ModelEvent`, `ReplicaEvent`, `ShardEvent` and `RoundEvent` add those of events
about one model, replica, shard or round. `AnyEvent` is the union of all events, and `KINDS` has their kinds.

The events are grouped by subject, in this order:
- The hub itself: the registry that leads, agents, jobs, and the outcome of a command.
- A publication before its version exists: the shards that have joined it, and the reason of its failure.
- A replica as a whole: it holds a version, loses one, or must keep one.
- A round of a replica: all shards join it, and one answer is decided for all of them.
- A shard: its owner, the version that it holds, and the end of that holding.
- Versions and models: they exist, can be read, and are kept.
"""

from typing import Final, get_args

import msgspec

from tensorhub_common.protocol.log.commands import HeldShard, Sender

HUB_MODEL: Final = "_hub"
"""The subject's model token of events that belong to no model."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """The part common to all events. `time` is JetStream's time of the command, in seconds since the epoch."""

    cmd: int = 0
    i: int = 0
    k: int = 0
    time: float = 0.0
    by: Sender | None = None


class ModelEvent(Event, frozen=True, kw_only=True):
    """An event about one model."""

    model: str


class ReplicaEvent(ModelEvent, frozen=True, kw_only=True):
    """An event about one replica."""

    replica: str


class ShardEvent(ReplicaEvent, frozen=True, kw_only=True):
    """An event about one shard."""

    shard: int


class RoundEvent(ReplicaEvent, frozen=True, kw_only=True):
    """An event about a replica's round. A round's number is the log sequence of the command that opened it."""

    round: int


def kind_of(event: Event) -> str:
    """Return the event's kind, "noun.what", as it is in the body and the subject."""
    return str(event.__struct_config__.tag)


def model_of(event: Event) -> str:
    """Return the subject's model token."""
    model = getattr(event, "model", HUB_MODEL)
    return model if isinstance(model, str) else HUB_MODEL


class RegistryLeads(Event, frozen=True, kw_only=True, tag="registry.leads"):
    """From here on this registry's word counts, and none of a lower term. `level` is the job's from here on."""

    registry: str
    term: int
    level: int = 0


class AgentJoined(Event, frozen=True, kw_only=True, tag="agent.joined"):
    """The agent's new incarnation counts.

    `kept` are its shards as the log takes them to be: `root` None means empty, `version` None that not all of the
    replica holds one. `dropped` was in its memory but is not, or no longer, its own.
    """

    agent: str
    incarnation: int
    host: str
    site: str
    kept: tuple[HeldShard, ...] = ()
    dropped: tuple[HeldShard, ...] = ()
    rack: str = ""


class AgentLost(Event, frozen=True, kw_only=True, tag="agent.lost"):
    """The agent was expired: its shards hold nothing until a higher incarnation states what it has."""

    agent: str
    incarnation: int
    term: int


class AgentForgotten(Event, frozen=True, kw_only=True, tag="agent.forgotten"):
    """The agent was lost long ago, and the log knows it no more. Its shards are released."""

    agent: str
    incarnation: int
    term: int


class AgentDraining(Event, frozen=True, kw_only=True, tag="agent.draining"):
    """The agent takes no new shard, and no copy on it counts; `on` False: it takes part again."""

    agent: str
    on: bool


class AgentDrained(Event, frozen=True, kw_only=True, tag="agent.drained"):
    """No retained version has its last counting copy on this agent: it may stop."""

    agent: str


class CommandRejected(Event, frozen=True, kw_only=True, tag="command.rejected"):
    """The command changed nothing. `error` is the name of the error class, `message` says what to do."""

    verb: str
    error: str
    message: str
    model: str = HUB_MODEL


class CommandRepeated(Event, frozen=True, kw_only=True, tag="command.repeated"):
    """The log had the same command before, at sequence `of`, and this was its outcome."""

    of: int
    outcome: str
    error: str | None = None
    message: str | None = None
    model: str = HUB_MODEL


class JobQuota(Event, frozen=True, kw_only=True, tag="job.quota"):
    """The limit of bytes of all of the job's shards together; 0 means none."""

    nbytes: int


class JobDeleted(Event, frozen=True, kw_only=True, tag="job.deleted"):
    """The last event of a job that counts: the job is empty, and its log is removed soon after."""

    job: str


class PublishWished(ReplicaEvent, frozen=True, kw_only=True, tag="publish.wished"):
    """Somebody outside asked for a publication; the agents of these shards gate, digest and say ready."""

    version: int | None
    shards: int


class PublishDeclined(ShardEvent, frozen=True, kw_only=True, tag="publish.declined"):
    """The shard does not fulfil the wish at log sequence `wish`, for the reason given; nothing has changed."""

    wish: int
    error: str
    message: str


class PublishJoined(ShardEvent, frozen=True, kw_only=True, tag="publish.joined"):
    """The shard is ready to be published and waits for the missing ones."""

    version: int | None
    missing: tuple[int, ...]


class PublishStands(ShardEvent, frozen=True, kw_only=True, tag="publish.stands"):
    """The shard holds this version published already."""

    version: int


class PublishFailed(ReplicaEvent, frozen=True, kw_only=True, tag="publish.failed"):
    """No shard of the replica publishes; the calls of all that had joined end with this."""

    error: str
    message: str
    shards: tuple[int, ...]


class PublishWithdrawn(ShardEvent, frozen=True, kw_only=True, tag="publish.withdrawn"):
    """The shard no longer waits; `missing` had not come."""

    missing: tuple[int, ...]


class ReplicaReady(ReplicaEvent, frozen=True, kw_only=True, tag="replica.ready"):
    """All shards of the replica hold the version. `round` is None after a publication."""

    version: int
    round: int | None = None


class ReplicaLost(ReplicaEvent, frozen=True, kw_only=True, tag="replica.lost"):
    """A shard of the replica went with its agent; `version` is what the replica held."""

    agent: str
    version: int | None = None


class CopyMember(msgspec.Struct, frozen=True, array_like=True):
    """A shard of a cache replica, and the agent whose memory is to hold it."""

    shard: int
    agent: str
    layout: str
    nbytes: int


class CopyPlaced(ReplicaEvent, frozen=True, kw_only=True, tag="copy.placed"):
    """A cache replica is to hold the retained version: each agent makes its shards and joins the replica's round."""

    version: int
    members: tuple[CopyMember, ...]


class RoundJoined(RoundEvent, frozen=True, kw_only=True, tag="round.joined"):
    """The shard waits in the round, for the missing shards or for a version."""

    shard: int
    missing: tuple[int, ...]


class RoundDecided(RoundEvent, frozen=True, kw_only=True, tag="round.decided"):
    """One version for all shards. `roots` by shard (None: no holder of that shard's layout); `held` have it already."""

    attempt: int
    version: int
    roots: tuple[str | None, ...]
    held: tuple[int, ...] = ()


class RoundStarted(RoundEvent, frozen=True, kw_only=True, tag="round.started"):
    """All leases of all shards are granted: drain and write."""

    attempt: int
    version: int
    stands: bool | None = None
    """True: every shard is filled beside what it holds, so the replica has lost nothing."""


class RoundHeld(RoundEvent, frozen=True, kw_only=True, tag="round.held"):
    """All leases are granted, but the replica has the last counting copy of a retained version: it starts later."""

    version: int
    """What is retained."""


class RoundOvertaken(RoundEvent, frozen=True, kw_only=True, tag="round.overtaken"):
    """While this attempt is read a newer version came. Each shard judges whether to read on; one `drop` is enough."""

    attempt: int
    version: int
    """The newer one."""


class RoundReopened(RoundEvent, frozen=True, kw_only=True, tag="round.reopened"):
    """The decided version went in good order before it was read; the round waits for another one."""

    version: int


class RoundSettled(RoundEvent, frozen=True, kw_only=True, tag="round.settled"):
    """There is nothing newer: every shard's call answers None."""


class RoundFailed(RoundEvent, frozen=True, kw_only=True, tag="round.failed"):
    """Every shard's call raises this error."""

    error: str
    message: str


class RoundWithdrawn(RoundEvent, frozen=True, kw_only=True, tag="round.withdrawn"):
    """The shard alone left; `missing` had not joined."""

    shard: int
    missing: tuple[int, ...]


class Sibling(msgspec.Struct, frozen=True, array_like=True):
    """A shard of the same replica that was registered before, and its layout's digest."""

    shard: int
    layout: str


class ShardRegistered(ShardEvent, frozen=True, kw_only=True, tag="shard.registered"):
    """The shard is the agent's. The sender compares its layout with the siblings' and releases it if they clash.

    `siblings` are those near it, and a few of the others, where a replica has many shards.
    """

    shards: int
    spot: bool
    agent: str
    layout: str
    siblings: tuple[Sibling, ...] = ()


class ShardReleased(ShardEvent, frozen=True, kw_only=True, tag="shard.released"):
    """The shard is gone."""


class ShardDraining(ShardEvent, frozen=True, kw_only=True, tag="shard.draining"):
    """The shard no longer counts as a holder of the version."""

    version: int


class ShardDrained(ShardEvent, frozen=True, kw_only=True, tag="shard.drained"):
    """The shard's memory may be overwritten."""

    version: int


class ShardFilled(ShardEvent, frozen=True, kw_only=True, tag="shard.filled"):
    """The shard holds the version; its replica is ready once all its shards do."""

    version: int
    round: int
    root: str


class UnpublishHeld(ShardEvent, frozen=True, kw_only=True, tag="unpublish.held"):
    """The version is retained and this replica is its last counting copy: the shard stays published until another is.

    `shard.draining` follows when one does, and `shard.stays` when none can.
    """

    version: int


class ShardStays(ShardEvent, frozen=True, kw_only=True, tag="shard.stays"):
    """The shard is not unpublished. `error` is what the call raises, empty when it was the call's own wish."""

    version: int
    error: str = ""
    message: str = ""


class VersionPublished(ModelEvent, frozen=True, kw_only=True, tag="version.published"):
    """The version exists: all shards of this replica hold it. `roots` by shard."""

    version: int
    replica: str
    roots: tuple[str, ...]


class VersionAvailable(ModelEvent, frozen=True, kw_only=True, tag="version.available"):
    """A holder of the version came back."""

    version: int
    replica: str


class VersionGone(ModelEvent, frozen=True, kw_only=True, tag="version.unavailable"):
    """The last ready replica of the version left."""

    version: int
    reason: str


class VersionRetired(ModelEvent, frozen=True, kw_only=True, tag="version.retired"):
    """The version can't be read any more, and can't come back: it was forgotten, or the model was rewound below it."""

    version: int
    reason: str = "forgotten"


class VersionPinned(ModelEvent, frozen=True, kw_only=True, tag="version.pinned"):
    """The version is kept until it is unpinned."""

    version: int


class VersionUnpinned(ModelEvent, frozen=True, kw_only=True, tag="version.unpinned"):
    """The version is kept no longer than the model's retention says."""

    version: int


class VersionKept(ModelEvent, frozen=True, kw_only=True, tag="version.kept"):
    """A replica that may not vanish holds this retained version."""

    version: int
    replica: str


class VersionExposed(ModelEvent, frozen=True, kw_only=True, tag="version.exposed"):
    """A crash took the last counting copy of this retained version. It counts again when a holder comes back."""

    version: int
    reason: str


class HoldStated(ModelEvent, frozen=True, kw_only=True, tag="hold.stated"):
    """These versions have a copy while they are held, where an agent has room. None: the holder holds none any more.

    `until`: JetStream's time at which the hold ends unless it is stated again, in seconds since the epoch.
    """

    holder: str
    versions: tuple[int, ...]
    until: float


class HoldEnded(ModelEvent, frozen=True, kw_only=True, tag="hold.ended"):
    """The holder has not stated its hold again in time."""

    holder: str
    term: int


class ModelRetention(ModelEvent, frozen=True, kw_only=True, tag="model.retention"):
    """The last `last` versions of the model are retained from now on."""

    last: int


class ModelRewound(ModelEvent, frozen=True, kw_only=True, tag="model.rewound"):
    """The model went back to `to`. What is published next is newer than `last`, which was the last published."""

    to: int
    last: int


class ModelDeleted(ModelEvent, frozen=True, kw_only=True, tag="model.deleted"):
    """The model is forgotten; its name is free."""


AnyEvent = (
    RegistryLeads
    | AgentJoined
    | AgentLost
    | AgentForgotten
    | CommandRejected
    | CommandRepeated
    | ShardRegistered
    | ShardReleased
    | ShardDraining
    | ShardDrained
    | ShardFilled
    | UnpublishHeld
    | ShardStays
    | PublishWished
    | PublishDeclined
    | PublishJoined
    | PublishStands
    | PublishFailed
    | PublishWithdrawn
    | VersionPublished
    | VersionAvailable
    | VersionGone
    | VersionRetired
    | VersionPinned
    | VersionUnpinned
    | VersionKept
    | VersionExposed
    | HoldStated
    | HoldEnded
    | ModelRetention
    | ModelRewound
    | ModelDeleted
    | JobDeleted
    | CopyPlaced
    | JobQuota
    | AgentDraining
    | AgentDrained
    | ReplicaReady
    | ReplicaLost
    | RoundJoined
    | RoundDecided
    | RoundStarted
    | RoundHeld
    | RoundOvertaken
    | RoundReopened
    | RoundSettled
    | RoundFailed
    | RoundWithdrawn
)

KINDS: Final = frozenset(str(each.__struct_config__.tag) for each in get_args(AnyEvent))
"""All kinds of events that this version knows."""
