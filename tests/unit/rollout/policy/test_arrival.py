"""The policy `arrival`: where requests go, which of them wait for a version, and what moves."""

import itertools
import math
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.arrival import CANDIDATES, COMPARED_MAX, Arrival, ArrivalLimits, Held
from tensorhub_rollout.policy.fleet_loads import AssessmentLimits
from tensorhub_rollout.policy.lengths import Knowledge, LengthEstimate
from tensorhub_rollout.policy.moving import MoveLimits
from tensorhub_rollout.policy.plateau import StepModel
from tensorhub_rollout.policy.request_facts import Facts, RequestFacts
from tensorhub_rollout.policy.view import FleetView, InstanceView, MoveAction, PlaceAction, ReleaseAction

STEPS = StepModel(0.005, 1e-4, 0.0)
LIMITS = ArrivalLimits()


def of(index: int) -> RequestId:
    return RequestId(3, index)


def instance(runner: str, executing: tuple[int, ...] = (), **more: object) -> InstanceView:
    known: dict[str, object] = {"slots": 64, "pending": ()}
    return InstanceView(runner=runner, executing=tuple(map(of, executing)), **(known | more))  # type: ignore[arg-type] # of these names


def view(waiting: int | tuple[int, ...], *instances: InstanceView, **more: object) -> FleetView:
    indices = range(waiting) if isinstance(waiting, int) else waiting
    return FleetView(tuple(map(of, indices)), instances, 1, **more)  # type: ignore[arg-type] # of these names


def facts(
    lengths: Mapping[int, int],
    steps: StepModel | None = STEPS,
    made: Mapping[int, int] | None = None,
    runners: tuple[str, ...] = ("a", "b", "c", "d"),
) -> Facts:
    """Return what is known where lengths are sure."""
    has = made or {}

    def of_one(request: RequestId) -> RequestFacts:
        made = has.get(request.index, 0)
        length = LengthEstimate(math.log(lengths.get(request.index, 100)), 1e-6, made, Knowledge.JOB)
        return RequestFacts(length, made)

    return Facts({} if steps is None else dict.fromkeys(runners, steps), of_one)


def changed(known: Facts, change: Callable[[RequestId, RequestFacts], RequestFacts]) -> Facts:
    """Return the same, but for what is known of each request."""
    return replace(known, of=lambda request: change(request, known.of(request)))


def noted(known: Facts, asked: list[int]) -> Facts:
    """Return the same, and note of which requests it is asked for."""

    def note(request: RequestId, found: RequestFacts) -> RequestFacts:
        asked.append(request.index)
        return found

    return changed(known, note)


def placed(seen: FleetView, known: Facts, limits: ArrivalLimits = LIMITS, now: float = 0.0) -> dict[int, str]:
    actions = Arrival(limits).look(seen, known, now)
    return {each.request.index: each.runner for each in actions if isinstance(each, PlaceAction)}


# ---------------------------------------------------------------------------------------------- placing


def test_the_longest_goes_first_and_each_where_all_is_done_soonest() -> None:
    where = placed(view(4, instance("a"), instance("b")), facts({0: 100, 1: 400, 2: 300, 3: 150}))
    # Beside 400 tokens on a, which take 400 steps, there are 300 steps on b for all others.
    assert where == {1: "a", 2: "b", 3: "b", 0: "b"}
    busy = StepModel(0.0, 1e-4, 0.0)
    where = placed(view(4, instance("a"), instance("b")), facts({0: 100, 1: 400, 2: 300, 3: 150}, busy))
    # Where steps are as long as they have requests: 500 on one, 450 on the other.
    assert where == {1: "a", 2: "b", 3: "b", 0: "a"}


def test_what_runs_already_counts() -> None:
    seen = view((5,), instance("a", (0, 1)), instance("b"))
    assert placed(seen, facts({0: 900, 1: 900, 5: 10})) == {5: "b"}


def test_no_more_than_the_slots_and_the_pending_ones_are_placed() -> None:
    seen = view(40, instance("a", slots=5), instance("b", pending=tuple(map(of, range(100, 110)))))
    where = placed(seen, facts({}))
    assert sum(runner == "a" for runner in where.values()) == 5
    assert sum(runner == "b" for runner in where.values()) == LIMITS.pending_max - 10


def test_in_a_fleet_of_which_some_are_compared_equal_requests_go_one_to_each_instance() -> None:
    names = tuple(f"r{number:02}" for number in range(5 * CANDIDATES))
    where = placed(view(len(names), *map(instance, names)), facts({}, runners=names))
    assert sorted(where.values()) == [*names]


