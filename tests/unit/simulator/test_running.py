"""The fault simulator itself: one seed is one history, its bugs are found, and nothing of them stays behind."""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from tools.docs.simulator_page import PAGE, listed, table

from tensorhub_agent.core.operations.drain import DrainOperation
from tensorhub_agent.core.shard_state import MemoryState, ShardContents
from tensorhub_common.catalog import availability
from tensorhub_common.catalog.transitions import ShardState, ShardTransition, transition
from tensorhub_common.layout import layout
from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.events import ShardReleased
from tensorhub_simulator.__main__ import FINDING_SEEDS
from tensorhub_simulator.engine.clock import Clock, Node
from tensorhub_simulator.engine.streams import Streams
from tensorhub_simulator.faultsim.drawing import CROWD_READERS, draw_config, is_crowd
from tensorhub_simulator.faultsim.faults.all_faults import ALL
from tensorhub_simulator.faultsim.faults.injector import Fault, Injector
from tensorhub_simulator.faultsim.models.job_log import Follower, JobLogModel, WrongLast
from tensorhub_simulator.faultsim.mutants import agent
from tensorhub_simulator.faultsim.mutants.planting import BUGS, planted
from tensorhub_simulator.faultsim.mutants.replacement import Owner, Replacement
from tensorhub_simulator.faultsim.runner.parallel import CHUNK_SEEDS, processes_here, spread
from tensorhub_simulator.faultsim.runner.report import Finding
from tensorhub_simulator.faultsim.runner.run import MUTANTS, Totals, run, scaled_down
from tensorhub_simulator.faultsim.runner.transitions import UNREACHABLE, counted
from tensorhub_simulator.faultsim.world import World

# ------------------------------------------------------------------------------------------------------------- seeds


def test_some_seeds_keep_all_invariants_and_one_seed_gives_one_history() -> None:
    totals, again, other = Totals(), Totals(), Totals()
    with counted() as tables:
        assert run(range(1, 7), totals) is None
    assert totals.seeds == 6
    assert totals.counts["reads"] > 0
    assert totals.counts["patched"] > 0
    assert not tables["agent"].missing()
    run([3], again)
    run([3], other)
    assert (again.steps, again.counts) == (other.steps, other.counts)


def test_a_stream_depends_on_the_seed_and_its_name_alone() -> None:
    one, same, other = Streams(1).of("a", 2), Streams(1).of("a", 2), Streams(1).of("a", 3)
    other.random()
    assert [one.random() for _ in range(3)] == [same.random() for _ in range(3)]
    names = (("a", "b"), ("b", "a"), ("a", "c"))
    assert len({Streams(seed).of(*each).random() for seed in (1, 2) for each in names}) == 6


@pytest.mark.long
def test_a_new_fault_changes_no_seed_in_which_it_does_not_strike() -> None:

    def transcript(faults: Sequence[Fault]) -> list[str]:
        with scaled_down():
            world = World(3, draw_config(3, calm=False), steps=True, faults=faults)
            world.run()
        assert world.config.troubles > 0
        return list(world.transcript)

    def strike(faults: Injector, rng: Random) -> None:
        rng.choice(list(faults.processes.agents.values())).kill()

    before = transcript(ALL)
    assert transcript((Fault("new", 0.0, strike), *ALL)) == before
    assert transcript((*ALL, Fault("new", 1.0, strike))) != before


@pytest.mark.long
def test_a_crowd_of_readers_gets_its_version_though_the_holder_is_stopped() -> None:
    totals = Totals()
    assert is_crowd(25)
    assert run([25], totals) is None
    assert totals.counts["reads"] >= min(CROWD_READERS)
    assert totals.counts["faults: stops"] == 1
    assert not totals.group("raised")


@pytest.mark.long
def test_of_seeds_on_several_cores_the_lowest_that_fails_is_told() -> None:
    # Several of these seeds fail, so which one is told is not by chance of who ends first.
    seeds = range(1, 2 * CHUNK_SEEDS + 1)
    with planted("no-drain"):
        alone = run(seeds, Totals())
    result = spread(seeds, bug="no-drain", calm=False, processes=2, title="seeds")
    assert alone is not None
    assert result.failure is not None
    assert (result.failure.seed, result.failure.what) == (alone.seed, alone.what)


@pytest.mark.slow
def test_totals_and_transitions_are_those_of_all_seeds() -> None:
    seeds = range(1, CHUNK_SEEDS + 3)
    totals = Totals()
    assert run(seeds, totals) is None
    result = spread(seeds, bug=None, calm=False, processes=2, title="seeds")
    assert result.failure is None
    assert (result.totals.steps, result.totals.counts) == (totals.steps, totals.counts)
    assert result.tallies["agent"].made.total() > 0


# -------------------------------------------------------------------------------------------------------------- bugs

SOON_FOUND = {
    "digests-of-the-next": 7,
    "filled-forgotten": 4,
    "no-drain": 1,
    "outcome-twice": 20,
    "patch-not-judged": 7,
    "place-kept": 25,
    "unpublish-forgotten": 6,
}
"""Some of the bugs, of reads, a drain and a registry, and the seeds that found them when last looked for."""


