"""Recorded spot traces: each of ours can be read, and scaling keeps machines and what goes together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_simulator.rollout_performance.__main__ import TRACES
from tensorhub_simulator.rollout_performance.config.spot_trace import SpotChange, TraceError, recorded, scaled

TRACE = """# of nobody
0,comes,a
0,comes,b
0,comes,c
0,comes,d
60,goes,a
60,goes,c
120,comes,e
180,goes,b
180,comes,a
"""


def test_as_many_instances_as_machines_have_one_each() -> None:
    """`e` takes the seat that `a` left; `a` comes again as another process."""
    assert scaled(recorded(TRACE), 4, 0.0) == (
        SpotChange(0.0, (), ("a-1-0", "b-1-1", "c-1-2", "d-1-3")),
        SpotChange(60.0, ("a-1-0", "c-1-2"), ()),
        SpotChange(120.0, (), ("e-1-0",)),
        SpotChange(180.0, ("b-1-1",), ("a-2-1",)),
    )


def test_a_larger_fleet_has_machines_that_share_their_fate_and_a_smaller_one_every_other_seat() -> None:
    assert scaled(recorded(TRACE), 8, 0.0)[1].goes == ("a-1-0", "a-1-1", "c-1-4", "c-1-5")
    assert scaled(recorded(TRACE), 2, 0.0)[:2] == (
        SpotChange(0.0, (), ("a-1-0", "c-1-1")),
        SpotChange(60.0, ("a-1-0", "c-1-1"), ()),
    )


def test_a_trace_from_its_middle_on_begins_with_what_is_there_then() -> None:
    assert scaled(recorded(TRACE), 4, 100.0)[:2] == (
        SpotChange(0.0, (), ("b-1-1", "d-1-3")),
        SpotChange(20.0, (), ("e-1-0",)),
    )
    assert scaled(recorded(TRACE), 4, 60.0)[0] == SpotChange(0.0, (), ("b-1-1", "d-1-3"))


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.csv")), ids=lambda path: path.stem)
@given(instances=st.integers(1, 100))
def test_ours_have_at_most_as_many_instances_as_are_wanted_and_each_goes_once(path: object, instances: int) -> None:
    lines = recorded((TRACES / str(path)).read_text(encoding="utf-8"))
    there: set[str] = set()
    most = 0
    for change in scaled(lines, instances, 0.0):
        assert there >= {*change.goes}
        assert there.isdisjoint(change.comes)
        there = (there - {*change.goes}) | {*change.comes}
        most = max(most, len(there))
    assert most <= instances
    assert most >= instances * 0.7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it has no line"),
        ("0,comes", "line 1 is not `second,comes,machine`"),
        ("nan,comes,a", "line 1 is not"),
        ("0,leaves,a", "line 1 is not"),
        ("5,comes,a\n4,comes,b", "line 2 is of second 4, and the one before of 5"),
        ("0,goes,a", "line 1: a goes, and is not there"),
        ("0,comes,a\n1,comes,a", "line 2: a comes, and is there"),
    ],
)
def test_a_mistake_in_a_trace_is_told(text: str, said: str) -> None:
    with pytest.raises(TraceError) as found:
        recorded(text)
    assert said in str(found.value)