def test_a_look_compares_some_instances_of_a_large_fleet_and_the_next_look_others() -> None:
    names = tuple(f"r{number:04}" for number in range(COMPARED_MAX + 10))
    room = names[-5]
    fleet = [instance(name, slots=1 if name == room else 0) for name in names]
    policy, known = Arrival(LIMITS), facts({}, runners=names)
    found = [policy.look(view(1, *fleet), known, 0.02 * number) for number in range(2)]
    assert [[each.runner for each in actions if isinstance(each, PlaceAction)] for actions in found] == [[], [room]]
    # What is for one version alone is looked for everywhere at once.
    fleet[-5] = instance(room, slots=1, version=1, version_wanted=1)
    pinned = view(1, *fleet, pinned={of(0): 1}, demand={1: 1}, newest=2)
    assert placed(pinned, known) == {0: room}


def test_a_higher_priority_and_what_has_begun_come_first() -> None:
    known = facts({0: 900, 1: 10, 2: 20}, made={2: 5})
    urgent = changed(known, lambda request, each: each._replace(priority=int(request.index == 1)))
    seen = view(3, instance("a", slots=1))
    assert placed(seen, urgent) == {1: "a"}
    assert placed(seen, known) == {2: "a"}


def test_where_more_wait_than_there_are_slots_the_first_of_a_group_tells_of_the_others() -> None:
    # Two groups of three, of which nothing is known; what is known of the third lets expect short responses.
    lengths = {**dict.fromkeys(range(6), 100), **dict.fromkeys((6, 7, 8), 10)}
    groups = changed(facts(lengths), lambda request, each: each._replace(is_first=request.index % 3 == 0))
    finished = Knowledge.FINISHED
    own = changed(groups, lambda _, each: each._replace(length=replace(each.length, knowledge=finished)))
    few = view(9, instance("a", slots=2))
    assert placed(few, groups) == {0: "a", 3: "a"}
    assert placed(few, own) == {0: "a", 1: "a"}
    # Where all but a few have a slot soon, the longest go first.
    many = replace(few, instances=(instance("a", slots=9, pending=tuple(map(of, range(20, 27)))),))
    assert placed(many, groups) == {0: "a", 1: "a"}


def test_siblings_are_put_in_order_once_more_as_their_first_ends() -> None:
    lengths, known = dict.fromkeys(range(51), 100), Knowledge.JOB
    policy, there = Arrival(LIMITS), instance("a", (50,), slots=1)
    seen = changed(
        facts(lengths, runners=("a",)),
        lambda request, each: RequestFacts(replace(each.length, knowledge=known), is_first=request.index % 20 == 0),
    )
    assert policy.look(view(40, there), seen, 0.0) == ()
    # The first of the second group has come to 900 tokens, so that its siblings are expected to.
    lengths |= dict.fromkeys(range(21, 40), 900)
    known = Knowledge.FINISHED
    siblings = (*range(1, 20), *range(21, 40))
    for number in range(3):
        # Each time that something begins some of those that wait are put in order.
        found = policy.look(view(siblings, instance("a", slots=1)), seen, 1.0 + number)
    assert [each.request.index for each in found] == [21]


def test_what_is_for_one_version_alone_goes_where_that_is() -> None:
    seen = view(
        (0, 1),
        instance("a", version=2, version_wanted="newest"),
        instance("b", version=1, version_wanted=1),
        pinned={of(0): 1},
        demand={1: 1, None: 1},
        newest=2,
    )
    assert placed(seen, facts({0: 10, 1: 10})) == {0: "b", 1: "a"}


def test_one_that_may_kill_its_instance_is_placed_alone() -> None:
    alone = frozenset({of(0)})
    busy = instance("a", pending=(of(9),))
    assert placed(view((0,), busy, alone=alone), facts({})) == {}
    # And nothing else goes where it waits to begin.
    assert placed(view((0, 1), busy, alone=alone), facts({0: 200})) == {}
    assert placed(view((0, 1), instance("a", slots=2), alone=alone), facts({0: 200})) == {0: "a"}


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(2, 3))
def test_all_is_done_within_four_thirds_of_the_optimum(lengths: list[int], count: int) -> None:
    """LPT (Graham 1969), where only the sum of the lengths counts."""
    steps = StepModel(0.0, 1.0, 0.0)
    runners = tuple("abc"[:count])
    where = placed(view(len(lengths), *map(instance, runners)), facts(dict(enumerate(lengths)), steps, runners=runners))
    assert len(where) == len(lengths)

    def longest(of_each: tuple[str, ...]) -> int:
        return max(sum(length for length, at in zip(lengths, of_each, strict=True) if at == name) for name in runners)

    best = min(map(longest, itertools.product(runners, repeat=len(lengths))))
    found = longest(tuple(where[index] for index in range(len(lengths))))
    assert found <= best * (4 / 3 - 1 / (3 * count)) + 1e-6


