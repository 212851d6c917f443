"""Cache replicas: where a copy of a retained version is placed, decided by the fold for all of its shards at once.

A cache replica is cut like one that holds the version, so each piece of it is one that the log vouches for. It is no
worker's: the agents that are named make its shards, join its round as any other replica does, and let it go when the
log says that the shards are released. Always true: a placement fits the room that its agents have stated and the job's
quota; its name begins with `_`, as no user's does, and is never used twice.
"""

from collections.abc import Collection
from typing import Final

from tensorhub_common.catalog.availability import Out, refresh_availability
from tensorhub_common.catalog.retention import counted_copies, is_whole, retained
from tensorhub_common.catalog.state import (
    REPLICAS_MAX,
    SHUN_S,
    Catalog,
    Model,
    Replica,
    Shard,
    Version,
    root_key,
)
from tensorhub_common.catalog.transitions import AgentState
from tensorhub_common.protocol.log.commands import NO_ROOT
from tensorhub_common.protocol.log.events import CopyMember, CopyPlaced, ShardReleased
from tensorhub_common.protocol.log.levels import Level
from tensorhub_common.protocol.subjects import cache_name

_ABSENT: Final = object()


def place_copy(catalog: Catalog, model: Model, version: Version, out: Out) -> bool:
    """Place a cache replica for the version, if some agents have room for it."""
    pattern = _pattern(model, version)
    members = None if pattern is None else _choose(catalog, model, version, pattern)
    if pattern is None or members is None:
        return False
    name = cache_name(version.number, catalog.seq)
    replica = model.replicas[name] = Replica(name, pattern.shards, spot=False, cache=version.number)
    for member in members:
        replica.members[member.shard] = Shard(member.shard, member.agent, member.layout, member.nbytes)
        agent = catalog.agents[member.agent]
        agent.shards[model.name, name, member.shard] = None
        agent.cached_bytes += member.nbytes
    out.append(CopyPlaced(model=model.name, replica=name, version=version.number, members=tuple(members)))
    return True


def make_room(catalog: Catalog, model: Model, version: Version, out: Out) -> bool:
    """Place a cache replica for a retained version where copies are that are only held; as few as it takes go."""
    pattern = _pattern(model, version)
    if pattern is None:
        return False
    yielding: list[tuple[Model, Replica]] = []
    # The version itself has no copy, or one that is of no use.
    for name in catalog.tended:
        other = catalog.models[name]
        keep = retained(other)
        copies = (each for each in other.replicas.values() if each.cache is not None and each.cache not in keep)
        for copy in copies:
            yielding.append((other, copy))
            if _choose(catalog, model, version, pattern, [each for _, each in yielding]) is not None:
                for its_model, each in yielding:
                    drop_copy(catalog, its_model, each, out)
                return place_copy(catalog, model, version, out)
    return False


def _pattern(model: Model, version: Version) -> Replica | None:
    """Return a replica that holds the version, whose cut the copy takes: one that was not copied itself if there is.

    None: there is none, or the version can't be copied.
    """
    if len(model.replicas) >= REPLICAS_MAX:
        return None
    holders = [each for each in model.replicas.values() if each.version == version.number and not each.mapped]
    found = min(holders, key=lambda replica: replica.cache is not None, default=None)
    members = () if found is None else found.members.values()
    if found is None or any(
        version.roots.get(root_key(found.shards, each.index, each.layout)) == NO_ROOT for each in members
    ):
        # Bytes that were published without digests can't be verified, so no copy could be known to be equal.
        return None
    return found


