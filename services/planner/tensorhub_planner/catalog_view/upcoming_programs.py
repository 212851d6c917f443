"""Which transfer programs will be requested soon: those of replicas that wait for a version that does not exist. Pure.

A job begins with trainers that register, and rollout replicas that register and want "latest". When the trainers then
publish, every shard of every rollout replica requests at the same moment a program of all the trainers' layouts, which
for thousands of ranks takes seconds to compile. The log shows the publishers and the readers before that, so the
programs are compiled while the readers wait anyway.

It is a guess, and nothing depends on it: a program that is not there yet is compiled when it is requested.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from tensorhub_common.catalog.state import Catalog, Model, Replica, root_key
from tensorhub_common.catalog.transitions import RoundState
from tensorhub_planner.primitives.source_set import LayoutSet

PUBLISHERS_MAX: Final = 2
"""Limit of replicas of a model that are expected to publish."""


class UpcomingProgram(NamedTuple):
    """A program that will be asked for: the reader's layout, and whose layouts fill it."""

    layout: str
    sources: LayoutSet


def upcoming_programs(catalog: Catalog) -> Iterator[UpcomingProgram]:
    """Yield the programs that will be asked for when the next version of a model is published, each once."""
    for model in catalog.models.values():
        waiting = [replica for replica in model.replicas.values() if _waits(replica)]
        if not waiting:
            continue
        for publisher in _publishers(model):
            layouts = [publisher.members[index].layout for index in range(publisher.shards)]
            sources = LayoutSet(tuple(dict.fromkeys(layouts)), tuple(sorted(set(layouts))))
            # Shards of equal layouts at equal places are read as they are, without a program.
            own = {root_key(publisher.shards, index, layout) for index, layout in enumerate(layouts)}
            yield from dict.fromkeys(
                UpcomingProgram(shard.layout, sources)
                for replica in waiting
                for _, shard in sorted(replica.members.items())
                if root_key(replica.shards, shard.index, shard.layout) not in own
            )


def _waits(replica: Replica) -> bool:
    """Tell whether all shards of a replica wait in a round, for a version that does not exist yet."""
    current = replica.round
    if current is None or current.state is not RoundState.JOINING or replica.mapped:
        return False
    return len(current.wants) == replica.shards


def _publishers(model: Model) -> list[Replica]:
    """Return which replicas may publish: they are whole, want nothing, and stay."""
    able = [
        replica
        for replica in model.replicas.values()
        if len(replica.members) == replica.shards
        and (replica.round is None or replica.round.state is RoundState.OVER)
        and not replica.spot
        and not replica.mapped
    ]
    return able[:PUBLISHERS_MAX]
