"""Every event that this version knows."""

from typing import Final, get_args

from tensorhub_common.protocol.log.hub import (
    AgentDrained,
    AgentDraining,
    AgentForgotten,
    AgentJoined,
    AgentLost,
    CommandRejected,
    CommandRepeated,
    JobDeleted,
    JobQuota,
    RegistryLeads,
)
from tensorhub_common.protocol.log.publications import (
    PublishDeclined,
    PublishFailed,
    PublishJoined,
    PublishStands,
    PublishWished,
    PublishWithdrawn,
)
from tensorhub_common.protocol.log.replicas import CopyPlaced, ReplicaLost, ReplicaReady
from tensorhub_common.protocol.log.rounds import (
    RoundDecided,
    RoundFailed,
    RoundHeld,
    RoundJoined,
    RoundOvertaken,
    RoundReopened,
    RoundSettled,
    RoundStarted,
    RoundWithdrawn,
)
from tensorhub_common.protocol.log.shards import (
    ShardDrained,
    ShardDraining,
    ShardFilled,
    ShardRegistered,
    ShardReleased,
    ShardStays,
    UnpublishHeld,
)
from tensorhub_common.protocol.log.versions import (
    ModelDeleted,
    ModelRetention,
    ModelRewound,
    VersionAvailable,
    VersionExposed,
    VersionGone,
    VersionKept,
    VersionPinned,
    VersionPublished,
    VersionRetired,
    VersionUnpinned,
)

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
