"""StreamRL's placement: the tail on instances of its own, the longest first, and what no view may lead to."""

import math
from collections.abc import Callable, Mapping
from itertools import count, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.core.waiting import WaitingQueue
from tensorhub_rollout.policy import ranking
from tensorhub_rollout.policy.balancing import BalancingLimits
from tensorhub_rollout.policy.dispatch import DIVIDED_S, GONE_MAX, PLACED_MAX, Pools, dispatch
from tensorhub_rollout.policy.lengths import Knowledge, LengthEstimate
from tensorhub_rollout.policy.plateau import StepModel
from tensorhub_rollout.policy.ranking import LOOKS_A_ROUND, NEW_MAX, SAMPLE_MAX, Expected
from tensorhub_rollout.policy.request_facts import Facts, RequestFacts
from tensorhub_rollout.policy.view import FleetView, InstanceView, PlaceAction, ReleaseAction

LIMITS = BalancingLimits(pending_max=100)
STEPS = StepModel(0.01, 0.001, 0.0)
NUMBERS = count()


def requests(number: int) -> tuple[RequestId, ...]:
    return tuple(RequestId(1, next(NUMBERS)) for _ in range(number))


def flat(_: RequestId) -> int:
    """Return one priority for all."""
    return 0


def known(
    tokens: Mapping[RequestId, float],
    steps: Mapping[str, StepModel] | None = None,
    priority: Callable[[RequestId], int] = flat,
) -> Facts:
    """Return estimates that are right to a thousandth."""

    def of(request: RequestId) -> RequestFacts:
        length = LengthEstimate(math.log(tokens[request]), 0.001, 0, Knowledge.FINISHED)
        return RequestFacts(length, priority=priority(request))

    return Facts(steps or {}, of)


def idle(*names: str, slots: int = 16) -> tuple[InstanceView, ...]:
    return tuple(InstanceView(name, slots, (), ()) for name in names)


def test_the_tail_has_instances_of_its_own_and_the_longest_go_first() -> None:
    """20 of 1,000 tokens and 80 of 100 on 4 instances of 16: three serve the tail (test_skew.py has the times)."""
    long, short = requests(20), requests(80)
    tokens = {of: 1000.0 + at for at, of in enumerate(long)} | dict.fromkeys(short, 100.0)
    view = FleetView((*short, *long), idle("a", "b", "c", "d"), 1)
    actions, pools = dispatch(view, known(tokens, dict.fromkeys("abcd", STEPS)), Pools(), LIMITS, 0.0)
    assert pools.tail == {"a", "b", "c"}
    placed = [each for each in actions if isinstance(each, PlaceAction)]
    assert {each.runner for each in placed if each.request in long} == pools.tail
    assert {each.runner for each in placed if each.request in short} == {"d"}
    assert [each.request for each in placed[:20]] == [*reversed(long)]
    assert [each.runner for each in placed[:4]] == ["a", "b", "c", "c"]
    assert "about 1019 tokens, of the tail" in placed[0].reason


def test_when_the_short_ones_are_done_all_instances_serve_the_tail_and_those_that_did_stay() -> None:
    long = requests(40)
    tokens = dict.fromkeys(long, 1000.0)
    instances = (InstanceView("a", 16, (), long[:16]), InstanceView("b", 16, (), ()))
    before = Pools(frozenset({"b"}))
    _, pools = dispatch(FleetView(long[16:], instances, 1), known(tokens), before, LIMITS, 0.0)
    assert "b" in pools.tail
    _, pools = dispatch(FleetView(long[16:18], instances[1:], 1), known(tokens), before, LIMITS, 0.0)
    assert pools.tail <= {"b"}
    _, pools = dispatch(FleetView((), instances, 1), known(tokens), before, LIMITS, 0.0)
    assert pools.tail <= {"a", "b"}
    assert dispatch(FleetView((), idle("a"), 1), known({}), before, LIMITS, 0.0)[1].tail == frozenset()


