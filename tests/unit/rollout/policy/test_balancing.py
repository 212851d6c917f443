"""RLBoost's Algorithm 2: cases by hand, and what no view may lead to."""

from collections.abc import Iterator
from itertools import count

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.balancing import LOOKED_AT_MAX, PLACED_MAX, BalancingLimits, balance
from tensorhub_rollout.policy.view import FleetView, InstanceView, MoveAction, PlaceAction

LIMITS = BalancingLimits(pending_max=3)
NUMBERS = count()


def requests(number: int) -> tuple[RequestId, ...]:
    return tuple(RequestId(1, next(NUMBERS)) for _ in range(number))


def instance(
    name: str, pending: int = 0, executing: int = 0, slots: int = 8, *, takes_more: bool = True
) -> InstanceView:
    return InstanceView(name, slots, requests(pending), requests(executing), takes_more=takes_more)


def fleet(*instances: InstanceView, waiting: int = 0, step: int = 2) -> FleetView:
    return FleetView(requests(waiting), instances, step)


def test_the_fewest_pending_takes_the_next_and_none_takes_more_than_its_bound() -> None:
    view = fleet(instance("a", 2), instance("b", 0), instance("c", 0, takes_more=False), waiting=6)
    actions = balance(view, LIMITS, {})
    assert [(each.request, each.runner) for each in actions if isinstance(each, PlaceAction)] == [
        *zip(view.waiting, "bbaba"[:4], strict=False)
    ][:4]
    assert len(actions) == 4, "two instances with room for one and three; the others wait for a completion"


def test_a_look_places_no_more_than_its_limit() -> None:
    view = fleet(*(instance(f"r{number}") for number in range(PLACED_MAX)), waiting=2 * PLACED_MAX)
    assert [each.request for each in balance(view, LIMITS, {})] == [*view.waiting][:PLACED_MAX]


def test_a_request_that_may_kill_its_instance_is_placed_where_nothing_is_pending_and_room_is_made_for_it() -> None:
    suspect, *others = waiting = requests(3)
    view = FleetView(waiting, (instance("a", 1), instance("b")), 1, frozenset({suspect}))
    placed = [(each.request, each.runner) for each in balance(view, LIMITS, {}) if isinstance(each, PlaceAction)]
    assert placed == [(suspect, "b"), *((each, "a") for each in others)]
    full = FleetView(waiting, (instance("a", 1), instance("b", 2)), 1, frozenset({suspect}))
    placed = [(each.request, each.runner) for each in balance(full, LIMITS, {}) if isinstance(each, PlaceAction)]
    assert placed == [(others[0], "b")], "a is to be free for it"


def test_a_request_of_one_version_goes_where_that_is_and_others_do_not_wait_for_it() -> None:
    first, second, other = waiting = requests(3)
    old = InstanceView("old", 8, requests(2), (), version=1)
    new = InstanceView("new", 8, (), (), version=2)
    view = FleetView(waiting, (old, new), 1, pinned={first: 1, second: 1})
    placed = [(each.request, each.runner) for each in balance(view, LIMITS, {}) if isinstance(each, PlaceAction)]
    assert placed == [(first, "old"), (other, "new")], "old has room for one, and the second waits for it"


def test_an_instance_that_keeps_an_older_version_takes_what_is_for_that_alone_and_the_others_do_not_stop_it() -> None:
    other, old = waiting = requests(2)
    kept = InstanceView("kept", 8, (), (), version=1, version_wanted=1)
    full = InstanceView("full", 4, requests(3), requests(3), version=2)
    view = FleetView(waiting, (kept, full), 2, pinned={old: 1}, demand={1: 1, None: 1}, newest=2)
    assert [(each.request, each.runner) for each in balance(view, LIMITS, {}) if isinstance(each, PlaceAction)] == [
        (old, "kept")
    ]
    for_that = FleetView((), (kept, full), 2, demand={1: 1}, newest=2)
    assert balance(for_that, LIMITS, {}) == (), "nor does any move there"
    stays = FleetView((other,), (kept,), 2, newest=2)
    assert len(balance(stays, LIMITS, {})) == 1, "one that stays on its version for a while is for all"
    newest = FleetView((other,), (kept,), 2, newest=1)
    assert len(balance(newest, LIMITS, {})) == 1, "the newest version is for all"


def test_a_request_of_one_version_does_not_move_to_another() -> None:
    most = InstanceView("most", 2, requests(3), requests(2), version=1)
    idle = InstanceView("idle", 8, (), (), version=2)
    *movable, last = most.pending
    (move,) = balance(FleetView((), (most, idle), 2, pinned={last: 1}), LIMITS, {})
    assert isinstance(move, MoveAction)
    assert move.request == movable[-1]
    assert balance(FleetView((), (most, idle), 2, pinned=dict.fromkeys(most.pending, 1)), LIMITS, {}) == ()
    busy = InstanceView("busy", 8, (), requests(3), version=1)
    moves = balance(FleetView((), (busy, idle), 2, pinned={[*busy.executing][-1]: 1}), LIMITS, {"busy": 1})
    assert [each.request for each in moves if isinstance(each, MoveAction)] == [[*busy.executing][1]]


