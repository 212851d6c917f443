"""Which instance has which version: cases by hand, and what always holds."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy.activation import ActivationLimits, Turns, Wish, decide
from tensorhub_rollout.policy.view import FleetView, InstanceView

LIMITS = ActivationLimits(turn_s=10.0)


def instance(name: str, version: int | None, wanted: Wish | None = "newest", *, busy: int = 0) -> InstanceView:
    executing = tuple(RequestId(9, index) for index in range(busy))
    return InstanceView(name, 8, (), executing, version=version, keeps_versions=True, version_wanted=wanted)


def fleet(
    *instances: InstanceView,
    demand: dict[int | None, int],
    newest: int = 5,
    available: frozenset[int] = frozenset({3, 4, 5}),
    kept: frozenset[int] = frozenset({3, 4}),
) -> FleetView:
    return FleetView((), instances, 1, demand=demand, newest=newest, available=available, kept=kept)


def decided(view: FleetView, turns: Turns | None = None, now: float = 0.0) -> dict[str, Wish]:
    actions, _ = decide(view, turns or Turns(), LIMITS, now)
    return {each.runner: each.version for each in actions}


def test_an_instance_that_was_told_nothing_is_told_to_follow_the_newest_version() -> None:
    view = fleet(instance("a", 5, None), instance("b", 5), demand={None: 7})
    assert decided(view) == {"a": "newest"}


def test_an_older_version_is_loaded_where_there_is_least_to_do() -> None:
    view = fleet(instance("a", 5, busy=2), instance("b", 5, busy=1), instance("c", 5, busy=3), demand={3: 1, None: 9})
    assert decided(view) == {"b": 3}


def test_who_has_a_version_keeps_it_and_as_many_do_as_its_share_of_the_requests() -> None:
    names = "abcdefgh"
    view = fleet(*(instance(each, 4) for each in names), demand={4: 6, None: 6})
    assert decided(view) == dict.fromkeys("abcd", 4)
    assert decided(fleet(*(instance(each, 4) for each in names), demand={4: 9})) == dict.fromkeys(names, 4)
    assert decided(fleet(*(instance(each, 4) for each in names), demand={4: 2})) == dict.fromkeys("ab", 4)
    few = fleet(*(instance(each, 4) for each in names), demand={4: 1, None: 999})
    assert decided(few) == {"a": 4}


def test_it_goes_on_to_the_newest_version_once_nothing_is_open_for_the_older_one() -> None:
    assert decided(fleet(instance("a", 3, 3), instance("b", 5), demand={None: 4})) == {"a": "newest"}


def test_a_version_that_no_replica_has_is_not_asked_for_and_one_that_an_instance_has_is_kept() -> None:
    nowhere = fleet(instance("a", 5), demand={2: 4})
    assert decided(nowhere) == {}
    here = fleet(instance("a", 2), instance("b", 5), demand={2: 4, None: 4})
    assert decided(here) == {"a": 2}


def test_what_can_not_keep_a_version_is_asked_for_none() -> None:
    mapped = InstanceView("a", 8, (), (), version=5)
    leaving = InstanceView("b", 8, (), (), version=5, keeps_versions=True, is_leaving=True)
    assert decided(fleet(mapped, leaving, demand={3: 4})) == {}


def test_one_on_its_way_to_a_version_that_may_be_lost_is_not_called_back_to_save_its_cache() -> None:
    """It came with the newest version, was told 3, and would not take a newer version for now."""
    view = fleet(instance("a", 5, 3), demand={3: 4, None: 8}, kept=frozenset())
    turns = Turns({3: 0.5, "newest": 0.0})
    actions, _ = decide(view, turns, LIMITS, 1.0, {"a": 5})
    assert actions == ()
    # One that stays, and was told no other version, has the turn of the newest one.
    staying = fleet(instance("a", 5, 5), demand={3: 4, None: 8}, kept=frozenset())
    assert decide(staying, Turns({"newest": 0.0}), LIMITS, 1.0, {"a": 5})[0] == ()


def test_one_instance_takes_turns_and_stays_where_its_version_would_be_lost() -> None:
    demand: dict[int | None, int] = {3: 2, None: 2}
    (first,), turns = decide(fleet(instance("a", 5), demand=demand), Turns(), LIMITS, 0.0)
    assert first.version == 3
    on_three = fleet(instance("a", 3, 3), demand=demand)
    still, turns = decide(on_three, turns, LIMITS, 9.9)
    assert still == ()
    (second,), after = decide(on_three, turns, LIMITS, 10.0)
    assert second.version == "newest"
    (third,), _ = decide(fleet(instance("a", 5), demand=demand), after, LIMITS, 20.0)
    assert third.version == 3
    not_kept = fleet(instance("a", 3, 3), demand=demand, kept=frozenset())
    assert decide(not_kept, turns, LIMITS, 10.0)[0] == ()


def test_the_last_one_that_has_a_version_keeps_it_though_it_only_stayed_there_to_save_its_cache() -> None:
    """Requests come that are for its version alone, while another version has waited for its turn for longer."""
    view = fleet(instance("a", 3, 3), demand={3: 1, 4: 1}, kept=frozenset({4}))
    actions, _ = decide(view, Turns({3: 5.0}), LIMITS, 6.0, {"a": 3})
    assert actions == ()


def test_where_the_newest_version_is_kept_for_some_the_others_run_there_too() -> None:
    assert decided(fleet(instance("a", 5), demand={5: 1, None: 9})) == {"a": 5}


VERSIONS = st.integers(1, 6)
NEWEST: Wish = "newest"
WISHES = st.just(NEWEST) | VERSIONS


@st.composite
def fleets(draw: st.DrawFn) -> FleetView:
    instances = [
        InstanceView(
            f"r{number}",
            8,
            (),
            (),
            version=draw(st.none() | VERSIONS),
            keeps_versions=draw(st.integers(0, 5)) > 0,
            version_wanted=draw(st.none() | WISHES),
            is_leaving=draw(st.integers(0, 9)) == 0,
        )
        for number in range(draw(st.integers(0, 6)))
    ]
    demand = draw(st.dictionaries(st.none() | VERSIONS, st.integers(1, 20)))
    held = {each.version for each in instances if each.version is not None}
    available = frozenset({6, *held, *draw(st.sets(VERSIONS))})
    kept = frozenset(draw(st.sets(st.sampled_from(sorted(available)))))
    return FleetView((), tuple(instances), 1, demand=demand, newest=6, available=available, kept=kept)


def told(view: FleetView, turns: Turns, now: float) -> tuple[FleetView, Turns]:
    """Return the fleet once each instance has what it is told."""
    actions, after = decide(view, turns, LIMITS, now)
    wanted = {each.runner: each.version for each in actions}
    instances = []
    for each in view.instances:
        wish = wanted.get(each.runner, each.version_wanted)
        stays = isinstance(wish, int) and each.keeps_versions and not each.is_leaving
        version = wish if isinstance(wish, int) and stays else view.newest
        instances.append(replace(each, version=version, version_wanted=wish))
    return replace(view, instances=tuple(instances)), after


def able(view: FleetView) -> list[InstanceView]:
    return [each for each in view.instances if each.keeps_versions and not each.is_leaving]


def wishes(view: FleetView) -> set[Wish]:
    """Return what is to be had, where no instance but those that can keep a version takes requests."""
    wished: set[Wish] = {each for each in view.demand if each is not None and each in view.available}
    return wished | ({"newest"} if view.demand.get(None) and view.newest not in wished else set())


@given(fleets())
def test_each_version_that_can_be_had_has_an_instance_as_far_as_there_are_some(view: FleetView) -> None:
    settled, _ = told(view, Turns(), 0.0)
    had = {each.version_wanted for each in able(settled)}
    assert len(had & wishes(view)) >= min(len(wishes(view)), len(able(view)) - 1)
    assert had <= wishes(view) | {"newest"}


@given(fleets())
def test_nothing_changes_once_all_have_what_they_were_told(view: FleetView) -> None:
    settled, turns = told(view, Turns(), 0.0)
    again, _ = decide(settled, turns, LIMITS, 1.0)
    assert again == ()


@given(fleets(), st.lists(st.floats(0.1, 15), min_size=1, max_size=40))
def test_no_version_waits_for_more_turns_than_there_are_others(view: FleetView, steps: list[float]) -> None:
    view, turns, now = replace(view, instances=tuple(able(view)), kept=view.available), Turns(), 0.0
    assume(view.instances)
    since: dict[Wish, float] = {}
    for step in steps:
        view, turns = told(view, turns, now)
        waiting = wishes(view) - {each.version_wanted for each in view.instances}
        since = {each: since.get(each, now) for each in waiting}
        longest_s = max((now - at for at in since.values()), default=0.0)
        assert longest_s <= (LIMITS.turn_s + max(steps)) * len(wishes(view)), f"{since} at {now}"
        now += step


@pytest.mark.parametrize("turn_s", [0.0, 1e9])
def test_any_length_of_a_turn_gives_a_decision(turn_s: float) -> None:
    view = fleet(instance("a", 5), demand={3: 1, 4: 1, None: 1})
    (action,), _ = decide(view, Turns(), ActivationLimits(turn_s), 0.0)
    assert action.version == 3