def _choose(
    catalog: Catalog, model: Model, version: Version, pattern: Replica, without: Collection[Replica] = ()
) -> list[CopyMember] | None:
    """Give each shard to an agent: of another host than a holder's if one has room, then the one with the most room.

    `without`: copies that would be let go of before.
    """
    freed = [shard for replica in without for shard in replica.members.values()]
    total = sum(shard.nbytes for shard in pattern.members.values()) - sum(shard.nbytes for shard in freed)
    if over_quota(catalog, total) is not None:
        return None
    room = {
        agent.name: agent.cache_bytes - agent.cached_bytes
        for agent in catalog.agents.values()
        if agent.state is AgentState.LIVE
        and agent.cache_bytes
        and not agent.draining
        and catalog.time - version.shunned.get(agent.name, -SHUN_S) >= SHUN_S
    }
    for shard in freed:
        if shard.agent in room:
            room[shard.agent] += shard.nbytes
    hosts = {
        catalog.agents[shard.agent].host
        for replica in model.replicas.values()
        if replica.version == version.number
        for shard in replica.members.values()
    }
    members: list[CopyMember] = []
    for index in range(pattern.shards):
        shard = pattern.members[index]
        able = [name for name, left in room.items() if left >= shard.nbytes]
        if not able:
            return None
        best = min(able, key=lambda name: (catalog.agents[name].host in hosts, -room[name], name))
        room[best] -= shard.nbytes
        members.append(CopyMember(index, best, shard.layout, shard.nbytes))
    return members


def taken_bytes(catalog: Catalog) -> int:
    """Return how many bytes all shards of the job take."""
    return sum(
        shard.nbytes
        for model in catalog.models.values()
        for replica in model.replicas.values()
        for shard in replica.members.values()
    )


def over_quota(catalog: Catalog, nbytes: int) -> str | None:
    """Say why `nbytes` more don't fit, or None."""
    taken = taken_bytes(catalog) if catalog.quota_bytes else 0
    if not catalog.quota_bytes or taken + nbytes <= catalog.quota_bytes:
        return None
    return (
        f"a shard of {nbytes} bytes is over the quota of job {catalog.job!r}: its shards take {taken} of at most "
        f"{catalog.quota_bytes} bytes; release some, retain fewer versions, or raise it with 'tensorhub quota'"
    )


def forget_shard(catalog: Catalog, model: Model, replica: Replica, shard: Shard) -> None:
    """Take a shard off its agent's list."""
    agent = catalog.agents.get(shard.agent)
    if agent is None or agent.shards.pop((model.name, replica.name, shard.index), _ABSENT) is _ABSENT:
        return
    if replica.cache is not None:
        agent.cached_bytes -= shard.nbytes


def drop_copy(catalog: Catalog, model: Model, replica: Replica, out: Out) -> None:
    """Forget a cache replica. Its agents free the memory when they read that the shards are released."""
    for index in list(replica.members):
        shard = replica.members.pop(index)
        forget_shard(catalog, model, replica, shard)
        out.append(ShardReleased(model=model.name, replica=replica.name, shard=index))
    refresh_availability(model, replica, "released", out)
    model.waiting.pop(replica.name, None)
    del model.replicas[replica.name]


def _leaves(replica: Replica) -> bool:
    return any(shard.leaving for shard in replica.members.values())


def is_useless(catalog: Catalog, model: Model, replica: Replica, keep: set[int]) -> bool:
    """Tell whether a cache replica has no purpose any more, or can't come to have what it is for."""
    version = replica.cache
    if version is None:
        return False
    if version not in keep:
        return True
    copies = [each for each in model.replicas.values() if each.cache == version and each.version == version]
    if catalog.level >= Level.LEAVING_COPIES:
        copies = [each for each in copies if not _leaves(each)]
    if any(each is not replica and is_whole(catalog, each) for each in copies[:1] or ()):
        # One is enough; this is a second one, or what is left behind on an agent that leaves.
        return True
    if is_whole(catalog, replica):
        return False
    if any(shard.aside for shard in replica.members.values()):
        # It takes its room, and is a copy again once its agent can take it back: until there is another, it may be the
        # last.
        return len(replica.members) < replica.shards
    # A part of it is on an agent that is away or leaves. It may still be all that there is.
    others = [
        each for each in model.replicas.values() if each is not replica and each.version == version and not each.mapped
    ]
    if replica.version != version:
        return bool(others) or len(replica.members) < replica.shards
    return bool(counted_copies(catalog, model, version, without=replica))
