"""Who goes by a program, of which layouts it is made, and how holders of any layout are seen in its units."""

from typing import Any

import msgspec
import pytest
from tests.unit.planner.cut_blocks import reader, sources
from tests.unit.planner.given import MY_TURN, SEAT, TOPOLOGY, demand, holder

from tensorhub_common.layout.layout import Layout, TensorEntry, layout_of
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.protocol.plans import Plan, PlanRequest, ReadPriority, Refusal
from tensorhub_planner.catalog_view.holders import Candidates, Holder, HolderSet, ReplicaHolders
from tensorhub_planner.compiler.compiler import compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.planning.decision import ProgramPlanDecision
from tensorhub_planner.planning.plan import OnlyOtherLayouts, PlanOutcome
from tensorhub_planner.planning.plan_cache import PlanCache
from tensorhub_planner.planning.resharding import (
    in_units,
    program_sources,
    reads_by_program,
    source_set,
    turns_to_program,
)
from tensorhub_planner.planning.wan_fanout import joins_fanout
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_planner.primitives.piece_sizes import PieceSizes
from tensorhub_planner.primitives.source_set import LayoutSet

WITH_ROLL = pytest.mark.parametrize("with_roll", [False, True])


def found(
    *able: Holder, originals: tuple[str, ...] = (), draining: bool = False, with_roll: bool = False
) -> Candidates:
    holders = HolderSet(able, draining=draining)
    roll = ReplicaHolders(holders, TOPOLOGY, originals) if with_roll else None
    return Candidates(SEAT, holders, TOPOLOGY, originals, roll)


def wants(**changes: Any) -> PlanRequest:
    return msgspec.structs.replace(demand(), **changes)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (wants(), False),
        (wants(root=None), True),
        (wants(root=None, mapped=True), False),
        (wants(program="p"), True),
    ],
)
def test_a_demand_goes_by_a_program_where_the_log_knows_no_root_of_its_layout(
    asked: PlanRequest, *, expected: bool
) -> None:
    assert reads_by_program(asked) is expected


UNAVAILABLE = Refusal(error="VersionUnavailable", reason="")


@pytest.mark.parametrize(
    ("asked", "answer", "whole", "expected"),
    [
        (wants(), OnlyOtherLayouts(SEAT, holder("a", layout="x" * 64), 1), False, True),
        (wants(), UNAVAILABLE, True, True),
        (wants(), UNAVAILABLE, False, False),
        (wants(mapped=True), UNAVAILABLE, True, False),
        (wants(), Refusal(error="BadCommand", reason=""), True, False),
        (wants(), Plan(version=12, shares=(), why=""), True, False),
    ],
)
def test_an_answer_turns_to_a_program_where_nobody_of_its_layout_is_left(
    asked: PlanRequest, answer: PlanOutcome, *, whole: bool, expected: bool
) -> None:
    """For a read that has nothing yet; one that has some pieces would have them twice."""
    assert turns_to_program(asked, answer, whole=whole) is expected


@WITH_ROLL
def test_sources_are_the_layouts_of_all_who_have_the_version_each_once(*, with_roll: bool) -> None:
    """Ready ones first; a layout that nobody holds any more is no original."""
    able = (holder("b", layout="two", turn=7), holder("c", layout="one"), holder("a", layout="one"))
    what = found(*able, originals=("one", "gone"), with_roll=with_roll)
    assert source_set(what) == LayoutSet(("one", "two"), ("one",))


def later(agent: str, number: int, layout: str = SEAT.layout, decided: int = MY_TURN.decided) -> Holder:
    """Return one that is to be filled, by default by the command that decided the reader's round."""
    return msgspec.structs.replace(holder(agent, layout=layout), turn=ReadPriority(decided, number))


FAR = tuple(msgspec.structs.replace(holder("far", shard=shard), layout=layout) for shard, layout in enumerate("OP"))


