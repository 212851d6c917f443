"""What follows when a shard changes: which replicas hold a version, which versions can be read, who stops waiting.

Handlers move shards and then call `refresh_availability` once per replica touched, so a shard that goes and comes back
within one command (an agent that restarts and states what it still holds) is no news.
"""

from typing import Final

from tensorhub_common.catalog.retention import retained
from tensorhub_common.catalog.state import (
    VERSIONS_KEPT_MAX,
    Model,
    Replica,
    Shard,
    Version,
)
from tensorhub_common.catalog.transitions import (
    SHARD_TRANSITIONS,
    VERSION_TRANSITIONS,
    ShardState,
    ShardTransition,
    VersionTransition,
    transition,
)
from tensorhub_common.protocol.log.events import Event, VersionAvailable, VersionGone, VersionRetired
from tensorhub_common.protocol.queries import VersionState

Out = list[Event]

IN_ORDER: Final = frozenset({"unpublished", "replaced", "released"})
"""Reasons for which a version's last holder leaves by its own will; "lost" is the other one."""

_KEEPS_VERSION: Final = frozenset({ShardState.READY, ShardState.DRAINING})


def move_shard(shard: Shard, what: ShardTransition, version: int | None = None, root: str | None = None) -> None:
    """Move a shard, and let it hold `version` where the new state holds something."""
    before = shard.state
    shard.state = transition(SHARD_TRANSITIONS, before, what)
    if shard.state is ShardState.READY:
        shard.version, shard.root = version, root
        return
    shard.leaving = False
    if shard.state not in _KEEPS_VERSION:
        shard.version = shard.root = None


def empty_for_refill(shard: Shard) -> None:
    """Bring a shard to empty before it is filled: refilling what is ready is an unpublish of it."""
    if shard.state is ShardState.READY:
        move_shard(shard, ShardTransition.UNPUBLISHED)
        move_shard(shard, ShardTransition.DRAINED)


def refresh_availability(model: Model, replica: Replica, reason: str, out: Out) -> None:
    """Bring the replica's version and the versions' availability up to date, and say what changed."""
    before, after = replica.version, common_version(replica)
    if before == after:
        return
    replica.version = after
    if replica.mapped:
        # It has no bytes of its own, so no version depends on it.
        return
    # The new holder counts before the old one goes, so that a version never flickers.
    if after is not None:
        _holder_came(model.versions[after], replica, model, out)
    if before is not None and before in model.versions:
        _holder_went(model.versions[before], model, reason, out)


def common_version(replica: Replica) -> int | None:
    """Return the version at which all shards of the replica are ready, or None."""
    if len(replica.members) < replica.shards:
        return None
    first = replica.members[0].version
    same = all(shard.state is ShardState.READY and shard.version == first for shard in replica.members.values())
    return first if same else None


def _holder_came(version: Version, replica: Replica, model: Model, out: Out) -> None:
    version.holders += 1
    if version.state is VersionState.UNAVAILABLE:
        version.state = transition(VERSION_TRANSITIONS, version.state, VersionTransition.HOLDER_BACK)
        out.append(VersionAvailable(model=model.name, version=version.number, replica=replica.name))


def _holder_went(version: Version, model: Model, reason: str, out: Out) -> None:
    version.holders -= 1
    if version.holders == 0 and version.state is not VersionState.RETIRED:
        version.state = transition(VERSION_TRANSITIONS, version.state, VersionTransition.HOLDER_GONE)
        version.gone = reason
        out.append(VersionGone(model=model.name, version=version.number, reason=reason))
        _retire(model, out)


def _retire(model: Model, out: Out) -> None:
    """Forget the oldest versions without a shard that holds a part of them, so that the catalog stays small."""
    gone = sorted(number for number, version in model.versions.items() if version.state is VersionState.UNAVAILABLE)
    if len(gone) <= VERSIONS_KEPT_MAX:
        return
    held = {shard.version for replica in model.replicas.values() for shard in replica.members.values()}
    wanted = {replica.round.version for replica in model.replicas.values() if replica.round is not None}
    keep = retained(model)
    for number in gone[: len(gone) - VERSIONS_KEPT_MAX]:
        if number in keep or number in held or number in wanted or number == model.last:
            continue
        model.versions[number].state = transition(
            VERSION_TRANSITIONS, VersionState.UNAVAILABLE, VersionTransition.FORGOTTEN
        )
        del model.versions[number]
        out.append(VersionRetired(model=model.name, version=number))
