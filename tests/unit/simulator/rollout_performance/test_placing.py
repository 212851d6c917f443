"""Placements for comparison: in turns, and one response of each group first."""

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.view import FleetView, InstanceView, PlaceAction
from tensorhub_simulator.rollout_performance.systems.in_turns import in_turns
from tensorhub_simulator.rollout_performance.systems.seer import ProbesFirst

REQUESTS = tuple(RequestId(1, number) for number in range(6))


def view(waiting: tuple[RequestId, ...], *sizes: int) -> FleetView:
    """Instances with two slots, and what they run."""
    runners = tuple(
        InstanceView(f"r{number}", 2, (), tuple(RequestId(9, number * 10 + each) for each in range(size)))
        for number, size in enumerate(sizes)
    )
    return FleetView(waiting, runners, 1)


def test_turns_give_each_instance_equally_many_beyond_its_slots() -> None:
    found = [each.runner for each in in_turns(view(REQUESTS, 1, 0)) if isinstance(each, PlaceAction)]
    assert found == ["r1", "r0", "r1", "r0", "r1", "r0"]
    assert in_turns(view(REQUESTS)) == []


def test_one_of_each_group_is_placed_before_the_longest_as_far_as_there_are_slots() -> None:
    """Two groups of three: their first ones, then what is expected to be longer, of the second group."""
    seer = ProbesFirst(3, lambda of: float(of.index))
    found = [
        (each.request.index, each.runner)
        for each in seer.actions(view(REQUESTS, 0, 0))
        if isinstance(each, PlaceAction)
    ]
    assert [index for index, _ in found] == [0, 3, 5, 4]
    assert sorted(runner for _, runner in found) == ["r0", "r0", "r1", "r1"]
    later = [each.request.index for each in seer.actions(view(REQUESTS[:3], 1, 2)) if isinstance(each, PlaceAction)]
    assert later == [2], "its group was begun, and there is one slot"
