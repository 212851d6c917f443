"""Cuts of one dimension: what falls to which rank, and what can't be divided."""

from typing import Any

import msgspec
import numpy as np
import pytest

from tensorhub.mapping.cuts import Cut, Padded, chunk, share


def test_shares_are_equal() -> None:
    assert [share(6, rank, 3) for rank in range(3)] == [Cut(6, 0, 2), Cut(6, 2, 4), Cut(6, 4, 6)]
    assert share(6, 1, 3).length == 2


def test_what_can_not_be_divided_equally_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match="num_attention_heads of 7 can't be divided equally among 2 ranks"):
        share(7, 0, 2, "num_attention_heads")


def test_chunks_are_those_of_torch_and_the_last_may_be_empty() -> None:
    assert [chunk(5, rank, 4) for rank in range(4)] == [Cut(5, 0, 2), Cut(5, 2, 4), Cut(5, 4, 5), Cut(5, 5, 5)]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 4)])
def test_a_cut_lies_within_its_dimension(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="are no cut of a dimension of 3"):
        Cut(3, start, stop)


@pytest.mark.parametrize(("rank", "ranks"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_is_one_of_its_group(rank: int, ranks: int) -> None:
    for make in (lambda: share(4, rank, ranks), lambda: chunk(4, rank, ranks), lambda: Padded(4, rank, ranks)):
        with pytest.raises(ValueError, match=f"rank is {rank} of {ranks}"):
            make()


def test_numbers_of_numpy_s_become_plain_ones() -> None:
    """A layout is encoded, and nobody but numpy could encode its numbers."""
    numbers: Any = map(np.int64, (8, 1, 2))
    size, rank, ranks = numbers
    for cut in (share(size, rank, ranks), chunk(size, rank, ranks), Padded(size, rank, ranks), Cut(size, rank, size)):
        assert {type(value) for value in msgspec.structs.asdict(cut).values()} == {int}


@pytest.mark.parametrize("wrong", [2.0, "2", None])
def test_what_is_no_whole_number_is_told(wrong: Any) -> None:
    for make in (lambda: Cut(4, 0, wrong), lambda: Padded(4, wrong, 8)):
        with pytest.raises(ValueError, match=f"is {wrong!r}; it is a whole number"):
            make()
