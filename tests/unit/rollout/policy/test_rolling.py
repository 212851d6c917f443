"""Which instances stay on their version for a while: cases by hand, and what always holds."""

from hypothesis import given
from hypothesis import strategies as st

from tensorhub_rollout.policy.rolling import RollingLimits, RollingState, stay
from tensorhub_rollout.policy.view import FleetView, InstanceView

LIMITS = RollingLimits(small_share=0.5, mean_s=10.0)
NEWEST = 5


def instance(name: str, version: int | None, *, may_stay: bool = True) -> InstanceView:
    return InstanceView(name, 8, (), (), version=version, may_stay=may_stay)


def fleet(*instances: InstanceView, drops_cache: bool = True) -> FleetView:
    return FleetView((), instances, 1, newest=NEWEST, drops_cache=drops_cache)


def looked(view: FleetView, *contexts: int) -> dict[str, int]:
    """Return what stays after looks at these contexts of instance `a`, a second after each other."""
    state, found = RollingState(), dict[str, int]()
    for now, context in enumerate(contexts):
        found, state = stay(view, {"a": context}, state, LIMITS, float(now))
    return found


def test_who_has_much_to_compute_again_stays_and_goes_on_once_that_is_small() -> None:
    behind = fleet(instance("a", 4))
    assert looked(behind, 100) == {"a": 4}
    assert looked(behind, 100, 100, 60) == {"a": 4}
    assert looked(behind, 100, 100, 40) == {}
    assert looked(behind, 0) == {}, "nothing runs"


def test_who_has_been_let_go_of_is_not_kept_again_while_it_loads() -> None:
    assert looked(fleet(instance("a", 4)), 100, 100, 40, 100, 100) == {}


def test_it_goes_on_where_nothing_may_begin_on_its_version_any_more() -> None:
    assert looked(fleet(instance("a", 4, may_stay=False)), 100, 100) == {}


def test_the_newest_is_kept_where_requests_may_begin_on_it_after_the_next_publication_too() -> None:
    assert looked(fleet(instance("a", NEWEST)), 100) == {"a": NEWEST}
    assert looked(fleet(instance("a", NEWEST, may_stay=False)), 100) == {}


def test_nothing_stays_where_no_cache_is_lost_or_the_term_is_off() -> None:
    assert looked(fleet(instance("a", 4), drops_cache=False), 100, 100) == {}
    assert stay(fleet(instance("a", 4)), {"a": 9}, RollingState(), RollingLimits(is_on=False), 0.0)[0] == {}


@given(st.lists(st.tuples(st.integers(1, NEWEST), st.booleans(), st.integers(0, 99)), max_size=5))
def test_who_stays_keeps_what_it_has_and_may_begin_requests_on_it(
    drawn: list[tuple[int, bool, int]],
) -> None:
    instances = [instance(f"r{at}", version, may_stay=still) for at, (version, still, _) in enumerate(drawn)]
    contexts = {f"r{at}": context for at, (*_, context) in enumerate(drawn)}
    found, state = stay(fleet(*instances), contexts, RollingState(), LIMITS, 0.0)
    for each in instances:
        if each.runner in found:
            assert found[each.runner] == each.version
            assert each.may_stay
            assert each.runner not in state.left
