"""Two ways to blocks that are cut: from who has them quantised, or by the partials of all who have parts of them."""

import pytest
from tests.unit.planner.cut_blocks import reader, sources
from tests.unit.planner.given import ME, MY_TURN, demand, holder

from tensorhub_common.layout.layout import layout_digest
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.protocol.plans import Plan, Share
from tensorhub_common.protocol.ranges import Range, intersect_ranges, merge_ranges, subtract_ranges
from tensorhub_planner.catalog_view.holders import Holder, HolderSet
from tensorhub_planner.compiler.compiler import compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex
from tensorhub_planner.planning.fp8_strategies import derivable_scales, fp8_strategies, prove_folds
from tensorhub_planner.planning.verifier import PlanError

LAYOUTS = sources(70, 200, 300, 390)
FILLED = reader("filled")
ALL = {**LAYOUTS, layout_digest(FILLED): FILLED}
EXECUTION = NumberedProgram(compile_program("reader", reader(), LayoutIndex(ALL, set(LAYOUTS))))
PARTIALS = ((0, EXECUTION.partials),)
SCALES = ((EXECUTION.partials, EXECUTION.scales - EXECUTION.partials),)
VALUES = ((EXECUTION.scales, EXECUTION.values - EXECUTION.scales),)
TRAINER = [holder(f"t{n}", layout=layout, pieces=EXECUTION.given_by(layout)) for n, layout in enumerate(LAYOUTS)]
EVERYTHING = ((0, len(EXECUTION)),)


def engine(turn: int | None = None) -> Holder:
    """Return a replica that is quantised, or will be."""
    layout = layout_digest(FILLED)
    return holder("e", layout=layout, pieces=EXECUTION.given_by(layout), turn=turn)


def asked(*holders: Holder, pieces: tuple[Range, ...] | None = None, avoid: tuple[str, ...] = ()) -> list[object]:
    """Return what each way asks for."""
    wanted = demand(pieces=pieces, avoid=avoid)
    return [each.pieces for each, _ in fp8_strategies(EXECUTION, wanted, ME, HolderSet(tuple(holders)))]


def test_who_is_the_first_asks_for_partials_and_for_values_and_folds_the_scales() -> None:
    assert asked(*TRAINER) == [merge_ranges([*PARTIALS, *VALUES])]


def test_what_somebody_has_quantised_is_asked_for_as_that() -> None:
    """And by partials only if no plan comes of it."""
    assert asked(*TRAINER, engine()) == [merge_ranges([*SCALES, *VALUES]), merge_ranges([*PARTIALS, *VALUES])]
    assert asked(*TRAINER, engine(turn=MY_TURN.decided - 1))[0] == merge_ranges([*SCALES, *VALUES])


def test_nobody_is_counted_on_who_can_not_give() -> None:
    """A later turn, and one that has failed."""
    by_partials = [merge_ranges([*PARTIALS, *VALUES])]
    assert asked(*TRAINER, engine(turn=MY_TURN.decided + 1)) == by_partials
    assert asked(*TRAINER, engine(), avoid=("e",)) == by_partials


def test_on_the_first_way_nobody_is_asked_for_values_by_amax() -> None:
    _, holders = next(iter(fp8_strategies(EXECUTION, demand(), ME, HolderSet((*TRAINER, engine())))))
    for each in holders.able:
        assert not intersect_ranges(merge_ranges(EXECUTION.by_amax(each.layout)), each.pieces or ())


def test_partials_whose_values_are_given_out_are_asked_for_in_any_case() -> None:
    """Values wait for them at sources that have parts; who has all quantised is of no use for that."""
    assert asked(*TRAINER, engine(), pieces=((0, 1),)) == [((0, 1),)]


def test_what_needs_no_partial_is_asked_for_as_it_is() -> None:
    assert asked(*TRAINER, pieces=VALUES) == [VALUES]


def test_scales_stand_where_chains_end_if_all_their_partials_do() -> None:
    assert derivable_scales(EXECUTION, TRAINER) == SCALES
    assert subtract_ranges(SCALES, derivable_scales(EXECUTION, TRAINER[1:])) != ()
    assert derivable_scales(EXECUTION, []) == ()


def plan_of(*shares: tuple[Holder, tuple[Range, ...]]) -> Plan:
    given = [
        Share(source=each.source, transport="ucxx", pieces=merge_ranges(pieces), nbytes=0, why="", layout=each.layout)
        for each, pieces in shares
    ]
    return Plan(version=12, shares=tuple(given), why="")


BY_PARTS = [(each, each.pieces or ()) for each in TRAINER]


def test_a_good_plan_passes() -> None:
    prove_folds(plan_of((engine(), merge_ranges([*SCALES, *VALUES]))), demand(), EXECUTION)
    first, *others = BY_PARTS
    fresh = plan_of(first, *((each, subtract_ranges(pieces, first[1])) for each, pieces in others))
    prove_folds(fresh, demand(), EXECUTION)


@pytest.mark.parametrize(
    "wrong",
    [
        plan_of((engine(), SCALES)),
        plan_of((engine(), VALUES)),
        plan_of(*BY_PARTS[1:]),
        plan_of(*((each, subtract_ranges(pieces, ((0, 1),))) for each, pieces in BY_PARTS)),
    ],
    ids=["no values", "no scales", "a shard is missing", "a partial is missing"],
)
def test_a_plan_that_lacks_something_is_found(wrong: Plan) -> None:
    with pytest.raises(PlanError):
        prove_folds(wrong, demand(), EXECUTION)


def test_a_partial_that_is_waited_for_must_be_given() -> None:
    with pytest.raises(PlanError):
        prove_folds(plan_of((engine(), VALUES)), demand(pieces=((0, 1), *VALUES)), EXECUTION)
