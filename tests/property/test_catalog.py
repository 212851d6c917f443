"""Whatever is said to the catalog, in whatever order: what must always hold."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.property.catalog_chance import Chance, Pick
from tests.property.catalog_watcher import Watcher
from tests.unit.common.catalog_world import JOB, World, recoded

from tensorhub_common.catalog import availability, membership, rounds
from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.catalog.table import AGENT_MOVES, ROUND_MOVES, SHARD_MOVES, VERSION_MOVES, move
from tensorhub_common.wire.commands import Unreadable
from tensorhub_common.wire.events import Event

STEPS = 60
SEEDED_RUNS = 60
SEEDED_STEPS = 300


def run(pick: Pick, steps: int) -> World:
    """Say so many commands by chance; `World.say` and the watcher check after each."""
    world, watcher = World(), Watcher()
    chance = Chance(world, pick)
    for _ in range(steps):
        events = world.say(chance.command())
        watcher.see(events)
        watcher.check(world.catalog)
    return world


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_no_sequence_of_commands_breaks_the_catalog(data: st.DataObject) -> None:
    """Invariants, whole groups, events that fit and read back, refusals that change nothing: see `World.say`."""
    world = run(lambda choices: data.draw(st.sampled_from(choices)), STEPS)
    assert world.replay() == world.catalog


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """The moves that were made, of all tables."""
    made: set[tuple[str, str]] = set()

    def recording(table: dict, state: object, what: object) -> object:  # type: ignore[type-arg]
        made.add((repr(state), repr(what)))
        return move(table, state, what)

    for module in (availability, membership, rounds):
        monkeypatch.setattr(module, "move", recording)
    monkeypatch.setattr(availability, "VERSIONS_KEPT_MAX", 2)
    return made


def test_seeded_runs_take_every_transition_of_the_tables(taken: set[tuple[str, str]]) -> None:
    """What no run takes is either dead, and should go from the table, or not tested."""
    for seed in range(SEEDED_RUNS):
        run(random.Random(seed).choice, SEEDED_STEPS)
    tables = (SHARD_MOVES, VERSION_MOVES, ROUND_MOVES, AGENT_MOVES)
    every = {(repr(state), repr(what)) for table in tables for state, what in table}
    assert every - taken == set()
    assert taken - every == set()


@pytest.mark.parametrize("seed", range(4))
def test_two_folders_of_one_log_hold_equal_catalogs(seed: int) -> None:
    """One folds the commands as they were made, the other what a registry reads out of the log."""
    world = run(random.Random(1000 + seed).choice, SEEDED_STEPS)
    assert world.replay() == world.catalog
    catalog = Catalog(JOB)
    events: list[Event] = []
    for seq, time, command in world.log:
        read = command if isinstance(command, Unreadable) else recoded(command)
        assert read == command
        events.extend(apply(catalog, seq, time, read))
    assert catalog == world.catalog
    assert events == world.events