def test_a_fleet_is_divided_anew_after_a_while_and_where_instances_come_or_go() -> None:
    long, short = requests(4), requests(16)
    tokens = dict.fromkeys(long, 1000.0) | dict.fromkeys(short, 10.0)
    everything, tail = FleetView((*long, *short), idle("a", "b"), 1), FleetView(long, idle("a", "b"), 1)
    _, first = dispatch(everything, known(tokens), Pools(), LIMITS, 5.0)
    assert (first.among, first.divided_at) == (frozenset("ab"), 5.0)
    assert first.tail_least[1] == long[-1]
    _, then = dispatch(tail, known(tokens), first, LIMITS, 5.0 + DIVIDED_S / 2)
    assert (then.tail, then.tail_least, then.divided_at) == (first.tail, first.tail_least, 5.0)
    _, again = dispatch(tail, known(tokens), first, LIMITS, 5.0 + DIVIDED_S)
    assert again.divided_at == 5.0 + DIVIDED_S
    _, other = dispatch(FleetView(long, idle("a"), 1), known(tokens), first, LIMITS, 5.1)
    assert (other.among, other.divided_at) == (frozenset("a"), 5.1)


def test_an_instance_that_goes_away_gives_all_back_and_takes_nothing() -> None:
    one, two = requests(2)
    leaving = InstanceView("a", 8, (one,), (two,), takes_more=False, is_leaving=True)
    (waiting,) = requests(1)
    view = FleetView((waiting,), (leaving, *idle("b")), 1)
    actions, _ = dispatch(view, known({one: 5.0, two: 9.0, waiting: 7.0}), Pools(), LIMITS, 0.0)
    assert {each.request for each in actions if isinstance(each, ReleaseAction)} == {one, two}
    assert [each.runner for each in actions if isinstance(each, PlaceAction)] == ["b"]


def test_what_may_kill_its_instance_is_tried_alone_and_room_is_made_for_it() -> None:
    suspect, other, busy = requests(3)
    tokens = {suspect: 100.0, other: 10.0, busy: 10.0}
    alone = frozenset({suspect})
    view = FleetView((other, suspect), idle("a"), 1, alone)
    actions, _ = dispatch(view, known(tokens), Pools(), LIMITS, 0.0)
    assert [each.request for each in actions if isinstance(each, PlaceAction)] == [suspect]
    view = FleetView((other, suspect), (InstanceView("a", 8, (busy,), ()),), 1, alone)
    assert dispatch(view, known(tokens), Pools(), LIMITS, 0.0)[0] == (), "a is to be free for it"


def test_what_has_priority_goes_first_and_what_is_for_one_version_goes_where_that_is() -> None:
    long, urgent, old = requests(3)
    tokens = {long: 1000.0, urgent: 10.0, old: 5000.0}
    kept = InstanceView("kept", 8, (), (), version=1, version_wanted=1)
    new = InstanceView("new", 8, (), (), version=2)
    view = FleetView((long, urgent, old), (kept, new), 1, pinned={old: 1}, demand={1: 1}, newest=2)
    actions, pools = dispatch(view, known(tokens, priority=lambda of: int(of == urgent)), Pools(), LIMITS, 0.0)
    assert [(each.request, each.runner) for each in actions if isinstance(each, PlaceAction)] == [
        (urgent, "new"),
        (old, "kept"),
        (long, "new"),
    ]
    assert "kept" not in pools.tail


def test_what_has_come_since_takes_its_place_and_what_is_placed_counts_until_the_next_division() -> None:
    known_ones, late = requests(3), requests(1)
    tokens = {of: 100.0 * (1 + at) for at, of in enumerate((*known_ones, *late))}
    limits = BalancingLimits(pending_max=1)
    view = FleetView(known_ones, idle("a"), 1)
    actions, pools = dispatch(view, known(tokens), Pools(), limits, 0.0)
    assert [each.request for each in actions if isinstance(each, PlaceAction)] == [known_ones[2]]
    assert 299 < pools.load["a"] < 301
    view = FleetView((*known_ones[:2], *late), (InstanceView("a", 8, (), known_ones[2:]),), 1)
    actions, pools = dispatch(view, known(tokens), pools, limits, 0.1)
    assert [each.request for each in actions if isinstance(each, PlaceAction)] == [*late]
    assert 699 < pools.load["a"] < 701
    full = FleetView(known_ones[:2], (InstanceView("a", 8, late, known_ones[2:]),), 1)
    assert dispatch(full, known(tokens), pools, limits, 0.2)[0] == ()


def test_where_all_are_expected_to_be_equal_the_whole_fleet_works() -> None:
    """Nothing is known of new prompts: a fifth of them is the tail all the same, and no more."""
    new = requests(100)
    view = FleetView(new, idle("a", "b", "c", "d"), 1)
    actions, pools = dispatch(view, known(dict.fromkeys(new, 256.0)), Pools(), LIMITS, 0.0)
    placed = [each for each in actions if isinstance(each, PlaceAction)]
    assert {each.runner for each in placed} == set("abcd")
    tail = [each for each in placed if "of the tail" in each.reason]
    assert len(tail) == 20
    assert {each.runner for each in tail} == pools.tail


