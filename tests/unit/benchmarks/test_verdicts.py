"""What benchmarks conclude from their figures: growth in a soak, goals met or missed, and what telemetry costs."""

import random

import pytest
from benchmarks import page
from benchmarks.side_by_side import goals, report, telemetry
from benchmarks.side_by_side.results import MEMCPY, Line, Part, Result, Round, faster
from benchmarks.side_by_side.telemetry import Comparison, Pair, compare
from benchmarks.soak.growth import KIB, MIB, SLACK, growth
from benchmarks.soak.run import OF_HUB, OF_PROCESS, SETTLED_S, WINDOWS_S, Samples, words

UPDATES = list(range(1000, 2000, 20))
NOISE = [random.Random(1).uniform(0, MIB) for _ in UPDATES]
WINDOW_S = max(WINDOWS_S.values())
PER_S = 60


LEAKING = [4096 * update + each for update, each in zip(UPDATES, NOISE, strict=True)]


@pytest.mark.parametrize(
    ("process", "metric", "values", "is_bounded"),
    [
        pytest.param("agent-0", "fds", [20.0 + update // 200 for update in UPDATES], False, id="fd leak"),
        pytest.param("agent-0", "fds", [20.0] * 30 + [21.0] * 20, True, id="one step"),
        pytest.param("agent-0", "threads", [100.0 - update / 100 for update in UPDATES], True, id="falling"),
        pytest.param("agent-0", "memory", LEAKING, False, id="leak under noise"),
        pytest.param("agent-0", "memory", [*NOISE[:-3], 100.0 * MIB, *NOISE[-2:]], True, id="noise and a peak"),
        pytest.param("registry", "memory", [6.0 * KIB * update for update in UPDATES], True, id="the log's books"),
        pytest.param("registry", "memory", [16.0 * KIB * update for update in UPDATES], False, id="more than those"),
    ],
)
def test_growth_is_told_from_noise(process: str, metric: str, values: list[float], is_bounded: bool) -> None:  # noqa: FBT001 (a column of the table)
    assert growth(process, metric, UPDATES, values).is_bounded is is_bounded
    assert {*OF_PROCESS, *OF_HUB} == set(SLACK)


@pytest.mark.parametrize(("leak", "grown"), [(0, []), (2 * KIB, [("agent-0", "memory")])])
def test_a_soak_is_judged_behind_the_window_that_fills(leak: int, grown: list[tuple[str, str]]) -> None:
    """NATS remembers message ids for the window."""
    samples = Samples()
    for second in range(0, int(WINDOW_S + SETTLED_S) + 1, 2):
        updates = PER_S * second
        nats = 20 * MIB + min(updates, PER_S * WINDOW_S) * 16 * KIB
        samples.add(updates, second, {("nats", "memory"): nats, ("agent-0", "memory"): 35 * MIB + leak * updates})
    verdict = samples.verdict()
    assert [(each.process, each.metric) for each in verdict if not each.is_bounded] == grown
    assert ("something grew" if grown else "nothing grew") in words("local", samples, verdict)
    filling = slice(samples.first_settled // 2, samples.first_settled)
    assert not growth("nats", "memory", samples.updates[filling], samples.series["nats", "memory"][filling]).is_bounded


def line(title: str, one: list[float], *, is_ours: bool = False) -> Line:
    """Make a line whose rounds took so many memcpys of 0.1 s for one reader, and four times as many for four."""
    stages = ("round", "plan", "lease", "start", "first", "wire", "verify", "ready")
    besides = dict.fromkeys((*stages, "publish", "unpublish", "source's processor"), 0.001) if is_ours else {}
    rounds = {
        str(readers): [
            Round(number=number, seconds=each * readers / 10, memcpy_s=0.1, besides=besides)
            for number, each in enumerate(one, start=1)
        ]
        for readers in (1, 4)
    }
    return Line(title=title, is_ours=is_ours, rounds=rounds)


def result(ours: float, *, digests: bool = False) -> Result:
    """Make a run over ucxx, in which `ucx_perftest` took two memcpys."""
    lines = [
        line(MEMCPY, [1, 1, 1]),
        line("TensorHub, ucxx", [ours] * 3, is_ours=True),
        line(goals.PERFTEST, [2.0] * 3),
        Line(title="Monarch, TCP", is_ours=False, rounds={}, failed="there is no such wheel"),
    ]
    return Result(machine={}, mib=1024, parts=[Part(transport="ucxx", digests=digests, lines=lines)])


def test_goals_are_met_or_missed_and_what_failed_is_not_judged() -> None:
    assert {goal.met for goal in goals.of(result(2.0))} == {True}
    assert {goal.met for goal in goals.of(result(4.0))} == {False}
    assert goals.of(result(4.0, digests=True)) == []
    assert "Monarch, TCP is left out: there is no such wheel." in report.whole(result(2.0))
    assert not any("Monarch" in goal.what for goal in goals.of(result(2.0)))
    # A ratio is taken within rounds that both have.
    ours, other = line("a", [1, 2, 4]), line("b", [3, 6, 12])
    del other.rounds["1"][1]
    assert faster(ours, other, 1) == pytest.approx(3.0)
    assert faster(ours, Line(title="c", is_ours=False, rounds={}), 1) is None


async def test_telemetry_on_and_off_are_measured_in_pairs_in_either_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "SETTLE_S", 0.0)
    monkeypatch.setattr(telemetry, "PAIRS_MIN", 20)
    told: list[bool] = []
    spent = iter((3.0, 7.0))

    async def switch(is_on: bool) -> None:  # noqa: FBT001 (as the comparison calls it)
        told.append(is_on)

    async def once() -> float:
        return 1.0 if told[-1] else 0.5

    async def costs() -> float:
        return next(spent)

    found = await compare("what", once, switch, costs, 0.0)
    assert found.pairs == [Pair(1.0, 0.5)] * 20
    assert found.later == pytest.approx(4.0 / 20)
    assert {tuple(told[at : at + 2]) for at in range(0, len(told), 2)} == {(True, False), (False, True)}


def test_what_telemetry_costs_is_told_from_what_drifts() -> None:
    drifting = Comparison("what", [Pair(1.01 * slow, slow) for slow in (1.0, 1.5, 2.0)])
    assert drifting.ratio() == pytest.approx(1 / 1.01)
    later = Comparison("what", [Pair(1.0, 1.0)] * 3, cycle=2.0, later=0.1)
    assert later.whole() == pytest.approx(1 / 1.05)
    low, high = Comparison("what", [Pair(1.1, 1.0), Pair(1.0, 1.1)] * 4).interval()
    assert low < 0.98
    assert high > 1.02
    table = telemetry.words([Comparison("slow", [Pair(1.1, 1.0)]), Comparison("even", [Pair(1.0, 1.0)])])
    assert [line.rstrip("| ").split()[-1] for line in table.splitlines()[2:]] == ["missed", "met"]


def test_a_page_keeps_what_is_around_the_markers() -> None:
    text = "before\n<!-- run: begin (written by a command) -->\nold\n<!-- run: end -->\nafter\n"
    shown = page.put(page.put(text, "run", "new"), "run", "newer").split()
    assert (shown[0], shown[-1], "newer" in shown, "new" in shown) == ("before", "after", True, False)
    with pytest.raises(ValueError, match="lacks the markers of 'soak'"):
        page.put(text, "soak", "new")
