"""Digests and their places in a list, ranges and marks of pieces, and moments at which things want to be looked at."""

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tensorhub_agent.primitives.deadlines import DeadlineHeap
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES, digest_at, piece_digest, root_digest
from tensorhub_agent.primitives.ranges import (
    merge_ranges,
    ranges_of_gaps,
    ranges_of_marks,
    set_marks,
    split_by_marks,
    take_first,
    total_count,
)


def test_digests_are_those_of_every_version() -> None:
    """Known values: agents of two versions must find the same digests, of any memory."""
    assert piece_digest(b"").hex() == root_digest(b"") == "99aa06d3014798d86001c324468d497f"
    assert piece_digest(b"tensorhub").hex() == "23ce45cdc8b6a7415a47f98d54534ad2"
    assert piece_digest(memoryview(bytearray(b"tensorhub"))[3:]) == piece_digest(b"sorhub")
    one, two = piece_digest(b"1"), piece_digest(b"2")
    assert root_digest(one + two) == "0dc760cecc476072a538771d85e1d71e" != root_digest(two + one)
    assert root_digest(one) != one.hex(), "a root of one piece is not that piece's digest"
    assert [digest_at(one + two, piece) for piece in range(3)] == [one, two, b""]
    assert len(one) == PIECE_DIGEST_BYTES


# Ranges and marks say the same set.


@st.composite
def marks_and_ranges(draw: st.DrawFn) -> tuple[bytearray, list[tuple[int, int]]]:
    """Marks, and ranges that don't overlap, in any order."""
    marks = bytearray(draw(st.lists(st.booleans(), min_size=1, max_size=30)))
    cuts = sorted(draw(st.sets(st.integers(0, len(marks)), max_size=8)))
    ranges = [(first, stop - first) for first, stop in pairwise(cuts) if draw(st.booleans())]
    return marks, draw(st.permutations(ranges))


def pieces(ranges: list[tuple[int, int]]) -> list[int]:
    return [piece for first, count in ranges for piece in range(first, first + count)]


@given(marks_and_ranges(), st.integers(0, 35))
def test_marks_and_ranges_are_split_taken_and_merged_as_sets_in_order(
    drawn: tuple[bytearray, list[tuple[int, int]]], wanted: int
) -> None:
    marks, ranges = drawn
    before, again = pieces(ranges), bytearray(len(marks))
    set_marks(again, ranges_of_marks(marks, 0, len(marks)))
    assert again == marks
    set_marks(again, ranges_of_gaps(marks))
    assert all(again)
    with_mark, without = split_by_marks(marks, ranges)
    assert pieces(with_mark) == [piece for piece in before if marks[piece]]
    assert pieces(without) == [piece for piece in before if not marks[piece]]
    assert all(count > 0 for _, count in [*with_mark, *without])
    merged = merge_ranges(ranges)
    assert pieces(merged) == sorted(before)
    assert all(first + count < after for (first, count), (after, _) in pairwise(merged)), "touching ones are joined"
    taken = take_first(ranges, wanted)
    assert (pieces(taken), pieces(ranges)) == (before[:wanted], before[wanted:])
    assert total_count(taken) == min(wanted, len(before))


def test_runs_are_kept_whole_and_marks_are_looked_for_no_further_than_is_told() -> None:
    assert split_by_marks(bytearray([1, 1, 0, 0, 0, 1]), [(0, 6)]) == ([(0, 2), (5, 1)], [(2, 3)])
    assert split_by_marks(bytearray([1, 1, 1]), [(1, 1)]) == ([(1, 1)], [])
    marks = bytearray([1, 1, 0, 1, 1])
    assert ranges_of_marks(marks, 1, 4) == [(1, 1), (3, 1)]
    assert ranges_of_marks(marks, 2, 3) == []


def test_what_is_taken_goes_on_over_ranges_and_the_rest_of_the_last_one_stays() -> None:
    ranges = [(0, 2), (5, 3), (9, 4)]
    assert take_first(ranges, 3) == [(0, 2), (5, 1)]
    assert ranges == [(6, 2), (9, 4)]


# Deadlines.


def test_what_is_due_together_comes_in_the_order_of_coming() -> None:
    deadlines: DeadlineHeap[str] = DeadlineHeap()
    for name in ("c", "a", "b", "gone", "back"):
        deadlines.note(name, 2.0)
    deadlines.note("c", 1.0)
    deadlines.note("gone", None)
    deadlines.forget("a")
    deadlines.note("a", 2.0)
    assert deadlines.earliest() == 1.0
    assert deadlines.due(2.0) == ["c", "b", "back", "a"], "a name that comes back stands behind"
    assert (deadlines.earliest(), deadlines.due(100.0)) == (None, [])


def test_deadlines_are_those_of_the_last_word_on_each() -> None:
    chance, deadlines, plain = random.Random(4), DeadlineHeap[int](), dict[int, float]()
    for _ in range(5000):
        name, when = chance.randrange(40), chance.choice([None, chance.randrange(100), chance.randrange(100)])
        deadlines.note(name, when)
        plain.pop(name, None)
        if when is not None:
            plain[name] = when
        assert deadlines.earliest() == min(plain.values(), default=None)
        if not chance.randrange(50):
            now = chance.randrange(30)
            due = {name for name, when in plain.items() if when <= now}
            assert set(deadlines.due(now)) == due
            plain = {name: when for name, when in plain.items() if name not in due}