def test_an_instance_without_work_takes_of_the_other_part() -> None:
    long, short, at_work = requests(1), requests(9), requests(1)
    tokens = dict.fromkeys(long, 1000.0) | dict.fromkeys((*short, *at_work), 10.0)
    pools = Pools(frozenset("a"), (-20.0, long[0]), frozenset("ab"), 0.0)
    busy = InstanceView("b", 8, at_work, ())
    limits = BalancingLimits(pending_max=1)
    view = FleetView(short, (*idle("a"), busy), 1)
    placed = dispatch(view, known(tokens), pools, limits, 0.1)[0]
    assert [each.runner for each in placed if isinstance(each, PlaceAction)] == ["a"]


def test_priority_holds_for_what_has_come_since_too() -> None:
    first, late, busy = requests(2), requests(2), requests(1)
    tokens = dict.fromkeys((*first, *late, *busy), 100.0)
    limits = BalancingLimits(pending_max=1)

    def priority(of: RequestId) -> int:
        return int(of in first)

    full = FleetView(first, (InstanceView("a", 8, busy, ()),), 1)
    actions, pools = dispatch(full, known(tokens, priority=priority), Pools(), limits, 0.0)
    assert actions == ()
    view = FleetView((*first, *late), idle("a"), 1)
    actions, _ = dispatch(view, known(tokens, priority=priority), pools, limits, 0.1)
    assert [each.request in first for each in actions if isinstance(each, PlaceAction)] == [True]


def test_what_is_still_to_be_made_is_the_load() -> None:
    """One of 10,000 tokens that has nearly all of them is less than one of 1,500 that has none."""
    nearly, fresh = requests(2)
    tokens, made = {nearly: 10_000.0, fresh: 1500.0}, {nearly: 9900}

    def facts(of: RequestId) -> RequestFacts:
        return RequestFacts(LengthEstimate(math.log(tokens[of]), 0.001, made.get(of, 0), Knowledge.FINISHED))

    instances = InstanceView("a", 8, (), (nearly,)), InstanceView("b", 8, (), (fresh,))
    _, pools = dispatch(FleetView((), instances, 1), Facts({}, facts), Pools(), LIMITS, 0.0)
    assert 90 < pools.load["a"] < 110
    assert 1490 < pools.load["b"] < 1510


def test_what_is_pinned_and_tried_alone_makes_room_where_its_version_is() -> None:
    suspect, other, busy = requests(3)
    tokens = {suspect: 100.0, other: 10.0, busy: 10.0}
    kept = InstanceView("kept", 8, (busy,), (), version=1, version_wanted=1)
    new = InstanceView("new", 8, (), (), version=2)
    view = FleetView(
        (suspect, other), (kept, new), 1, frozenset({suspect}), pinned={suspect: 1}, demand={1: 1}, newest=2
    )
    actions, _ = dispatch(view, known(tokens), Pools(), LIMITS, 0.0)
    assert [(each.request, each.runner) for each in actions if isinstance(each, PlaceAction)] == [(other, "new")]


