"""What shards of a replica share of one look through the catalog is what a look for one of them alone would find."""

import random

import pytest
from tests.property.catalog_chance import Chance
from tests.unit.common.catalog_world import World

from tensorhub_common.catalog.state import Catalog
from tensorhub_common.protocol.plans import Demand
from tensorhub_planner.catalog_view.catalog_replica import still_true
from tensorhub_planner.catalog_view.holders import Found, Rolls, find

LIVES = 8
STEPS = 300


def demands(catalog: Catalog) -> list[Demand]:
    """Return a question of each shard for each version."""
    return [
        Demand(
            model=model.name,
            version=version,
            replica=replica.name,
            shard=shard.index,
            agent=shard.agent,
            root=None,
            at_seq=catalog.seq,
        )
        for model in catalog.models.values()
        for version in list(model.versions)[-2:]
        for replica in model.replicas.values()
        for shard in replica.members.values()
    ]


def live(seed: int) -> int:
    """Compare after each command of a random life; return how many rolls outlived one."""
    world = World()
    chance = Chance(world, random.Random(seed).choice)
    rolls: Rolls = {}
    kept = 0
    for _ in range(STEPS):
        command = chance.command()
        rolls = still_true(rolls, command, world.say(command))
        kept += len(rolls)
        for demand in demands(world.catalog):
            found = find(world.catalog, demand, pipelining=True, any_layout=True, rolls=rolls)
            assert found == find(world.catalog, demand, pipelining=True, any_layout=True)
            if isinstance(found, Found) and found.roll is not None:
                assert {holder.source.agent for holder in found.holders.able} == found.roll.agents
    return kept


@pytest.mark.long
def test_what_is_kept_of_the_catalog_is_what_it_says() -> None:
    """After each command, for every reader; and leases and filled shards leave something to keep."""
    assert sum(live(seed) for seed in range(LIVES)) >= LIVES
