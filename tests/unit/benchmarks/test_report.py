"""Goals, tables and the page, made from the figures of a run."""

import pytest
from benchmarks.page import put
from benchmarks.side_by_side import goals, report
from benchmarks.side_by_side.results import MEMCPY, Line, Part, Result, Round, Small, faster


def line(title: str, one: list[float], four: list[float], *, is_ours: bool = False) -> Line:
    """Make a line whose rounds took so many memcpys of 0.1 s."""
    stages = ("round", "plan", "lease", "start", "first", "wire", "verify", "ready")
    besides = dict.fromkeys((*stages, "publish", "unpublish", "source's processor"), 0.001) if is_ours else {}
    rounds = {
        readers: [
            Round(number=number, seconds=each / 10, memcpy_s=0.1, besides=besides)
            for number, each in enumerate(ratios, start=1)
        ]
        for readers, ratios in (("1", one), ("4", four))
    }
    return Line(title=title, is_ours=is_ours, rounds=rounds)


def result(*, ours: float, perftest: float, digests: bool = False) -> Result:
    """Make a run over ucxx."""
    lines = [
        line(MEMCPY, [1, 1, 1], [4, 4, 4]),
        line("TensorHub, ucxx", [ours] * 3, [4 * ours] * 3, is_ours=True),
        line(goals.PERFTEST, [perftest] * 3, [4 * perftest] * 3),
        line("sockets, send", [3.0] * 3, [12.0] * 3),
        Line(title="Monarch, TCP", is_ours=False, rounds={}, failed="there is no such wheel"),
    ]
    return Result(machine={}, mib=1024, parts=[Part(transport="ucxx", digests=digests, lines=lines)])


def test_goals_over_ucx_are_met_when_we_are_as_fast_as_its_own_measure() -> None:
    found = {goal.what: goal for goal in goals.of(result(ours=2.0, perftest=2.0))}
    assert found["ucxx, digests off: 1→1"].measured == "1.00 of ucx_perftest"
    assert found["ucxx, digests off: ahead of sockets, send"].measured == "1.50 / 1.50 of its speed"
    assert all(goal.met for goal in found.values())


def test_goals_over_ucx_are_missed_when_we_are_slower() -> None:
    assert not any(goal.met for goal in goals.of(result(ours=4.0, perftest=2.0)))


def test_digests_on_over_ucx_have_no_goal() -> None:
    assert goals.of(result(ours=4.0, perftest=2.0, digests=True)) == []


def test_a_ratio_is_taken_within_rounds_that_both_have() -> None:
    ours, other = line("a", [1, 2, 4], [1, 1, 1]), line("b", [3, 6, 12], [1, 1, 1])
    del other.rounds["1"][1]
    assert faster(ours, other, 1) == pytest.approx(3.0)
    assert faster(ours, Line(title="c", is_ours=False, rounds={}), 1) is None


def test_reads_on_one_host_are_held_against_memcpy_and_the_source_against_its_processor() -> None:
    ours = line("TensorHub, local", [1] * 3, [4] * 3, is_ours=True)
    run = Result(machine={}, mib=1024, parts=[Part(transport="local", digests=True, lines=[ours])])
    assert [goal.met for goal in goals.of(run)] == [True, False, True, True]
    for each in ours.of(4):
        each.besides["source's processor"] = 0.1
    assert [goal.met for goal in goals.of(run)] == [True, False, True, False]


def test_one_that_failed_is_told_and_not_judged() -> None:
    run = result(ours=2.0, perftest=2.0)
    assert "Monarch, TCP is left out: there is no such wheel." in report.whole(run)
    assert not any("Monarch" in goal.what for goal in goals.of(run))


def test_without_our_own_figures_nothing_is_judged() -> None:
    run = result(ours=2.0, perftest=2.0)
    run.parts[0].ours.rounds.clear()
    assert goals.of(run) == []
    assert "TensorHub" in report.whole(run)


def test_the_small_model_is_judged_by_its_median() -> None:
    run = result(ours=2.0, perftest=2.0)
    run.parts[0].small = Small(ready=[0.01, 0.014, 0.5], behind=[0.01] * 3, stages={}, processor={}, entries=40)
    assert goals.of(run)[-1].measured == "14.0 ms"
    assert goals.of(run)[-1].met


def test_every_row_of_a_table_is_as_wide_as_its_head() -> None:
    rows = report.table(("a", "long head"), [("long cell", "1"), ("b", "22")]).splitlines()
    assert len({len(row) for row in rows}) == 1


def test_a_page_keeps_what_stands_around_the_markers() -> None:
    page = "before\n<!-- run: begin (written by a command) -->\nold\n<!-- run: end -->\nafter\n"
    assert put(put(page, "run", "new"), "run", "newer").splitlines() == [
        "before",
        "<!-- run: begin (written by a command) -->",
        "",
        "newer",
        "",
        "<!-- run: end -->",
        "after",
    ]
    with pytest.raises(ValueError, match="lacks the markers of 'soak'"):
        put(page, "soak", "new")