def test_a_look_places_no_more_than_its_limit_and_those_that_are_estimated() -> None:
    waiting = requests(3000)
    fleet = idle(*(f"r{number:03}" for number in range(300)))
    tokens = {of: 10.0 + at for at, of in enumerate(waiting)}
    pools, placed, now = Pools(), list[PlaceAction](), 0.0
    full = tuple(InstanceView(each.runner, 16, (), (), takes_more=False) for each in fleet)
    for number in range(len(waiting) // NEW_MAX):
        _, pools = dispatch(FleetView(waiting, full, 1), known(tokens), pools, LIMITS, now)
        assert len(pools.expected.ranked) == NEW_MAX * (1 + number)
    while len(placed) < len(waiting):
        gone = {each.request for each in placed}
        view = FleetView(tuple(of for of in waiting if of not in gone), fleet, 1)
        actions, pools = dispatch(view, known(tokens), pools, LIMITS, now)
        assert 0 < len(actions) <= PLACED_MAX
        assert len(pools.expected.ranked) + len(actions) <= len(view.waiting)
        placed += [each for each in actions if isinstance(each, PlaceAction)]
        now += 0.02
    assert {each.request for each in placed} == {*waiting}
    assert [each.request for each in placed[:3]] == [*reversed(waiting[-3:])], "all are known by now, the longest first"


def test_what_waits_is_ranked_anew_in_its_turn_and_what_is_gone_is_forgotten() -> None:
    """No instance takes anything; one request of hundreds turns out to be the longest."""
    waiting = requests(300)
    tokens = dict.fromkeys(waiting, 100.0)
    full = (InstanceView("a", 8, (), (), takes_more=False),)
    expected, pools = None, Pools()
    for number in range(2 * LOOKS_A_ROUND):
        view = FleetView(waiting[: 300 - 100 * (number > 0)], full, 1)
        _, pools = dispatch(view, known(tokens), pools, LIMITS, number / 1000)
        expected = pools.expected
        tokens[waiting[150]] = 5000.0
    assert expected is not None
    assert next(iter(expected.ordered[None]))[3] == waiting[150]
    assert expected.ranked.keys() == {*waiting[:200]}
    assert sorted(each.rank for each in expected.ranked.values()) == [*expected.ordered[None]]


@given(st.integers(1, 4 * SAMPLE_MAX), st.sampled_from([(0, 0), (3, 50), (SAMPLE_MAX + 100, 1)]), st.booleans())
@settings(max_examples=30)
def test_a_sample_stands_for_all(count: int, at_work: tuple[int, int], is_large: bool) -> None:  # noqa: FBT001 (hypothesis gives it by position)
    waiting, tokens = requests(count), dict[RequestId, float]()
    instances, of_each = at_work
    there = tuple(InstanceView(f"r{at}", 8, (), requests(of_each)) for at in range(instances))
    tokens = {of: 1.0 + at for at, of in enumerate((*waiting, *(of for each in there for of in each.executing)))}
    expected, view = Expected(), FleetView(waiting, there, 1)
    for _ in range(6):
        expected.look(view, known(tokens))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "WALKED_MAX", 0 if is_large else count)
        found, each_is = expected.sampled()
    assert len({each.request for each in found}) == len(found) <= SAMPLE_MAX
    assert each_is * len(found) == pytest.approx(len(tokens))
    assert len(tokens) > SAMPLE_MAX or len(found) == len(tokens)
    middle = -found[len(found) // 2].shortness
    assert middle == pytest.approx(len(tokens) / 2, abs=0.1 * len(tokens) + 2)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 3))
def test_the_longest_first_ends_within_a_third_of_the_best(lengths: list[int], number: int) -> None:
    """Graham's bound (1969): what one part has to do, on instances that make one token at a time each."""
    waiting, names = requests(len(lengths)), "abc"[:number]
    tokens = dict(zip(waiting, map(float, lengths), strict=True))
    pools = Pools(among=frozenset(names), divided_at=0.0)
    actions, _ = dispatch(FleetView(waiting, idle(*names), 1), known(tokens), pools, LIMITS, 0.1)
    placed = {each.request: each.runner for each in actions if isinstance(each, PlaceAction)}
    assert placed.keys() == {*waiting}
    ends = max(sum(tokens[of] for of, runner in placed.items() if runner == name) for name in names)
    best = min(
        max(sum(each for each, on in zip(lengths, choice, strict=True) if on == name) for name in names)
        for choice in product(names, repeat=len(lengths))
    )
    assert ends <= best * (4 / 3 - 1 / (3 * number)) + 0.1