# ---------------------------------------------------------------------------------------------- admission


def arriving(runner: str, arrives_in_s: float | None) -> InstanceView:
    return instance(runner, version=1, may_start=False, arrives_in_s=arrives_in_s)


def test_requests_wait_for_a_version_that_comes_soon_and_others_begin_where_it_is() -> None:
    seen = view(8, instance("a", version=2), arriving("b", 0.05), newest=2)
    where = placed(seen, facts(dict.fromkeys(range(8), 200)))
    # Each takes 0.02 s beside 1 s, and b begins 0.05 s later: 5 are here what 3 are there.
    assert where == dict.fromkeys((0, 1, 2, 4, 6), "a")


def test_what_waits_is_told_for_which_instance_and_for_how_long() -> None:
    seen = view(8, instance("a", version=2), arriving("b", 0.05), newest=2)
    known = facts(dict.fromkeys(range(8), 200))
    policy = Arrival(LIMITS)
    policy.look(seen, known, 7.0)
    assert dict(policy.held) == {of(index): Held(7.0, "b", 0.05) for index in (3, 5, 7)}
    # Since when it waits stays, while what it waits for comes nearer.
    later = view((3,), instance("a", tuple(range(10, 20)), version=2), arriving("b", 0.02), newest=2)
    policy.look(later, known, 7.5)
    assert dict(policy.held) == {of(3): Held(7.0, "b", 0.02)}


def test_a_reason_names_no_time_before_steps_are_measured() -> None:
    reasons = {}
    for is_measured, known in ((True, facts({0: 200})), (False, facts({0: 200}, None))):
        (action,) = Arrival(LIMITS).look(view(1, instance("a")), known, 0.0)
        assert isinstance(action, PlaceAction)
        reasons[is_measured] = action.reason
    assert reasons == {
        True: "about 200 tokens: of the instances with room a is done soonest with it, in 1.0 s",
        False: "about 200 tokens: of the instances with room a has the least to do (no steps are measured yet)",
    }


def test_one_that_no_instance_could_take_is_held_for_none() -> None:
    seen = view((0,), instance("a", version=2), pinned={of(0): 1}, newest=2)
    policy = Arrival(LIMITS)
    policy.look(seen, facts({}), 7.0)
    assert dict(policy.held) == {}


def test_none_waits_for_a_version_that_comes_late_or_at_no_known_time() -> None:
    for arrives_in_s in (60.0, None):
        seen = view(8, instance("a", version=2), arriving("b", arrives_in_s), newest=2)
        assert len(placed(seen, facts(dict.fromkeys(range(8), 200)))) == 8


def test_with_the_term_off_nothing_waits_and_nothing_goes_where_it_may_not_run() -> None:
    seen = view(8, instance("a", version=2), arriving("b", 0.05), newest=2)
    limits = ArrivalLimits(admits_by_arrival=False)
    assert placed(seen, facts(dict.fromkeys(range(8), 200)), limits) == dict.fromkeys(range(8), "a")


def test_a_request_waits_no_longer_than_the_bound() -> None:
    seen = view(8, instance("a", version=2), arriving("b", 0.05), newest=2)
    # What is on a is looked at whole, however long ago that was.
    policy = Arrival(ArrivalLimits(assessments=AssessmentLimits(assessed_max=64)))
    known = facts(dict.fromkeys(range(8), 200))
    actions = policy.look(seen, known, 0.0)
    left = tuple(each for each in range(8) if of(each) not in {action.request for action in actions})
    assert left
    # b is still about to have it, each time that one looks.
    seen = view(left, instance("a", tuple(range(9, 19)), version=2), arriving("b", 0.01), newest=2)
    actions = policy.look(seen, known, LIMITS.hold_s_max - 1)
    assert actions == ()
    actions = policy.look(seen, known, LIMITS.hold_s_max + 1)
    assert {each.request.index for each in actions} == set(left)


def test_what_waits_does_not_count_again_at_each_look() -> None:
    known, policy = facts(dict.fromkeys(range(8), 200)), Arrival(LIMITS)
    seen = view(8, instance("a", version=2, slots=0), instance("c", slots=1), arriving("b", 0.3), newest=2)
    loads = []
    for now in (0.0, 0.02, 0.04):
        policy.look(seen, known, now)
        loads.append(policy.loads()["b"].busy_s)
    assert loads == [0.0, 0.0, 0.0]


