"""A life of a catalog: many commands by chance, with everything that must hold looked at after each."""

from typing import Any

import pytest

from tensorhub_simulator.drivers.catalog import CatalogDriver
from tensorhub_simulator.drivers.catalog_commands import DrawnCommands
from tensorhub_simulator.drivers.event_watcher import EventWatcher
from tensorhub_simulator.faultsim.invariants.retention import RetentionRule

ONCE_ALL_WAS_SEEN_AND_SLOWLY_ALL = (
    pytest.param(False, id="once-all-was-seen"),
    pytest.param(True, id="all", marks=pytest.mark.slow),
)
"""For tests of what seeded lives come to: the default suite ends when that is all of it, the slow ones live each."""


def live(kind: type[DrawnCommands], pick: Any, steps: int) -> CatalogDriver:
    """Send so many commands by chance; the driver, the watcher of events and the rule of retention check after each."""
    world, watcher, retention = CatalogDriver(), EventWatcher(), RetentionRule()
    chance = kind(world, pick)
    for _ in range(steps):
        command = chance.command()
        events = world.say(command)
        retention.see(world.catalog, command, events)
        watcher.see(events)
        watcher.check(world.catalog)
    return world
