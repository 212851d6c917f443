"""Ranks: what falls to a pipeline stage and to an expert-parallel rank."""

import pytest

from tensorhub.mapping.ranks import Ranks, chosen_experts, experts_of, stage


@pytest.mark.parametrize(
    ("layers", "ranks", "sizes"),
    [
        (8, 1, [8]),
        (8, 4, [2, 2, 2, 2]),
        (9, 4, [2, 2, 3, 2]),
        (10, 4, [2, 3, 3, 2]),
        (11, 4, [3, 3, 3, 2]),
        (3, 2, [2, 1]),
    ],
)
def test_left_over_layers_go_to_the_stages_before_the_last(layers: int, ranks: int, sizes: list[int]) -> None:
    stages = [stage(layers, rank, ranks) for rank in range(ranks)]
    assert list(map(len, stages)) == sizes
    assert [layer for each in stages for layer in each] == list(range(layers))


def test_a_stage_has_a_layer() -> None:
    with pytest.raises(ValueError, match="2 layers can't be divided among 3 pipeline stages"):
        stage(2, 0, 3)


def test_experts_are_neighbours_or_take_turns() -> None:
    assert [experts_of(7, rank, 3) for rank in range(3)] == [(0, 1, 2), (3, 4), (5, 6)]
    assert [experts_of(7, rank, 3, "round_robin") for rank in range(3)] == [(0, 3, 6), (1, 4), (2, 5)]
    with pytest.raises(ValueError, match="placement is 'other'; possible are 'linear', 'round_robin'"):
        experts_of(7, 0, 3, "other")


def test_chosen_experts_keep_their_order() -> None:
    assert chosen_experts([3, 1, 3], 4) == (3, 1, 3)
    with pytest.raises(ValueError, match="there is no expert 4: the model has 4"):
        chosen_experts([3, 4], 4)


def test_what_an_expert_is_divided_among() -> None:
    assert Ranks(tp_rank=1, tp_size=2).expert_tp == (1, 2)
    assert Ranks(tp_rank=1, tp_size=2, ep_rank=1, ep_size=2).expert_tp == (0, 1)
    assert Ranks(tp_rank=1, tp_size=2, expert_tp_rank=3, expert_tp_size=4).expert_tp == (3, 4)


@pytest.mark.parametrize("group", ["tp", "pp", "ep", "expert_tp"])
def test_a_rank_is_one_of_its_group(group: str) -> None:
    with pytest.raises(ValueError, match=f"{group}_rank is 2 of 2"):
        Ranks(**{f"{group}_rank": 2, f"{group}_size": 2})


def test_ranks_are_told_in_a_few_words() -> None:
    assert Ranks().told == "one rank"
    assert Ranks(tp_rank=1, tp_size=2, ep_rank=3, ep_size=4).told == "tp 1 of 2, ep 3 of 4"
