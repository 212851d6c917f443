"""Ranks are in their order, as those of a sorted list are, however many blocks they are in."""

from bisect import bisect_right
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_rollout.policy import rank_order
from tensorhub_rollout.policy.rank_order import BLOCK_MAX, Rank, RankOrder


def rank(length: float, index: int) -> Rank:
    return 0, False, -length, RequestId(1, index)


RANKS = st.builds(rank, st.integers(0, 3), st.integers(0, 12))


@given(st.lists(RANKS, max_size=60), RANKS)
def test_it_is_as_a_sorted_list_is(toggled: list[Rank], asked: Rank) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_order, "BLOCK_MAX", 3)
        order, ranks = RankOrder(), list[Rank]()
        for each in toggled:
            if each in ranks:
                ranks.remove(each)
                order.remove(each)
            else:
                ranks = sorted([*ranks, each])
                order.add(each)
            assert [*order] == ranks
            assert len(order) == len(ranks)
            assert [*order.behind(asked)] == ranks[bisect_right(ranks, asked) :]


def test_many_come_in_any_order_and_go() -> None:
    ranks = [rank(each, each) for each in range(5 * BLOCK_MAX)]
    order = RankOrder(Random(1).sample(ranks, len(ranks)))
    assert [*order] == ranks[::-1]
    for each in ranks[: 4 * BLOCK_MAX]:
        order.remove(each)
    assert [*order] == ranks[: 4 * BLOCK_MAX - 1 : -1]