@given(st.data())
def test_whatever_the_fleet_is_no_limit_is_passed_and_no_request_placed_twice(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from("abcdef"), unique=True, max_size=6))
    instances, tokens = list[InstanceView](), dict[RequestId, float]()
    lengths = st.floats(1, 1e6)

    def some(most: int) -> tuple[RequestId, ...]:
        made = requests(data.draw(st.integers(0, most)))
        tokens.update({of: data.draw(lengths) for of in made})
        return made

    for name in names:
        takes, keeps = data.draw(st.booleans()), data.draw(st.booleans())
        instances.append(
            InstanceView(
                name, data.draw(st.integers(0, 8)), some(4), some(4), takes_more=takes, version=1 if keeps else 2,
                version_wanted=1 if keeps else "newest",
            )
        )  # fmt: skip
    waiting = some(30)
    pinned = {of: data.draw(st.sampled_from([1, 2])) for of in waiting if data.draw(st.booleans())}
    view = FleetView(waiting, tuple(instances), 1, pinned=pinned, newest=2)
    steps = {name: STEPS for name in names if data.draw(st.booleans())}
    limits = BalancingLimits(pending_max=3)
    actions, pools = dispatch(view, known(tokens, steps), Pools(frozenset("ab")), limits, 0.0)
    placed = [each for each in actions if isinstance(each, PlaceAction)]
    by_name = {each.runner: each for each in instances}
    assert len({each.request for each in placed}) == len(placed)
    assert pools.tail <= {name for name, each in by_name.items() if each.takes_more}
    for action in placed:
        assert by_name[action.runner].takes_more
        assert view.fits(action.request, by_name[action.runner])
    for name, there in by_name.items():
        more = sum(action.runner == name for action in placed)
        assert not more or len(there.pending) + more <= limits.pending_max
    if all(each.takes_more and not each.pending for each in instances):
        assert placed or not any(view.fits(of, each) for of in waiting for each in instances), "an idle fleet begins"


def test_equal_views_are_ranked_in_one_order_in_each_process() -> None:
    """What is estimated next, and the sample that divides the fleet, follow that order: no set's may decide it."""
    waiting = requests(64)
    view = FleetView(waiting, idle("a"), 1)
    expected = Expected()
    expected.look(view, known(dict.fromkeys(waiting, 100.0)))
    assert [*expected.ranked] == [*waiting]


class Queue:
    """What waits, as the leader tells it."""

    def __init__(self) -> None:
        self.queue, self.expected = WaitingQueue(), Expected()
        self.tokens: dict[RequestId, float] = {}

    def put(self, *of: RequestId, priority: int = 0) -> None:
        for each in of:
            self.tokens[each] = 10.0 + len(self.tokens)
            self.queue.put(each, "policy", priority, has_begun=False)

    def discard(self, *of: RequestId) -> None:
        for each in of:
            self.queue.discard(each)

    def view(self, *instances: InstanceView) -> FleetView:
        waiting = self.queue.of_model("policy")
        return FleetView(waiting, instances, 1, waiting_since=lambda number: self.queue.since("policy", number))

    def look(self) -> set[RequestId]:
        self.expected.look(self.view(), known(self.tokens))
        return {*self.expected.ranked}


def test_what_has_come_is_told_and_what_was_placed_in_vain_waits_again() -> None:
    queue, (first, second, third) = Queue(), requests(3)
    queue.put(first, second)
    assert queue.look() == {first, second}
    queue.expected.place(first)
    queue.expected.place(second)
    queue.discard(first)
    queue.put(third)
    # The leader has not placed the second one.
    assert queue.look() == {second, third}
    assert queue.look() == {second, third}


def test_what_comes_beyond_the_limit_is_estimated_later_unless_it_has_gone() -> None:
    queue, waiting = Queue(), requests(2 * NEW_MAX + 10)
    queue.put(*waiting)
    assert queue.look() == {*waiting[:NEW_MAX]}
    queue.discard(*waiting[NEW_MAX : 2 * NEW_MAX])
    assert queue.look() == {*waiting[:NEW_MAX], *waiting[2 * NEW_MAX :]}


def test_a_look_passes_over_a_bounded_number_of_requests_that_have_gone() -> None:
    """And takes them out, so that one behind them comes in its turn."""
    queue, waiting = Queue(), requests(GONE_MAX + 10)
    queue.put(*reversed(waiting))
    pools = Pools(divided_at=0.0)
    full = InstanceView("a", 16, (), (), takes_more=False)
    for _ in range(-(-len(waiting) // NEW_MAX)):
        _, pools = dispatch(queue.view(full), known(queue.tokens), pools, LIMITS, 0.0)
    queue.discard(*waiting[:-1])
    placed = []
    for _ in range(3):
        actions, pools = dispatch(queue.view(*idle("a")), known(queue.tokens), pools, LIMITS, 0.1)
        placed.append([each.request for each in actions if isinstance(each, PlaceAction)])
    assert placed[:2] == [[], [waiting[-1]]]
    assert waiting[0] not in pools.expected.ranked


def test_what_is_urgent_is_estimated_before_what_came_earlier() -> None:
    queue, waiting, (urgent,) = Queue(), requests(3 * NEW_MAX), requests(1)
    queue.put(*waiting)
    queue.look()
    queue.put(urgent, priority=1)
    assert urgent in queue.look()