@pytest.mark.parametrize(
    ("able", "joins"),
    [
        ((later("a", 60),), True),
        ((later("a", 40),), True),
        ((later("a", 60), later("b", 40, "other")), False),
        ((later("a", 60), later("b", 60, "other")), True),
        ((later("a", 40), later("b", 45, "other")), True),
        ((later("a", 60), later("b", 50, "other")), False),
        ((later("a", 60), later("b", 7, "other", decided=7)), False),
        ((later("a", 60), holder("b", layout="other")), False),
        ((later("a", 60, "other"),), False),
        ((), False),
    ],
)
@WITH_ROLL
def test_who_shares_out_what_crosses_reads_by_the_published_layouts(
    able: tuple[Holder, ...], *, joins: bool, with_roll: bool
) -> None:
    """Of replicas of several layouts the first one by turn crosses. For all other readers every holder counts."""
    asked, originals = wants(root=None, promises=True), ("O", "P")
    what = found(*FAR, *able, originals=originals, with_roll=with_roll)
    assert joins_fanout(asked, SEAT, what.holders, TOPOLOGY) is joins
    assert (program_sources(asked, what) == LayoutSet(originals, originals)) is (joins or not able)
    assert not joins_fanout(wants(root=None), SEAT, what.holders, TOPOLOGY)
    lacking = found(FAR[0], *able, originals=originals, with_roll=with_roll)
    for each in (lacking, found(*FAR, *able, with_roll=with_roll)):
        assert program_sources(asked, each) == source_set(each)


def rows(begin: int, end: int) -> Layout:
    return layout_of([TensorEntry("w", "int8", 1, (end - begin, 4), (12, 4), (begin, 0))])


@WITH_ROLL
def test_holders_are_seen_in_the_units_of_the_program(*, with_roll: bool) -> None:
    """As if they were of the reader's layout; whose layout gives nothing is no holder."""
    index = LayoutIndex({"upper": rows(0, 6), "lower": rows(6, 12), "beyond": rows(9, 12)})
    program = NumberedProgram(compile_program("reader", rows(0, 8), index))
    able = (holder("b", layout="lower", turn=7), holder("x", layout="beyond"), holder("a", layout="upper"))
    seen = in_units(found(*able, draining=True, with_roll=with_roll), program).holders
    assert [(each.source.agent, each.key, each.pieces, each.turn) for each in seen.able] == [
        ("a", SEAT.key, ((0, 1),), None),
        ("b", SEAT.key, ((1, 1),), able[0].turn),
    ]
    assert (seen.draining, seen.made) == (True, ())


def test_scales_that_follow_from_what_ready_shards_have_are_made() -> None:
    """Of a cut block each shard gives the amax of its part: chains end at such scales though no shard has them."""
    given = sources(70, 200)
    program = NumberedProgram(compile_program("reader", reader(), LayoutIndex(given, set(given))))
    able = [holder(agent, layout=layout) for agent, layout in zip("abc", given, strict=True)]
    assert in_units(found(*able), program).holders.made == ((program.partials, program.scales - program.partials),)
    assert in_units(found(*able[1:]), program).holders.made != in_units(found(*able), program).holders.made


@pytest.mark.parametrize("published", ["all", "one less", "none"])
@pytest.mark.parametrize("quantised", [False, True])
def test_what_is_computed_or_was_published_otherwise_is_brought_over_by_each_for_itself(
    published: str, *, quantised: bool
) -> None:
    """Amax values are in no shard's memory; and who asked at another time may have another program."""
    given = sources(70, 200)
    destination = reader() if quantised else next(iter(sources().values()))
    program = NumberedProgram(compile_program(SEAT.layout, destination, LayoutIndex(given, set(given))), "p")
    originals = {"all": tuple(given), "one less": tuple(given)[1:], "none": ()}[published]
    able = [msgspec.structs.replace(holder("far", shard=n), layout=layout) for n, layout in enumerate(given)]
    asked, sizes = wants(root=None, program="p", promises=True), PieceSizes.repeated(program.runs())
    decision = ProgramPlanDecision("job", asked, found(*able, later("a", 60), originals=originals), program, sizes)
    plan = decision.decide(PlanCache(), LoadLedger(PlanLimits()), PlanLimits(), 0.0)
    assert isinstance(plan, Plan)
    assert any(share.crosses for share in plan.shares) == (published == "all" and not quantised)
