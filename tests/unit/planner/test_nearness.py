"""Near before far, and what measurement may change of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_planner.planning.selection import MeasuredDistance, ranks
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_planner.primitives.topology import Distance

LIMITS = PlanLimits(nearer_times=2.0)


def order(*sources: tuple[Distance, int | None]) -> list[Distance]:
    """Return the distances in the order in which they are read from."""
    found = ranks([MeasuredDistance(*source) for source in sources], LIMITS)
    return [sources[index][0] for index in sorted(range(len(sources)), key=lambda index: found[index])]


@pytest.mark.parametrize(
    ("host", "site", "nearer"),
    [
        (None, None, Distance.HOST),
        (None, 10_000, Distance.HOST),
        (10, None, Distance.HOST),
        (500, 1000, Distance.HOST),
        (499, 1000, Distance.SITE),
        (2000, 1000, Distance.HOST),
    ],
)
def test_only_a_clear_measurement_turns_the_order(host: int | None, site: int | None, nearer: Distance) -> None:
    """Both must be measured, and the nearer one bring less than half."""
    assert order((Distance.HOST, host), (Distance.SITE, site))[0] is nearer


def test_another_site_stays_last_however_fast() -> None:
    """What crosses the link is paid for by all of the site, and not by this reader alone."""
    assert order((Distance.SITE, 1), (Distance.WAN, 10**12)) == [Distance.SITE, Distance.WAN]


@pytest.mark.parametrize(
    ("host", "rack", "expected"),
    [
        (1, 100, [Distance.SITE, Distance.RACK, Distance.HOST]),
        (60, 100, [Distance.SITE, Distance.HOST, Distance.RACK]),
        (1, 900, [Distance.RACK, Distance.SITE, Distance.HOST]),
        (460, 900, [Distance.RACK, Distance.SITE, Distance.HOST]),
        (460, None, [Distance.RACK, Distance.SITE, Distance.HOST]),
    ],
)
def test_a_slow_one_goes_behind_all_that_are_far_faster(host: int, rack: int | None, expected: list[Distance]) -> None:
    """Whichever way these stand to each other; other sites stay where they are."""
    found = order((Distance.HOST, host), (Distance.RACK, rack), (Distance.SITE, 1000), (Distance.WAN, None))
    assert found == [*expected, Distance.WAN]


def test_one_of_several_at_a_distance_may_be_slow() -> None:
    """The others keep their place."""
    slow, fast, far = ranks(
        [
            MeasuredDistance(Distance.RACK, 1),
            MeasuredDistance(Distance.RACK, 900),
            MeasuredDistance(Distance.SITE, 1000),
        ],
        LIMITS,
    )
    assert fast < far < slow
    assert slow.is_behind


measures = st.lists(
    st.builds(MeasuredDistance, st.sampled_from(Distance), st.none() | st.integers(1, 10**6)), min_size=1, max_size=8
)


@given(measures)
def test_a_nearer_one_is_behind_only_what_was_measured_to_be_far_faster(sources: list[MeasuredDistance]) -> None:
    """The stated bound, for every pair."""
    found = ranks(sources, LIMITS)
    for one, its in zip(sources, found, strict=True):
        for other, others in zip(sources, found, strict=True):
            if one.distance < other.distance and others < its:
                assert other.distance is not Distance.WAN
                assert one.bps is not None
                assert any(
                    each.bps is not None and one.bps * LIMITS.nearer_times < each.bps
                    for each in sources
                    if one.distance < each.distance < Distance.WAN
                )


@given(measures)
def test_without_measurement_distance_is_all(sources: list[MeasuredDistance]) -> None:
    found = ranks([MeasuredDistance(source.distance, None) for source in sources], LIMITS)
    places = {distance: place for place, distance in enumerate(sorted({source.distance for source in sources}))}
    assert [rank.place for rank in found] == [places[source.distance] for source in sources]
    assert not any(rank.is_behind for rank in found)
