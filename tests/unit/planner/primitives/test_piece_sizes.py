"""Sizes of pieces, and runs of them."""

from itertools import accumulate, pairwise

from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.planner.given import pieces_of

from tensorhub_common.protocol.ranges import (
    NOTHING,
    Ranges,
    merge_ranges,
    total_count,
)
from tensorhub_planner.primitives.piece_sizes import ENDS_KEPT_MAX, PieceSizes, cut

PIECES = 40
some_pieces = st.lists(
    st.tuples(st.integers(0, PIECES - 1), st.integers(0, 6)).map(lambda r: (r[0], min(r[1], PIECES - r[0])))
)
some_sizes = st.lists(st.integers(1, 9), min_size=PIECES, max_size=PIECES).map(PieceSizes)


def is_normal(ranges: Ranges) -> bool:
    return all(count >= 1 for _, count in ranges) and all(a + n < b for (a, n), (b, _) in pairwise(ranges))


@given(some_sizes, some_pieces, st.lists(st.floats(0, 200), min_size=1, max_size=6))
@example(PieceSizes([2] * PIECES), [(0, PIECES)], [2.5, 0.0])
@example(PieceSizes([2] * PIECES), [(0, 2), (5, 2)], [3.5, 0.0])
@example(PieceSizes([2] * PIECES), [(0, 2), (5, 2), (9, 2)], [9.5, 0.0])
def test_cut_gives_a_piece_to_one_run(sizes: PieceSizes, pieces: list[tuple[int, int]], targets: list[float]) -> None:
    """The runs follow each other, are all of it together, and each ends at the edge that is nearest to its target."""
    whole = merge_ranges(pieces)
    runs = cut(whole, sizes, targets)
    assert len(runs) == len(targets)
    assert merge_ranges(r for run in runs for r in run) == whole
    assert sum(map(total_count, runs)) == total_count(whole)
    assert all(is_normal(run) for run in runs)
    edges = list(accumulate((sizes.of(((piece, 1),)) for piece in sorted(pieces_of(whole))), initial=0))
    goal, end = 0.0, 0
    for run, target in zip(runs[:-1], targets[:-1], strict=True):
        goal, end = goal + target, end + sizes.of(run)
        assert end in edges
        assert abs(end - goal) <= min(abs(edge - goal) for edge in edges) + 1e-9


def test_sizes() -> None:
    sizes = PieceSizes([10, 20, 30])
    assert len(sizes) == 3
    assert sizes.all() == ((0, 3),)
    assert sizes.of(((0, 1), (2, 1))) == 40
    assert [sizes.fitting(0, 3, nbytes) for nbytes in (0, 4, 6, 19, 21, 31, 46, 1000)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert PieceSizes([]).all() == NOTHING


repeating = st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=4), st.integers(0, 3)), max_size=5)


@given(repeating, st.data())
def test_sizes_that_repeat_are_those_written_out(some: list[tuple[list[int], int]], data: st.DataObject) -> None:
    flat = [size for sizes, times in some for size in sizes * times]
    written, repeated = (
        PieceSizes(flat),
        PieceSizes.repeated((list(accumulate(sizes, initial=0)), times) for sizes, times in some),
    )
    assert len(repeated) == len(written) == len(flat)
    assert repeated.all() == written.all()
    if not flat:
        return
    first = data.draw(st.integers(0, len(flat) - 1))
    count = data.draw(st.integers(1, len(flat) - first))
    assert repeated.of(((first, count),)) == sum(flat[piece] for piece in pieces_of(((first, count),)))
    nbytes = data.draw(st.floats(0, sum(flat)))
    assert repeated.fitting(first, count, nbytes) == written.fitting(first, count, nbytes)


def test_the_ends_of_so_many_repeated_pieces_are_kept_at_most() -> None:
    """And those that are asked for after that are right all the same."""
    pieces = 3 * ENDS_KEPT_MAX
    sizes = PieceSizes.repeated([((0, 5, 12), pieces // 2)])
    for _ in range(2):
        assert [sizes.of(((piece, 1),)) for piece in range(pieces)] == [5, 7] * (pieces // 2)
    assert len(sizes._ends._known) <= ENDS_KEPT_MAX  # type: ignore[attr-defined]
