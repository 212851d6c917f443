"""Sets of pieces as ranges, compared with Python's own sets."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.planner.given import pieces_of

from tensorhub_common.protocol.ranges import (
    Ranges,
    describe_ranges,
    intersect_ranges,
    merge_ranges,
    subtract_ranges,
    total_count,
)

PIECES = 40


some_pieces = st.lists(
    st.tuples(st.integers(0, PIECES - 1), st.integers(0, 6)).map(lambda r: (r[0], min(r[1], PIECES - r[0])))
)


def is_normal(ranges: Ranges) -> bool:
    return all(count >= 1 for _, count in ranges) and all(a + n < b for (a, n), (b, _) in pairwise(ranges))


@given(some_pieces, some_pieces)
def test_ranges_are_sets(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    """Union, intersection and difference agree with Python's, and are in their one normal form."""
    left, right = merge_ranges(one), merge_ranges(other)
    for found, expected in (
        (left, pieces_of(tuple(one))),
        (intersect_ranges(left, right), pieces_of(left) & pieces_of(right)),
        (subtract_ranges(left, right), pieces_of(left) - pieces_of(right)),
    ):
        assert pieces_of(found) == expected
        assert total_count(found) == len(expected)
        assert is_normal(found)


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ((), ""),
        (((3, 1), (5, 2)), "3, 5-6"),
        (tuple((i, 1) for i in range(0, 8, 2)), "0, 2, 4, 6"),
        (tuple((i, 1) for i in range(0, 12, 2)), "0, 2, 4, 6 and 2 more ranges"),
    ],
)
def test_told(ranges: Ranges, words: str) -> None:
    assert describe_ranges(ranges) == words