def test_a_request_that_has_a_slot_stays_while_its_prompt_is_computed() -> None:
    assert balance(fleet(instance("a", 1), instance("b")), LIMITS, {}) == ()
    assert balance(fleet(instance("a", 3, 5), instance("b", 0, 1)), LIMITS, {"a": 1}) == ()


def test_one_pending_request_goes_to_an_instance_that_has_none_and_a_free_slot() -> None:
    most = instance("a", 3, 8)
    view = fleet(most, instance("b", 1, 8), instance("c", 0, 2))
    (move,) = balance(view, LIMITS, {})
    assert isinstance(move, MoveAction)
    assert (move.request, move.source, move.target) == ([*most.pending][-1], "a", "c")
    assert balance(fleet(most, instance("c", 0, 8)), LIMITS, {}) == (), "it would be pending there, and go back"
    assert balance(fleet(most, instance("c", 0, 2, takes_more=False)), LIMITS, {}) == ()


def test_what_executes_beyond_the_plateau_goes_to_an_instance_that_executes_nothing() -> None:
    full = instance("a", 0, 7)
    view = fleet(full, instance("b", 0, 3), instance("c"))
    moves = balance(view, LIMITS, {"a": 4})
    assert [each.request for each in moves] == [*full.executing][4:]
    assert {(each.source, each.target) for each in moves if isinstance(each, MoveAction)} == {("a", "c")}
    assert balance(view, LIMITS, {"a": 9}) == ()
    assert balance(view, LIMITS, {"b": 1}) == (), "of the fullest one nothing was measured"
    assert balance(fleet(instance("a", 0, 8), instance("b", 1, 3), instance("c", slots=0)), LIMITS, {"a": 4}) == (), (
        "something pends"
    )
    assert balance(fleet(full, instance("c"), step=1), LIMITS, {"a": 4}) == (), "nothing was measured in a step before"


VIEWS = st.builds(
    lambda sizes, waiting, step: fleet(
        *(
            instance(f"r{number}", pending, executing, slots, takes_more=takes_more)
            for number, (pending, executing, slots, takes_more) in enumerate(sizes)
        ),
        waiting=waiting,
        step=step,
    ),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=5),
    st.integers(0, 9),
    st.integers(1, 3),
)


@given(VIEWS, st.dictionaries(st.sampled_from(["r0", "r1", "r2"]), st.integers(1, 6)), st.integers(1, 4))
def test_no_view_leads_to_what_the_rules_do_not_name(
    view: FleetView, plateaus: dict[str, int], pending_max: int
) -> None:
    actions = balance(view, BalancingLimits(pending_max), plateaus)
    by_name = {each.runner: each for each in view.instances}
    pending = {each.runner: len(each.pending) for each in view.instances}
    assert len({each.request for each in actions}) == len(actions)
    for action in actions:
        match action:
            case PlaceAction(request=request, runner=runner):
                pending[runner] += 1
                assert request in view.waiting
                assert by_name[runner].takes_more
                assert pending[runner] <= pending_max
            case MoveAction(request=request, source=source, target=target):
                taker, giver = by_name[target], by_name[source]
                assert source != target
                assert taker.takes_more
                assert not taker.pending
                if request in giver.pending:
                    assert len(actions) == 1
                    assert len(giver.pending) + len(giver.executing) > giver.slots
                    assert taker.free_slots > 0
                else:
                    assert request in giver.executing
                    assert not taker.executing
                    assert not any(pending.values())
                    assert view.step >= 2
                    assert len(giver.executing) - len(actions) >= plateaus[source]
    moved_or_placed = bool(actions)
    room = any(each.takes_more and len(each.pending) < pending_max for each in view.instances)
    assert moved_or_placed or not (view.waiting and room), "an instance with room takes what waits"


def test_a_look_goes_through_no_more_of_what_waits_than_its_limit() -> None:
    seen = 0

    class Counted(list[RequestId]):
        def __iter__(self) -> Iterator[RequestId]:
            nonlocal seen
            for each in super().__iter__():
                seen += 1
                yield each

    # All are for one version alone, whose only instance is full.
    requests = Counted(RequestId(3, index) for index in range(2 * LOOKED_AT_MAX))
    full = replace(instance("old", pending=LIMITS.pending_max), version=1, version_wanted=1)
    view = FleetView(requests, (full,), 1, pinned=dict.fromkeys(tuple(requests), 1), newest=2)
    seen = 0
    assert balance(view, LIMITS, {}) == ()
    assert seen <= LOOKED_AT_MAX + 1
