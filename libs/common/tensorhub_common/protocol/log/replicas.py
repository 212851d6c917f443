"""What happens to a replica as a whole: that it holds a version, loses one, or is made to keep one."""

import msgspec

from tensorhub_common.protocol.log.events import ReplicaEvent


class ReplicaReady(ReplicaEvent, frozen=True, kw_only=True, tag="replica.ready"):
    """All shards of the replica hold the version. `round` is None after a publication."""

    version: int
    round: int | None = None


class ReplicaLost(ReplicaEvent, frozen=True, kw_only=True, tag="replica.lost"):
    """A shard of the replica went with its agent; `version` is what the replica held."""

    agent: str
    version: int | None = None


class CopyMember(msgspec.Struct, frozen=True, array_like=True):
    """A shard of a cache replica, and the agent in whose memory it is to stand."""

    shard: int
    agent: str
    layout: str
    nbytes: int


class CopyPlaced(ReplicaEvent, frozen=True, kw_only=True, tag="copy.placed"):
    """A cache replica is to hold the retained version: each agent makes its shards and joins the replica's round."""

    version: int
    members: tuple[CopyMember, ...]
