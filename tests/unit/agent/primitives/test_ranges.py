"""Ranges and marks say the same set."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tensorhub_agent.primitives.ranges import (
    merge_ranges,
    ranges_of_gaps,
    ranges_of_marks,
    set_marks,
    split_by_marks,
    take_first,
    total_count,
)


@given(st.lists(st.booleans(), max_size=40))
def test_there_and_back(flags: list[bool]) -> None:
    marks = bytearray(flags)
    again = bytearray(len(marks))
    set_marks(again, ranges_of_marks(marks, 0, len(marks)))
    assert again == marks
    set_marks(again, ranges_of_gaps(marks))
    assert all(again)


def test_touching_ranges_are_joined() -> None:
    assert merge_ranges([(5, 1), (0, 2), (2, 1)]) == [(0, 3), (5, 1)]


@st.composite
def marks_and_ranges(draw: st.DrawFn) -> tuple[bytearray, list[tuple[int, int]]]:
    """Marks, and ranges that don't overlap, in any order."""
    marks = bytearray(draw(st.lists(st.booleans(), min_size=1, max_size=30)))
    cuts = sorted(draw(st.sets(st.integers(0, len(marks)), max_size=8)))
    ranges = [(first, stop - first) for first, stop in pairwise(cuts) if draw(st.booleans())]
    return marks, draw(st.permutations(ranges))


def pieces(ranges: list[tuple[int, int]]) -> list[int]:
    return [piece for first, count in ranges for piece in range(first, first + count)]


@given(marks_and_ranges())
def test_split_gives_each_piece_to_one_side_in_order(given_ranges: tuple[bytearray, list[tuple[int, int]]]) -> None:
    marks, ranges = given_ranges
    with_mark, without = split_by_marks(marks, ranges)
    assert pieces(with_mark) == [piece for piece in pieces(ranges) if marks[piece]]
    assert pieces(without) == [piece for piece in pieces(ranges) if not marks[piece]]
    assert all(count > 0 for _, count in [*with_mark, *without])


def test_split_keeps_runs_whole() -> None:
    assert split_by_marks(bytearray([1, 1, 0, 0, 0, 1]), [(0, 6)]) == ([(0, 2), (5, 1)], [(2, 3)])
    assert split_by_marks(bytearray([1, 1, 1]), [(1, 1)]) == ([(1, 1)], [])


@given(marks_and_ranges(), st.integers(0, 35))
def test_what_is_taken_is_the_front_and_the_rest_is_left(
    given_ranges: tuple[bytearray, list[tuple[int, int]]], wanted: int
) -> None:
    _, ranges = given_ranges
    before = pieces(ranges)
    taken = take_first(ranges, wanted)
    assert pieces(taken) == before[:wanted]
    assert pieces(ranges) == before[wanted:]
    assert total_count(taken) == min(wanted, len(before))


def test_marked_looks_no_further_than_it_is_told() -> None:
    marks = bytearray([1, 1, 0, 1, 1])
    assert ranges_of_marks(marks, 1, 4) == [(1, 1), (3, 1)]
    assert ranges_of_marks(marks, 2, 3) == []
