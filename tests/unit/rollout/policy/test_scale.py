"""How many instances are worth having: more at once, fewer after a while, no more than the trainer keeps up with."""

from hypothesis import given
from hypothesis import strategies as st

from tensorhub_rollout.policy.scale import ScaleLimits, ScaleState, wish

LIMITS = ScaleLimits(window_s=100.0)


def wished(state: ScaleState, open_: int, now: float, *, cap: int | None = None) -> tuple[int, ScaleState]:
    found, after = wish(state, open_, 10, cap, LIMITS, now)
    return found.instances, after


def test_it_follows_up_at_once_and_down_after_a_window() -> None:
    """35 requests need 4 instances of 10; what was needed 100 s ago counts no more."""
    state = ScaleState()
    for now, open_, expected in (
        (0.0, 35, 4),
        (1.0, 12, 4),
        (50.0, 0, 4),
        (99.0, 5, 4),
        (100.0, 5, 2),
        (101.0, 5, 1),
        (102.0, 101, 11),
        (201.9, 0, 11),
        (202.0, 0, 0),
    ):
        found, state = wished(state, open_, now)
        assert found == expected, now


def test_what_the_trainer_keeps_up_with_is_the_limit_but_for_one_while_anything_is_open() -> None:
    state = ScaleState()
    for now, open_, cap, expected in ((0.0, 95, 3, 3), (1.0, 95, None, 10), (2.0, 1, 0, 1), (3.0, 0, 0, 0)):
        found, state = wished(state, open_, now, cap=cap)
        assert found == expected, now


@given(
    st.lists(st.tuples(st.floats(0, 50), st.integers(0, 500)), max_size=20),
    st.integers(1, 64),
    st.integers(2, 6),
)
def test_it_is_what_was_needed_most_within_the_window(
    steps: list[tuple[float, int]], batch: int, peaks_max: int
) -> None:
    """With too few peaks remembered it is higher, never lower."""
    limits = ScaleLimits(window_s=100.0, peaks_max=peaks_max)
    state, now, needs = ScaleState(), 0.0, list[tuple[float, int]]()
    for passed_s, open_ in steps:
        now += passed_s
        needs.append((now, -(-open_ // batch)))
        found, state = wish(state, open_, batch, None, limits, now)
        most = max(need for at, need in needs if now - at < limits.window_s)
        assert found.instances >= most
        assert found.instances <= max(need for _, need in needs)
        assert len(state.peaks) <= peaks_max
        if len(needs) <= peaks_max:
            assert found.instances == most
