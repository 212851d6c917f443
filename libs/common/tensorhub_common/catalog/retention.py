"""Which versions are retained, which copies of them count, and who must stay because theirs is the last. No changes.

Always true of what `must_stay` guards: a retained version that a replica which may not vanish holds whole goes on
having one through every orderly act (unpublish, refill, release, drain of an agent). Only a crash can take the last.
"""

from tensorhub_common.catalog.state import Catalog, Model, Replica
from tensorhub_common.catalog.transitions import AgentState, RoundState
from tensorhub_common.catalog.validation import CommandRefused
from tensorhub_common.errors import RetentionFull
from tensorhub_common.protocol.log.commands import RETAINED_MAX
from tensorhub_common.protocol.queries import VersionState


def retained(model: Model) -> set[int]:
    """Return the versions that are to be kept: the last ones that were not retired, and the pinned ones.

    One that cannot be read now counts among the last: its holder may come back.
    """
    if not model.retain and not model.pins:
        return set()
    standing = sorted(n for n, version in model.versions.items() if version.state is not VersionState.RETIRED)
    last = standing[-model.retain :] if model.retain else []
    return {*last, *(number for number in model.pins if number in model.versions)}


def held(model: Model) -> set[int]:
    """Return the versions that somebody holds: they have a copy where there is room, and nothing waits for it."""
    return {
        number
        for hold in model.holds.values()
        for number in hold.versions
        if number in model.versions and model.versions[number].state is not VersionState.RETIRED
    }


def is_durable_copy(replica: Replica, version: int) -> bool:
    """Tell whether this is a whole copy on memory that may not vanish: a spot replica is none, nor a draining one.

    A mapped one has no memory of its own.
    """
    return not replica.spot and not replica.mapped and replica.version == version


def counts_as_copy(catalog: Catalog, replica: Replica, version: int) -> bool:
    """Tell whether there will be a copy when everything under way now has ended, so that another one may go."""
    current = replica.round
    if not is_durable_copy(replica, version) or (
        current is not None and (current.held or current.state is RoundState.STARTED)
    ):
        # It waits to be overwritten, or another version is filled beside this one and takes its place in the end.
        return False
    members = replica.members.values()
    if any(shard.leaving for shard in members):
        return False
    return not any(catalog.agents[shard.agent].draining for shard in members) if catalog.leaving else True


def counted_copies(catalog: Catalog, model: Model, version: int, without: Replica | None = None) -> list[Replica]:
    """Return the replicas whose copy counts, but for one."""
    return [each for each in model.replicas.values() if each is not without and counts_as_copy(catalog, each, version)]


def must_stay(catalog: Catalog, model: Model, replica: Replica) -> bool:
    """Tell whether what the replica holds may not go now: it is retained, and there is no other counting copy."""
    version = replica.version
    if version is None or not is_durable_copy(replica, version) or version not in retained(model):
        return False
    return not counted_copies(catalog, model, version, without=replica)


def is_coming(catalog: Catalog, model: Model, replica: Replica, version: int) -> bool:
    """Tell whether another copy that will count is on its way."""
    for other in model.replicas.values():
        if other is replica or other.spot or other.mapped:
            continue
        if other.cache == version and is_whole(catalog, other):
            return True
        current = other.round
        if current is not None and current.state is not RoundState.JOINING and current.version == version:
            return True
    return False


def is_whole(catalog: Catalog, replica: Replica) -> bool:
    """Tell whether all shards are there, on agents that live, stay and have taken them back."""
    agents = [catalog.agents[shard.agent] for shard in replica.members.values() if not shard.aside]
    return len(agents) == replica.shards and all(
        agent.state is AgentState.LIVE and not agent.draining for agent in agents
    )


def no_room(model: Model, replica: Replica, version: int) -> str:
    """Say why the last copy can't go, and what to do."""
    return (
        f"version {version} of model {model.name!r} is retained, replica {replica.name!r} holds its last copy, and no "
        "agent has room for another (or it has no digests): raise TENSORHUB_CACHE_BYTES or TENSORHUB_CACHE_DISK_BYTES "
        "on an agent, let another replica that is not spot hold it, or retain fewer versions"
    )


def refuse_full(model: Model, replica: Replica, version: int) -> CommandRefused:
    """Return the refusal of an act that would lose the last copy."""
    return CommandRefused(RetentionFull, no_room(model, replica, version))


def checked_count(last: int) -> int:
    """Return how many versions are to be retained, if it can be."""
    if not 0 <= last <= RETAINED_MAX:
        raise CommandRefused(RetentionFull, f"{last} versions can't be retained: take 0 (none) to {RETAINED_MAX}")
    return last
