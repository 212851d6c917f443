"""How telemetry on and off are compared: round by round, in an order drawn by lot, with what is done later."""

import pytest
from benchmarks.side_by_side import telemetry
from benchmarks.side_by_side.telemetry import PAIRS_MIN, Comparison, Pair, compare


async def test_rounds_are_switched_in_turn_and_both_orders_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "SETTLE_S", 0.0)
    monkeypatch.setattr(telemetry, "PAIRS_MIN", 20)
    told: list[bool] = []

    async def switch(is_on: bool) -> None:  # noqa: FBT001 (as the comparison calls it)
        told.append(is_on)

    async def once() -> float:
        return 1.0 if told[-1] else 0.5

    spent = iter((3.0, 7.0))

    async def costs() -> float:
        return next(spent)

    found = await compare("what", once, switch, costs, 0.0)
    assert found.pairs == [Pair(1.0, 0.5)] * 20
    assert found.later == pytest.approx(4.0 / 20)
    orders = [tuple(told[at : at + 2]) for at in range(0, len(told), 2)]
    assert set(orders) == {(True, False), (False, True)}


async def test_it_measures_a_few_pairs_even_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "SETTLE_S", 0.0)

    async def switch(is_on: bool) -> None:  # noqa: FBT001 (as the comparison calls it)
        assert is_on in (True, False)

    async def second() -> float:
        return 1.0

    assert len((await compare("what", second, switch, second, 0.0)).pairs) == PAIRS_MIN


def test_what_drifts_between_pairs_falls_out() -> None:
    """Telemetry costs 1 %, and the machine becomes slower and slower."""
    comparison = Comparison("what", [Pair(1.01 * slow, slow) for slow in (1.0, 1.5, 2.0)])
    assert comparison.ratio() == pytest.approx(1 / 1.01)
    assert comparison.interval() == pytest.approx((1 / 1.01, 1 / 1.01))
    assert comparison.medians() == pytest.approx((1.515, 1.5))


def test_what_is_done_later_counts_by_its_share_of_a_cycle() -> None:
    comparison = Comparison("what", [Pair(1.0, 1.0)] * 3, cycle=2.0, later=0.1)
    assert comparison.ratio() == pytest.approx(1.0)
    assert comparison.whole() == pytest.approx(1 / 1.05)
    assert comparison.interval() == pytest.approx((1 / 1.05, 1 / 1.05))


def test_a_round_in_which_the_machine_did_something_else_changes_little() -> None:
    comparison = Comparison("what", [Pair(1.01, 1.0)] * 18 + [Pair(30.0, 1.0), Pair(1.0, 40.0)])
    assert comparison.ratio() == pytest.approx(1 / 1.01)


def test_pairs_that_disagree_widen_the_interval() -> None:
    low, high = Comparison("what", [Pair(1.1, 1.0), Pair(1.0, 1.1)] * 4).interval()
    assert low < 0.98
    assert high > 1.02


def test_the_table_says_what_is_missed() -> None:
    table = telemetry.words([Comparison("slow", [Pair(1.1, 1.0)]), Comparison("even", [Pair(1.0, 1.0)])])
    assert [line.rstrip("| ").split()[-1] for line in table.splitlines()[2:]] == ["missed", "met"]
