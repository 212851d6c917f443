"""Which partials are wanted, and what waits for folds: case by case."""

from tests.unit.planner.cut_blocks import reader, sources

from tensorhub_agent.primitives.ranges import total_count
from tensorhub_agent.transfer.fold_progress import FoldProgress
from tensorhub_common.programs.amax_reductions import AmaxReductions
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.protocol.plans import Plan, Share, SourceId
from tensorhub_common.protocol.ranges import Range
from tensorhub_planner.compiler.compiler import compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex

LAYOUTS = sources(70, 200, 300, 390)
EXECUTION = NumberedProgram(compile_program("reader", reader(), LayoutIndex(LAYOUTS, set(LAYOUTS))))
FOLDS = AmaxReductions(EXECUTION)
UNITS = len(EXECUTION)
PARTIALS = [(0, EXECUTION.partials)]
SCALE = (EXECUTION.partials, 1)
VALUE = (EXECUTION.scales, 1)
REST = [(EXECUTION.partials, UNITS - EXECUTION.partials)]


def ranges(units: list[int]) -> list[Range]:
    return [(unit, 1) for unit in units]


def partials_of(unit: Range) -> list[Range]:
    return ranges(FOLDS.partials_of(FOLDS.of[unit[0]]))


def units_of(some: list[Range]) -> set[int]:
    return {unit for first, count in some for unit in range(first, first + count)}


def plan(*pieces: Range) -> Plan:
    share = Share(source=SourceId("a", 1, "r", 0), transport="local", pieces=pieces, nbytes=0, why="")
    return Plan(version=1, shares=(share,), why="")


def asleep(folding: FoldProgress) -> int:
    return total_count(next(iter(folding.places())))


def test_without_folds_there_is_nothing_to_wait_for() -> None:
    folding = FoldProgress(None, 5)
    assert folding.choice([(0, 5)]) == ((0, 5),)
    assert folding.spread(plan((0, 3)), [(0, 5)], 5)[1] == [(3, 2)]
    assert folding.follow([(3, 2)]) == ([(3, 2)], [])
    assert (folding.partials, folding.request_partials([(0, 5)]), folding.defer_partials([])) == (0, [], ([], []))


def test_partials_sleep_and_a_planner_may_choose_of_them() -> None:
    """Of the folds that something loose belongs to, and of no others."""
    folding = FoldProgress(FOLDS, UNITS)
    assert asleep(folding) == EXECUTION.partials
    assert units_of(list(folding.choice([VALUE]))) == units_of([VALUE, *partials_of(VALUE)])
    assert folding.choice(REST) == ((0, UNITS),)


def test_what_a_plan_names_wakes_and_the_rest_sleeps_on() -> None:
    folding = FoldProgress(FOLDS, UNITS)
    given, left = folding.spread(plan(*partials_of(SCALE)), [SCALE, VALUE], UNITS)
    assert units_of(given[0][1]) == units_of(partials_of(SCALE))
    assert units_of(left) == units_of([SCALE, VALUE])
    assert asleep(folding) == EXECUTION.partials - len(partials_of(SCALE))


def test_scales_follow_of_a_fold_that_is_under_way_and_of_no_other() -> None:
    folding = FoldProgress(FOLDS, UNITS)
    assert folding.follow([SCALE]) == ([SCALE], [])
    folding.request_partials([SCALE])
    assert folding.follow([SCALE, VALUE]) == ([VALUE], [])
    assert folding.folded(partials_of(SCALE)[:-1]) == ([], False)
    assert folding.folded(partials_of(SCALE)[-1:]) == ([SCALE], True)
    assert folding.follow([SCALE]) == ([], [SCALE]), "whoever was to bring it is gone, and the fold is known"


def test_what_is_loose_on_either_side_of_the_scales_stays_loose() -> None:
    """Of one range the scales follow, partials and all behind the scales are as loose as before."""
    folding = FoldProgress(FOLDS, UNITS)
    folding.request_partials([SCALE])
    rest, known = folding.follow([(0, UNITS)])
    following = set(FOLDS.rest_of(FOLDS.of[SCALE[0]]))
    assert SCALE[0] in following
    assert sorted(unit for first, count in rest for unit in range(first, first + count)) == [
        unit for unit in range(UNITS) if unit not in following
    ]
    assert known == []


def test_what_is_unknown_are_values_of_folds_alone() -> None:
    folding = FoldProgress(FOLDS, UNITS)
    assert len(folding.unknown) == UNITS
    assert units_of([(0, EXECUTION.scales), (EXECUTION.values, UNITS - EXECUTION.values)]).isdisjoint(
        unit for unit, mark in enumerate(folding.unknown) if mark
    )


def test_values_are_unknown_until_their_last_partial_is_folded() -> None:
    folding = FoldProgress(FOLDS, UNITS)
    assert folding.unknown[VALUE[0]]
    folding.folded(partials_of(VALUE)[:-1])
    assert folding.unknown[VALUE[0]]
    folding.folded(partials_of(VALUE)[-1:])
    assert not folding.unknown[VALUE[0]]
    assert folding.request_partials([VALUE]) == []


def test_partials_that_nobody_has_sleep_and_what_waited_for_them_is_told() -> None:
    """Then a plan may do without them."""
    folding = FoldProgress(FOLDS, UNITS)
    folding.request_partials([SCALE, VALUE])
    folding.follow([SCALE])
    scales, values = folding.defer_partials([partials_of(SCALE)[0], partials_of(VALUE)[0]])
    assert scales == [SCALE]
    assert VALUE in values
    assert units_of(list(folding.choice([SCALE]))) == {SCALE[0], partials_of(SCALE)[0][0]}


def test_ranges_are_divided_where_partials_end() -> None:
    folding = FoldProgress(FOLDS, UNITS)
    assert folding.apart([(0, UNITS)]) == (PARTIALS, REST)
    assert folding.apart([(1, 2), VALUE]) == ([(1, 2)], [VALUE])
