"""Ranges and marks say the same set."""

from hypothesis import given
from hypothesis import strategies as st

from tensorhub_agent.ranges import mark, marked, merged, unmarked


@given(st.lists(st.booleans(), max_size=40))
def test_there_and_back(flags: list[bool]) -> None:
    marks = bytearray(flags)
    again = bytearray(len(marks))
    mark(again, marked(marks, 0, len(marks)))
    assert again == marks
    mark(again, unmarked(marks))
    assert all(again)


def test_touching_ranges_are_joined() -> None:
    assert merged([(5, 1), (0, 2), (2, 1)]) == [(0, 3), (5, 1)]
