"""Who goes by a program, among whom it chooses, and what is said to whoever can't be filled."""

import msgspec
import pytest
from tests.unit.planner.given import SEAT, demand, holder

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import Layout, TensorEntry, layout_of
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.protocol.plans import Plan, Refusal
from tensorhub_planner.catalog_view.holders import Candidates, Holder, HolderSet, ReplicaHolders
from tensorhub_planner.compiler.compiler import compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex
from tensorhub_planner.planning.plan import OnlyOtherLayouts
from tensorhub_planner.planning.resharding import (
    cannot_be_filled,
    in_units,
    nobody_has_it,
    reads_by_program,
    source_set,
    turns_to_program,
)
from tensorhub_planner.primitives.source_set import LayoutSet
from tensorhub_planner.primitives.topology import Topology

NOWHERE = Topology({})
UNAVAILABLE = Refusal(error="VersionUnavailable", reason="")


def found(*able: Holder, originals: tuple[str, ...] = (), draining: bool = False) -> Candidates:
    return Candidates(SEAT, HolderSet(able, draining=draining), NOWHERE, originals)


def with_roll(what: Candidates) -> Candidates:
    return msgspec.structs.replace(what, roll=ReplicaHolders(what.holders, what.topology, what.originals))


def test_a_demand_goes_by_a_program_where_the_log_knows_no_root_of_its_layout() -> None:
    assert not reads_by_program(demand())
    assert reads_by_program(demand(root=None))
    assert not reads_by_program(msgspec.structs.replace(demand(root=None), mapped=True)), "mapped memory is one layout"
    assert reads_by_program(msgspec.structs.replace(demand(), program="p")), "it does already"


def test_an_answer_turns_to_a_program_where_nobody_of_its_layout_is_left() -> None:
    """For a read that has nothing yet; one that has some pieces would have them twice."""
    differ = OnlyOtherLayouts(SEAT, holder("a", layout="x" * 64), 1)
    assert turns_to_program(demand(), differ, whole=False)
    assert turns_to_program(demand(), UNAVAILABLE, whole=True)
    assert not turns_to_program(demand(), UNAVAILABLE, whole=False)
    assert not turns_to_program(msgspec.structs.replace(demand(), mapped=True), UNAVAILABLE, whole=True)
    assert not turns_to_program(demand(), Refusal(error="BadCommand", reason=""), whole=True)
    assert not turns_to_program(demand(), Plan(version=12, shares=(), why=""), whole=True)


def test_sources_are_the_layouts_of_all_who_have_the_version_each_once() -> None:
    """Ready ones first; a layout that nobody holds any more is no original."""
    able = (holder("b", layout="two", turn=7), holder("c", layout="one"), holder("a", layout="one"))
    what = found(*able, originals=("one", "gone"))
    assert source_set(what) == source_set(with_roll(what)) == LayoutSet(("one", "two"), ("one",))


def rows(begin: int, end: int) -> Layout:
    return layout_of([TensorEntry("w", "int8", 1, (end - begin, 4), (12, 4), (begin, 0))])


@pytest.mark.parametrize("kept", [False, True])
def test_holders_are_seen_in_the_units_of_the_program(kept: bool) -> None:  # noqa: FBT001 (a column)
    """As if they were of the reader's layout; whose layout gives nothing is no holder."""
    index = LayoutIndex({"upper": rows(0, 6), "lower": rows(6, 12), "beyond": rows(9, 12)})
    execution = NumberedProgram(compile_program("reader", rows(0, 8), index))
    able = (holder("b", layout="lower", turn=7), holder("x", layout="beyond"), holder("a", layout="upper"))
    what = found(*able, draining=True)
    seen = in_units(with_roll(what) if kept else what, execution).holders
    assert [(each.source.agent, each.key, each.pieces, each.turn) for each in seen.able] == [
        ("a", SEAT.key, ((0, 1),), None),
        ("b", SEAT.key, ((1, 1),), able[0].turn),
    ]
    assert seen.draining


def test_a_version_that_nobody_has_is_refused_with_those_who_could() -> None:
    refusal = nobody_has_it(demand(), HolderSet((), ("shard 0 of 'trainer' is lost",)))
    assert refusal == Refusal(
        error="VersionUnavailable",
        reason="no source is left for version 12 of 'policy' (shard 0 of 'trainer' is lost): wait for another holder, "
        "and ask again",
    )


def test_what_cannot_be_filled_is_refused_for_now_or_for_ever() -> None:
    why, absent = LayoutMismatch("no holder has [0:1] of 'w'"), HolderSet((), ("shard 1 of 'trainer' is lost",))
    now = cannot_be_filled(demand(), why, absent, could_be=True)
    assert isinstance(now, Refusal)
    assert now.error == "VersionUnavailable"
    assert now.reason.startswith(
        "version 12 of 'policy' can't fill shard 0 of 'rollout' just now: no holder has [0:1] of 'w' ("
    )
    assert "shard 1 of 'trainer' is lost" in now.reason
    assert now.reason.endswith("): wait for another holder, and ask again")
    ever = cannot_be_filled(demand(), why, absent, could_be=False)
    assert ever == Refusal(
        error="LayoutMismatch",
        reason="version 12 of 'policy' can't fill shard 0 of 'rollout': no holder has [0:1] of 'w'. Register it with "
        "tensors of the same names, global shapes and dtypes, or with a mapping",
    )
