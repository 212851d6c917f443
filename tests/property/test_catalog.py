"""Whatever is said to the catalog, in whatever order: what must always hold."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples_of import examples
from tests.property.catalog_lives import ONCE_ALL_WAS_SEEN_AND_SLOWLY_ALL, live

from tensorhub_common.catalog import availability
from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.handlers import admin, membership, rounds
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.catalog.transitions import (
    AGENT_TRANSITIONS,
    ROUND_TRANSITIONS,
    SHARD_TRANSITIONS,
    VERSION_TRANSITIONS,
    AgentState,
    ShardState,
    transition,
)
from tensorhub_common.protocol.log.commands import VERSION_MAX, Unreadable
from tensorhub_common.protocol.log.events import Event, ReplicaReady, VersionPublished
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL
from tensorhub_simulator.drivers.catalog import JOB, MODEL, CatalogDriver, recoded
from tensorhub_simulator.drivers.catalog_commands import AGENTS, SHARDS, DrawnCommands, DrawnRulings, Pick

STEPS = 60
SEEDED_RUNS = 150
SEEDED_STEPS = 300
RULED_RUNS = 10
"""So many lives in which users rule too: what is rewound is retired while it can be read."""


def run(pick: Pick, steps: int) -> CatalogDriver:
    return live(DrawnCommands, pick, steps)


@given(st.data())
@settings(
    # An example is a whole life, and takes as long as ten of others do.
    max_examples=examples(0.12),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_no_sequence_of_commands_breaks_the_catalog(data: st.DataObject) -> None:
    """Invariants, whole groups, events that read back, refusals that change nothing: see `CatalogDriver.say`."""
    world = run(lambda choices: data.draw(st.sampled_from(choices)), STEPS)
    assert world.replay() == world.catalog


FIRST = {1, 4, 5, 6, 33}
"""Seeds that together took every transition when last looked for; the others are run where they do not any more."""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """The moves that were made, of all tables."""
    made: set[tuple[str, str]] = set()

    def recording(table: dict, state: object, what: object) -> object:  # type: ignore[type-arg]
        made.add((repr(state), repr(what)))
        return transition(table, state, what)

    for module in (availability, membership, rounds, admin):
        monkeypatch.setattr(module, "transition", recording)
    monkeypatch.setattr(availability, "VERSIONS_KEPT_MAX", 2)
    return made


@pytest.mark.parametrize("to_the_end", ONCE_ALL_WAS_SEEN_AND_SLOWLY_ALL)
def test_seeded_runs_take_every_transition_of_the_tables(taken: set[tuple[str, str]], to_the_end: bool) -> None:  # noqa: FBT001
    """What no run takes is either dead, and should go from the table, or not tested."""
    tables = (SHARD_TRANSITIONS, VERSION_TRANSITIONS, ROUND_TRANSITIONS, AGENT_TRANSITIONS)
    every = {(repr(state), repr(what)) for table in tables for state, what in table}
    for seed in sorted(range(SEEDED_RUNS), key=lambda seed: seed not in FIRST):
        if seed < RULED_RUNS:
            live(DrawnRulings, random.Random(seed).choice, SEEDED_STEPS)
        run(random.Random(seed).choice, SEEDED_STEPS)
        if every <= taken and not to_the_end:
            break
    assert every - taken == set()
    assert taken - every == set()


@pytest.mark.parametrize("seed", range(4))
def test_two_folders_of_one_log_hold_equal_catalogs(seed: int) -> None:
    """One folds the commands as they were made, the other what a registry reads out of the log."""
    world = run(random.Random(1000 + seed).choice, SEEDED_STEPS)
    assert world.replay() == world.catalog
    catalog = Catalog(JOB, level=NEWEST_LEVEL)
    events: list[Event] = []
    for seq, time, command in world.log:
        read = command if isinstance(command, Unreadable) else recoded(command, catalog.level)
        if read != command:
            # What a sender counts beyond all bounds is no command; the catalog refuses it as well.
            assert isinstance(read, Unreadable)
            assert "out of range" in read.reason
            read = command
        events.extend(apply(catalog, seq, time, read))
    assert catalog == world.catalog
    assert events == world.events


@pytest.mark.parametrize("seed", range(20))
def test_no_state_is_a_trap(seed: int) -> None:
    """Wherever chance has led, honest words lead out of it: every call ends, and a new version reaches all replicas."""
    world = run(random.Random(2000 + seed).choice, SEEDED_STEPS)
    world.skip(SEEDED_STEPS * 10)
    end_all_calls(world)
    stand_all_shards(world)
    last = world.catalog.models[MODEL].last
    spent = any(agent.incarnation >= VERSION_MAX for agent in world.catalog.agents.values())
    if spent or (last is not None and last >= VERSION_MAX - 1):
        # Chance has used up all numbers, of versions or of an agent that is lost and can't return.
        return
    assert isinstance(world.publish("trainer", None)[0], VersionPublished)
    for replica in ("engine", "copy"):
        assert isinstance(world.fetch(replica)[-1], ReplicaReady)
        assert world.replica(replica).version == world.catalog.models[MODEL].last


def end_all_calls(world: CatalogDriver) -> None:
    """Let every shard of a live agent take back what it waits for, and give up what it holds."""
    for agent in world.catalog.agents:
        if world.catalog.agents[agent].state is AgentState.LOST:
            world.join(agent)
    model = world.catalog.models.get(MODEL)
    for replica in list(model.replicas.values()) if model is not None else []:
        for index in list(replica.members):
            if index in replica.offers:
                world.withdraw(replica.name, index)
            if replica.round is not None and index in replica.round.wants:
                world.give_up(replica.name, index)
            if replica.members[index].state is ShardState.READY:
                world.unpublish(replica.name, index)
            if replica.members[index].state is ShardState.DRAINING:
                world.drained(replica.name, index)
        assert world.states(replica.name) == ["empty"] * len(replica.members)
        assert (replica.round, replica.offers) == (None, {})


def stand_all_shards(world: CatalogDriver) -> None:
    """Release what stands and register every replica anew."""
    model = world.catalog.models.get(MODEL)
    for replica in list(model.replicas.values()) if model is not None else []:
        for index in list(replica.members):
            world.release(replica.name, index)
    for name, shards in SHARDS.items():
        world.replica_of(name, *AGENTS[:shards])