@pytest.mark.parametrize("name", SOON_FOUND)
def test_a_planted_bug_is_found_and_nothing_of_it_stays_behind(name: str) -> None:
    """What a seed shows changes with the code, so others are tried after it; `make bugs` looks for every bug."""
    before = DrainOperation.on_event, layout.PIECE_BYTES_MAX
    with planted(name):
        failure = run([SOON_FOUND[name], *range(1, 101)], Totals())
    assert failure is not None, f"100 seeds did not find {name}"
    assert failure.story
    assert (DrainOperation.on_event, layout.PIECE_BYTES_MAX) == before


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", BUGS)
def test_each_planted_bug_is_found(name: str) -> None:
    result = spread(range(1, FINDING_SEEDS + 1), bug=name, calm=False, processes=processes_here(), title=name)
    assert result.failure is not None, f"{FINDING_SEEDS} seeds did not find {name}"
    assert result.failure.story


@pytest.mark.parametrize("name", BUGS)
def test_what_a_bug_replaces_exists(name: str) -> None:
    """Code that is renamed leaves no bug behind that replaces nothing: `planted` raises then."""

    def of(owner: Owner, name: Any) -> Any:
        return owner[name] if isinstance(owner, dict) else vars(owner)[name]

    replaced = [(*place, each.right) for each in BUGS[name]() for place in each.places()]
    assert len(replaced) >= len(BUGS[name]())
    with planted(name):
        assert all(of(owner, where) is not right for owner, where, right in replaced)
    assert all(of(owner, where) is right for owner, where, right in replaced)


def test_a_bug_that_names_what_is_not_there_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own error would be taken for a broken invariant, so the run ends with it."""
    scope: dict[str, Any] = {}
    exec(compile("def stale(self, *_): self.core.renamed_since()", f"{MUTANTS}/stale.py", "exec"), scope)  # noqa: S102 (a bug like the others, by its file)
    monkeypatch.setitem(BUGS, "stale", lambda: [Replacement(DrainOperation.on_event, scope["stale"])])
    with planted("stale"), pytest.raises(AttributeError, match="renamed_since"):
        run(range(1, 9), Totals())


@pytest.mark.long
def test_a_patch_for_other_bytes_is_found_by_the_digest_and_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every source gives the last delta that it has, from whatever version that leads; seeds are tried until it did.

    The first is the one that did when last looked for.
    """
    for each in agent.patch_from_another_version():
        for owner, name in each.places():
            monkeypatch.setattr(owner, name, each.wrong)
    totals = Totals()
    for seed in (37, *range(1, 121)):
        assert run([seed], totals) is None
        if totals.counts["mispatched"]:
            break
    assert totals.counts["mispatched"] > 0


def test_the_page_has_a_row_for_each_bug_and_each_was_found() -> None:
    """docs/design/simulator.md."""
    assert listed() == list(BUGS), "look for each again: python -m tensorhub_simulator --bugs --docs"
    assert "| never |" not in PAGE.read_text(encoding="utf-8")
    row = "| `no-drain` | Unpublish neither waits for the readers nor breaks their leases. | 3 | exact version |"
    assert row in table([Finding("no-drain", 3, "exact version")])


# ------------------------------------------------------------------------------------------------------- transitions


def test_transitions_are_counted_and_a_move_that_no_table_has_or_can_reach_is_told() -> None:
    def publish() -> None:
        transition(vars(availability)["SHARD_TRANSITIONS"], ShardState.EMPTY, ShardTransition.PUBLISHED)

    with counted() as tallies:
        publish()
        held = ShardContents()
        held.memory = MemoryState.FILLING
        held.memory = MemoryState.FILLING
        held.memory = MemoryState.DRAINING
    assert held.memory is MemoryState.DRAINING
    assert tallies["shard"].made[ShardState.EMPTY, ShardTransition.PUBLISHED] == 1
    missing = tallies["shard"].missing()
    assert ("empty published" in missing, "ready unpublished" in missing) == (False, True)
    assert dict(tallies["memory"].made) == {("empty", "filling"): 1, ("filling", "draining"): 1}
    assert tallies["memory"].wrong() == ["filling draining"]
    (name, reach), _ = next(iter(UNREACHABLE.items()))
    with counted() as other:
        publish()
        assert " ".join(reach) not in other[name].missing()
        other[name].made[reach] += 1
        assert other[name].wrong() == [" ".join(reach)]
    before = tallies["shard"].made.total()
    tallies["shard"].add(other["shard"])
    assert tallies["shard"].made.total() == before + other["shard"].made.total()


# ---------------------------------------------------------------------------------------------------- the modelled log


def test_the_modelled_log_keeps_one_order_knows_ids_for_a_while_and_refuses_a_stale_publisher() -> None:
    event = encode(ShardReleased(model="m", replica="r", shard=0, cmd=1, i=1, k=1))
    clock = Clock()
    log = JobLogModel(clock, 2.0, Node("nats", Random(1)))
    reader = Node("reader", Random(2))
    reader.up = True
    seen: list[int] = []
    Follower(log, reader, 0, lambda entry: seen.append(entry.seq), events=False)
    reader.state.paused = True
    assert log.append("t.v1.j.cmd.x", b"{}", "id") == log.append("t.v1.j.cmd.x", b"{}", "id") == 1
    assert log.append("t.v1.j.event.m.shard.released", event, "a", 0) == 2
    assert log.append("t.v1.j.event.m.shard.released", event, "a", 0) == 2, "its own answer got lost"
    with pytest.raises(WrongLast):
        log.append("t.v1.j.event.m.shard.released", event, "b", 0)
    clock.now = 3.0
    assert log.append("t.v1.j.cmd.x", b"{}", "id") == 3
    while clock.step():
        pass
    assert seen == []
    clock.resume(reader)
    while clock.step():
        pass
    assert seen == [1, 2, 3]