# ---------------------------------------------------------------------------------------------- moving


def moves(seen: FleetView, known: Facts, limits: ArrivalLimits = LIMITS) -> list[tuple[int, str, str]]:
    actions = Arrival(limits).look(seen, known, 0.0)
    return [(each.request.index, each.source, each.target) for each in actions if isinstance(each, MoveAction)]


def test_a_request_moves_from_the_last_to_the_first_until_nothing_is_won() -> None:
    seen = view((), instance("a", tuple(range(12))), instance("b"))
    known = facts(dict.fromkeys(range(12), 3000))
    # Each is 0.3 s beside 15 s: until both have as many, one is done later than the other by a second and more.
    found = moves(seen, known, ArrivalLimits(moves=MoveLimits(moves_max=64, gap_share_min=0.0)))
    assert {(source, target) for _, source, target in found} == {("a", "b")}
    assert len(found) == 5
    # After one move one is done in 18.3 s and the other in 15.3 s: guesses of lengths differ by as much.
    assert len(moves(seen, known)) == 1
    many = view((), instance("a", tuple(range(40))), instance("b"))
    known = facts(dict.fromkeys(range(40), 3000))
    assert len(moves(many, known)) == LIMITS.moves.moves_max
    assert len(moves(many, known, ArrivalLimits(moves=MoveLimits(moves_max=64)))) == 13


def test_nothing_moves_for_less_than_its_price() -> None:
    made = dict.fromkeys(range(40), 30_000)
    lengths = dict.fromkeys(range(40), 31_000)
    # To compute 30,000 tokens again takes 3 s, more than is won by less beside one another.
    assert moves(view((), instance("a", tuple(range(40))), instance("b")), facts(lengths, made=made)) == []


def test_nothing_moves_with_the_term_off_nor_where_steps_are_not_known() -> None:
    seen = view((), instance("a", tuple(range(40))), instance("b"))
    known = facts(dict.fromkeys(range(40), 3000))
    assert moves(seen, known)
    assert moves(seen, known, ArrivalLimits(migrates=False)) == []
    assert moves(seen, facts(dict.fromkeys(range(40), 3000), steps=None)) == []


def test_nothing_moves_to_where_it_may_not_run() -> None:
    known = facts(dict.fromkeys(range(40), 3000))
    for target in (
        arriving("b", 1.0),
        instance("b", takes_more=False),
        instance("b", slots=0),
        instance("b", is_leaving=True, takes_more=False),
        instance("b", version=1, version_wanted=1),
    ):
        seen = view((), instance("a", tuple(range(40)), version=2), target, demand={1: 1}, newest=2)
        assert moves(seen, known) == []


@given(st.lists(st.integers(10, 4000), min_size=1, max_size=24), st.data())
def test_moves_end_and_none_goes_back(lengths: list[int], data: st.DataObject) -> None:
    where = {index: data.draw(st.sampled_from("abc")) for index in range(len(lengths))}
    known, moved = facts(dict(enumerate(lengths))), 0
    for _ in range(200):
        there = {name: tuple(index for index in where if where[index] == name) for name in "abc"}
        found = moves(view((), *(instance(name, there[name]) for name in "abc")), known)
        if not found:
            break
        for index, source, target in found:
            assert where[index] == source
            where[index] = target
            moved += 1
    else:
        pytest.fail("requests move for ever")
    assert moved <= 2 * len(lengths)


def test_an_instance_that_goes_away_gives_back_the_dearest_first() -> None:
    seen = view((), instance("a", (0, 1, 2), is_leaving=True), instance("b"))
    actions = Arrival(LIMITS).look(seen, facts({}, made={0: 10, 1: 700, 2: 90}), 0.0)
    assert [each.request.index for each in actions if isinstance(each, ReleaseAction)] == [1, 2, 0]


# ---------------------------------------------------------------------------------------------- many looks


