"""A plan from as many sources as there may be goes through NATS in one message."""

from itertools import pairwise

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.planner.given import pieces_of

from tensorhub_common.errors import BadCommand
from tensorhub_common.protocol.plans import (
    PACK_BYTES_MIN,
    PLAN_BYTES_MAX,
    SHARES_MAX,
    Plan,
    Share,
    SourceId,
    packed,
    unpacked,
)
from tensorhub_common.protocol.ranges import (
    Ranges,
    describe_ranges,
    intersect_ranges,
    merge_ranges,
    subtract_ranges,
    total_count,
)
from tensorhub_common.protocol.subjects import NAME_CHARS_MAX

NATS_BYTES_MAX = 1024 * 1024
RUNS_OF_EACH = 20


def plan(sources: int) -> Plan:
    """Return a plan with the longest names, digests unlike each other, and runs of units all over the shard."""
    shares = tuple(
        Share(
            source=SourceId(f"{number:0{NAME_CHARS_MAX}}", 10**6, "t" * NAME_CHARS_MAX, number),
            transport="ucxx",
            pieces=tuple((run * sources + number, 1) for run in range(RUNS_OF_EACH)),
            nbytes=10**9 + number,
            why="the only holder of these parts in this site",
            layout=f"{number * 7919 % 2**128:032x}",
            root=f"{number**9 % 2**128:032x}",
            link="site:" + "s" * NAME_CHARS_MAX,
        )
        for number in range(sources)
    )
    return Plan(version=1, shares=shares, why="", program=f"{7**40:064x}")


def test_the_largest_plan_fits_into_a_message() -> None:
    answer = msgspec.json.encode(plan(SHARES_MAX))
    message = packed(answer)
    assert len(answer) > NATS_BYTES_MAX > len(message)
    assert unpacked(message) == answer
    short = b"{" * (PACK_BYTES_MIN - 1)
    assert packed(short) == unpacked(short) == short, "it goes as it is"


@pytest.mark.parametrize("damage", [slice(0, 5), slice(0, 100), slice(0, -1)])
def test_what_is_damaged_is_no_plan(damage: slice) -> None:
    with pytest.raises(BadCommand):
        unpacked(packed(msgspec.json.encode(plan(500)))[damage])


def test_nothing_inflates_beyond_its_bound() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(PLAN_BYTES_MAX + 1))
    with pytest.raises(BadCommand, match="more than"):
        unpacked(bomb)


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


@pytest.mark.parametrize("some", [((5, 1),), ((0, 3),), ((7, 3),), ((0, 1), (9, 1)), ((0, 10),)])
def test_what_would_be_made_again_as_it_is_is_taken(some: Ranges) -> None:
    """Holders have parts of all, and readers want all of it: so it is in nearly each look."""
    assert intersect_ranges(((0, 10),), some) is some
    assert len(some) > 1 or merge_ranges(some) is some
    assert merge_ranges(((3, 0),)) == ()


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
