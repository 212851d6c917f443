"""Whatever is said to the catalog, in whatever order: what must always hold, of retention too."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples_of import examples

from tensorhub_common.catalog import availability, retention
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
from tensorhub_common.protocol.log.events import Event, ReplicaReady, VersionPublished, kind_of
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL
from tensorhub_common.protocol.plans import PlanRequest
from tensorhub_planner.catalog_view.catalog_replica import unchanged_holders
from tensorhub_planner.catalog_view.holders import Candidates, HoldersCache, find_candidates
from tensorhub_simulator.drivers.catalog import JOB, MODEL, CatalogDriver, recoded
from tensorhub_simulator.drivers.catalog_commands import AGENTS, SHARDS, DrawnCommands, DrawnRulings, Pick
from tensorhub_simulator.drivers.event_watcher import EventWatcher
from tensorhub_simulator.faultsim.invariants.retention import RetentionRule

STEPS = 60
SEEDED_RUNS = 150
SEEDED_STEPS = 300
RULED_RUNS = 10
"""So many lives in which users rule too: what is rewound is retired while it can be read."""

once_all_was_seen_and_slowly_all = pytest.mark.parametrize(
    "to_the_end", [pytest.param(False, id="once-all-was-seen"), pytest.param(True, id="all", marks=pytest.mark.slow)]
)
"""For tests of what seeded lives come to: the default suite ends when that is all of it, the slow ones live each."""


def live(kind: type[DrawnCommands], pick: Pick, steps: int) -> CatalogDriver:
    """Send so many commands by chance; the driver, the watcher of events and the rule of retention check after each.

    No round waits that could be decided, so looking at all that wait once more finds nothing to decide.
    """
    world, watcher, rule = CatalogDriver(), EventWatcher(), RetentionRule()
    chance = kind(world, pick)
    for _ in range(steps):
        command = chance.command()
        events = world.say(command)
        rule.see(world.catalog, command, events)
        watcher.see(events)
        watcher.check(world.catalog)
        undecided: list[Event] = []
        for model in world.catalog.models.values():
            rounds.decide_waiting_rounds(world.catalog, model, undecided)
        assert undecided == []
    return world


def run(pick: Pick, steps: int) -> CatalogDriver:
    return live(DrawnCommands, pick, steps)


def ruled(seed: int) -> CatalogDriver:
    return live(DrawnRulings, random.Random(seed).choice, SEEDED_STEPS)


@pytest.mark.parametrize("kind", [DrawnCommands, DrawnRulings])
@given(st.data())
# An example is a whole life, and takes as long as ten of others do.
@settings(max_examples=examples(0.12), suppress_health_check=[HealthCheck.data_too_large])
def test_no_sequence_of_commands_breaks_the_catalog(kind: type[DrawnCommands], data: st.DataObject) -> None:
    """Whole groups, events that read back, refusals that change nothing; no orderly act takes a last copy."""
    world = live(kind, lambda choices: data.draw(st.sampled_from(choices)), STEPS)
    assert world.replay() == world.catalog


FIRST = {1, 4, 5, 6, 33}
"""Seeds that together took every transition when last looked for; the others are run where they do not any more."""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    made: set[tuple[str, str]] = set()

    def recording(table: dict, state: object, what: object) -> object:  # type: ignore[type-arg]
        made.add((repr(state), repr(what)))
        return transition(table, state, what)

    for module in (availability, membership, rounds, admin):
        monkeypatch.setattr(module, "transition", recording)
    monkeypatch.setattr(availability, "VERSIONS_KEPT_MAX", 2)
    return made


@once_all_was_seen_and_slowly_all
def test_seeded_runs_take_every_transition_of_the_tables(taken: set[tuple[str, str]], to_the_end: bool) -> None:  # noqa: FBT001
    """What no run takes is either dead, and should go from the table, or not tested."""
    tables = (SHARD_TRANSITIONS, VERSION_TRANSITIONS, ROUND_TRANSITIONS, AGENT_TRANSITIONS)
    every = {(repr(state), repr(what)) for table in tables for state, what in table}
    for seed in sorted(range(SEEDED_RUNS), key=lambda seed: seed not in FIRST):
        if seed < RULED_RUNS:
            ruled(seed)
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
    model = world.catalog.models.get(MODEL)
    for replica in list(model.replicas.values()) if model is not None else []:
        for index in list(replica.members):
            world.release(replica.name, index)
    for name, shards in SHARDS.items():
        world.replica_of(name, *AGENTS[:shards])


RETAINED = {
    *("unpublish.held", "shard.stays", "version.pinned", "version.unpinned", "version.kept", "version.exposed"),
    *("model.retention", "model.rewound", "copy.placed", "job.quota", "agent.draining", "agent.drained"),
    *("round.overtaken", "hold.stated", "hold.ended"),
}


@pytest.mark.long
@once_all_was_seen_and_slowly_all
def test_seeded_lives_come_to_everything_that_retention_does(to_the_end: bool) -> None:  # noqa: FBT001
    """What no life comes to is not tested."""
    seen: set[str] = set()
    for seed in range(SEEDED_RUNS):
        world = ruled(seed)
        assert world.replay() == world.catalog
        seen.update(kind_of(event) for event in world.events)
        if seen >= RETAINED and not to_the_end:
            break
    assert RETAINED - seen == set()


def _counts_spot(_catalog: object, replica: Any, version: int) -> bool:
    return bool(replica.version == version)


def _counts_draining(_catalog: object, replica: Any, version: int) -> bool:
    members = list(replica.members.values())
    whole = len(members) == replica.shards
    return whole and not replica.spot and all(shard.version == version for shard in members)


def live_all(seeds: Iterable[int]) -> None:
    for seed in seeds:
        ruled(seed)


@pytest.mark.parametrize(("wrong", "found_by"), [(_counts_spot, 4), (_counts_draining, 125)])
def test_the_watcher_finds_what_counts_and_should_not(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., bool], found_by: int
) -> None:
    """A copy on spot, or one that drains, is taken for one that counts. The seed that found it last is tried first."""
    monkeypatch.setattr(retention, "counts_as_copy", wrong)
    with pytest.raises(AssertionError, match=r"took the last copy|is held back"):
        live_all((found_by, *range(2 * SEEDED_RUNS)))


def demands(catalog: Catalog) -> list[PlanRequest]:
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


def rolls_kept(seed: int) -> int:
    """Compare after each command of a random life; return how many rolls outlived one."""
    world = CatalogDriver()
    chance = DrawnCommands(world, random.Random(seed).choice)
    rolls: HoldersCache = {}
    kept = 0
    for _ in range(SEEDED_STEPS):
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
    assert sum(rolls_kept(seed) for seed in range(8)) >= 8