def test_all_is_ordered_and_assessed_within_some_looks() -> None:
    count = 3 * LIMITS.ranked_max
    known, policy = facts({}), Arrival(LIMITS)
    runners = tuple(f"r{number}" for number in range(8))
    there = tuple(
        instance(name, tuple(range(1000 * (at + 1), 1000 * (at + 1) + 200)), slots=200)
        for at, name in enumerate(runners)
    )
    for look in range(-(-len(runners) * 200 // LIMITS.assessments.new_max)):
        policy.look(view(count, *there), known, 0.02 * look)
    assert all(policy.loads()[name].busy_s > 0 for name in runners)


# ---------------------------------------------------------------------------------------------- what is due


def due(known: Facts, *indices: int) -> Facts:
    """Return the facts where these were submitted before the trainer's step began."""
    return changed(known, lambda request, each: each._replace(is_due=request.index in indices))


def test_what_is_due_comes_before_longer_responses() -> None:
    seen = view(3, instance("a", slots=1))
    known = facts({0: 900, 1: 10, 2: 20})
    assert placed(seen, known) == {0: "a"}
    assert placed(seen, due(known, 1)) == {1: "a"}


def test_only_what_is_due_moves_and_to_where_it_is_done_first() -> None:
    # Each of the 18 others on a makes a step longer, and each of the 40 on b; c has few.
    seen = view((), instance("a", tuple(range(20))), instance("b", tuple(range(100, 140))), instance("c", (200,)))
    known = facts({**dict.fromkeys(range(20), 2000), **dict.fromkeys(range(100, 140), 4000), 200: 400})
    assert {source for _, source, _ in moves(seen, known)} == {"b"}
    found = moves(seen, due(known, 3, 4, 200))
    assert {(index, source, target) for index, source, target in found} <= {(3, "a", "c"), (4, "a", "c")}
    assert found


def test_where_all_that_is_due_is_even_the_rest_stays_where_it_is() -> None:
    seen = view((), instance("a", tuple(range(40))), instance("b", (100,)))
    known = facts({**dict.fromkeys(range(40), 3000), 100: 400})
    assert moves(seen, known)
    assert moves(seen, due(known, 100)) == []


def test_a_request_that_has_moved_stays_for_a_while() -> None:
    known = facts(dict.fromkeys(range(40), 3000))
    there, nothing = instance("a", tuple(range(40))), instance("b")
    policy = Arrival(LIMITS)
    actions = policy.look(view((), there, nothing), known, 0.0)
    first = {each.request.index for each in actions if isinstance(each, MoveAction)}
    assert len(first) == LIMITS.moves.moves_max
    # They are on b now, of which it seems that all is to be made elsewhere.
    full = view((), instance("a"), instance("b", tuple(range(40))))
    later: set[int] = set()
    now = 2.0
    while now < LIMITS.moves.settled_s:
        later |= {each.request.index for each in policy.look(full, known, now)}
        now += 1.5
    assert later
    assert not later & first
    assert policy.look(full, known, now + LIMITS.moves.settled_s)


def test_where_no_instance_may_begin_anything_nothing_is_estimated_at_each_look() -> None:
    asked: list[int] = []
    counting = noted(facts({}), asked)
    seen = view(200, arriving("a", None), arriving("b", 3.0), newest=2)
    policy = Arrival(LIMITS)
    policy.look(seen, counting, 0.0)
    asked.clear()
    assert policy.look(seen, counting, 0.02) == ()
    assert asked == []


def test_what_is_for_one_version_alone_is_placed_though_all_else_has_to_wait() -> None:
    waiting = (0, 1, 2)
    seen = view(
        waiting,
        instance("new", version=2, slots=0),
        instance("old", version=1, version_wanted=1, may_start=False),
        pinned={of(2): 1},
        newest=2,
    )
    assert placed(seen, facts({})) == {2: "old"}


def test_what_is_held_is_looked_at_again_only_once_something_has_changed() -> None:
    asked: list[int] = []
    counting = noted(facts(dict.fromkeys(range(9), 200)), asked)
    waiting, policy = (3, 5, 7), Arrival(LIMITS)
    here, comes = instance("a", slots=60, pending=tuple(map(of, range(100, 114))), version=2), arriving("b", 0.05)
    policy.look(view(waiting, here, comes, newest=2), counting, 0.0)
    assert policy.held
    asked.clear()
    held = {each.index for each in policy.held}
    left = tuple(sorted(held))
    policy.look(view(left, here, comes, newest=2), counting, 0.02)
    assert not held & {*asked}, "nothing has come, and no instance has become ready"
    assert {each.index for each in policy.held} == held
    # Another request comes: all of them are compared again.
    policy.look(view((*left, 8), here, comes, newest=2), counting, 0.04)
    assert {*held, 8} <= {*asked}
    # And once the version is there they begin at once.
    actions = policy.look(view(left, here, instance("b", version=2), newest=2), counting, 0.06)
    assert {each.request.index for each in actions if isinstance(each, PlaceAction)} == held
