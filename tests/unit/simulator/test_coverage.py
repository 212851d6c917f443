"""Transitions are counted where production makes them, and a move that no table has is told."""

from tensorhub_agent.core.shard_state import MemoryState, ShardContents
from tensorhub_common.catalog import availability
from tensorhub_common.catalog.transitions import ShardState, ShardTransition, transition
from tensorhub_simulator.faultsim.runner.transitions import UNREACHABLE, counted


def test_a_move_of_a_table_is_counted_by_its_state_and_what_happened() -> None:
    with counted() as tallies:
        transition(vars(availability)["SHARD_TRANSITIONS"], ShardState.EMPTY, ShardTransition.PUBLISHED)
    assert tallies["shard"].made[ShardState.EMPTY, ShardTransition.PUBLISHED] == 1
    assert "empty published" not in tallies["shard"].missing()
    assert "ready unpublished" in tallies["shard"].missing()


def test_a_change_of_an_attribute_is_counted_and_the_object_is_what_it_was() -> None:
    with counted() as tallies:
        held = ShardContents()
        held.memory = MemoryState.FILLING
        held.memory = MemoryState.FILLING
        held.memory = MemoryState.DRAINING
    assert held.memory is MemoryState.DRAINING
    assert dict(tallies["memory"].made) == {("empty", "filling"): 1, ("filling", "draining"): 1}
    assert tallies["memory"].wrong() == ["filling draining"], "no table has this"


def test_what_is_out_of_reach_is_not_missed_and_is_wrong_when_it_happens() -> None:
    (name, reach), _ = next(iter(UNREACHABLE.items()))
    with counted() as tallies:
        tally = tallies[name]
        assert " ".join(reach) not in tally.missing()
        tally.made[reach] += 1
        assert tally.wrong() == [" ".join(reach)]


def test_counts_of_several_processes_are_added() -> None:
    with counted() as one:
        transition(vars(availability)["SHARD_TRANSITIONS"], ShardState.EMPTY, ShardTransition.PUBLISHED)
    with counted() as other:
        transition(vars(availability)["SHARD_TRANSITIONS"], ShardState.EMPTY, ShardTransition.PUBLISHED)
    one["shard"].add(other["shard"])
    assert one["shard"].made.total() == 2
