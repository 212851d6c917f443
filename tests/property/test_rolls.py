"""What shards of a replica share of one look through the catalog is what a look for one of them alone would find."""

import random

import pytest

from tensorhub_common.catalog.state import Catalog
from tensorhub_common.protocol.plans import PlanRequest
from tensorhub_planner.catalog_view.catalog_replica import unchanged_holders
from tensorhub_planner.catalog_view.holders import Candidates, HoldersCache, find_candidates
from tensorhub_simulator.drivers.catalog import CatalogDriver
from tensorhub_simulator.drivers.catalog_commands import DrawnCommands

LIVES = 8
STEPS = 300


def demands(catalog: Catalog) -> list[PlanRequest]:
    """Return a question of each shard for each version."""
    return [
        PlanRequest(
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
    world = CatalogDriver()
    chance = DrawnCommands(world, random.Random(seed).choice)
    rolls: HoldersCache = {}
    kept = 0
    for _ in range(STEPS):
        command = chance.command()
        rolls = unchanged_holders(rolls, command, world.say(command))
        kept += len(rolls)
        for demand in demands(world.catalog):
            found = find_candidates(world.catalog, demand, pipelining=True, any_layout=True, rolls=rolls)
            assert found == find_candidates(world.catalog, demand, pipelining=True, any_layout=True)
            if isinstance(found, Candidates) and found.roll is not None:
                assert {holder.source.agent for holder in found.holders.able} == found.roll.agents
    return kept


@pytest.mark.long
def test_what_is_kept_of_the_catalog_is_what_it_says() -> None:
    """After each command, for every reader; and leases and filled shards leave something to keep."""
    assert sum(live(seed) for seed in range(LIVES)) >= LIVES
