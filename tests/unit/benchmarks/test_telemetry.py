"""How telemetry on and off are compared: block by block, in both orders, without what a block leaves to the next."""

import pytest
from benchmarks import telemetry
from benchmarks.telemetry import Block, Comparison, Pair, compare


async def test_blocks_alternate_and_every_second_pair_begins_with_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "SETTLE_S", 0.0)
    told: list[str] = []

    async def switch(is_on: bool) -> None:  # noqa: FBT001 (as the comparison calls it)
        told.append("on" if is_on else "off")

    async def once() -> float:
        told.append(".")
        return 1.0 if "on" in told[-5:] else 0.5

    spent = iter(range(100))
    found = await compare("what", once, switch, lambda: float(next(spent)), 2, 0.0)
    rounds = ["."] * (telemetry.SETTLE_ROUNDS_MIN + telemetry.BLOCK_ROUNDS_MIN)
    assert told == ["on", *rounds, "off", *rounds, "off", *rounds, "on", *rounds]
    assert [len(pair.on.times) for pair in found.pairs] == [telemetry.BLOCK_ROUNDS_MIN] * 2
    assert found.pairs[0].on.processor == pytest.approx(1 / telemetry.BLOCK_ROUNDS_MIN)


def pair(on: float, off: float) -> Pair:
    return Pair(Block([on, on, 9.0], 0.05), Block([off, off, 9.0], 0.04))


def test_what_drifts_between_pairs_falls_out() -> None:
    """Telemetry costs 1 %, and the machine becomes slower and slower."""
    comparison = Comparison("what", [pair(1.01 * slow, slow) for slow in (1.0, 1.5, 2.0)])
    assert comparison.ratio() == pytest.approx(1 / 1.01)
    assert comparison.interval() == pytest.approx((1 / 1.01, 1 / 1.01))
    assert comparison.processor() == (0.05, 0.04)
    assert comparison.rounds() == 18


def test_pairs_that_disagree_widen_the_interval() -> None:
    low, high = Comparison("what", [pair(1.1, 1.0), pair(1.0, 1.1)] * 4).interval()
    assert low < 0.98
    assert high > 1.02


def test_the_table_says_what_is_missed() -> None:
    table = telemetry.words([Comparison("slow", [pair(1.1, 1.0)]), Comparison("even", [pair(1.0, 1.0)])])
    assert [line.rstrip("| ").split()[-1] for line in table.splitlines()[2:]] == ["missed", "met"]
