"""One plan, case by case, with its sentences; tests/property/test_plan.py shows what holds of all of them."""

from collections import Counter

import msgspec
import pytest
from tests.unit.planner.given import (
    LAYOUT,
    MIB,
    SEAT,
    SIZES,
    TOPOLOGY,
    agents,
    answer,
    demand,
    differs,
    holder,
    planned,
    refused,
    source,
)

from tensorhub_common.errors import VersionUnavailable
from tensorhub_common.protocol.plans import Plan, PlanRequest
from tensorhub_common.protocol.ranges import NOTHING
from tensorhub_planner.catalog_view.holders import HolderSet
from tensorhub_planner.load.ledger import LoadView
from tensorhub_planner.load.load import Load
from tensorhub_planner.planning.plan import RANGES_MAX, make_plan
from tensorhub_planner.planning.verifier import PlanError
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_planner.primitives.piece_sizes import PieceSizes
from tensorhub_planner.primitives.topology import Topology

GIB = 1024 * MIB


def test_the_nearest_holder_gives_all() -> None:
    """The same agent before the same host before the same site before any other."""
    order = ["far", "a", "beside", "me"]
    for known in range(1, 5):
        found = planned(*(holder(agent) for agent in order[:known]))
        assert agents(found) == [order[known - 1]]
        assert found.shares[0].pieces == SIZES.all()
        assert found.shares[0].nbytes == GIB
    assert found.version == 12


def test_avoiding_is_by_incarnation() -> None:
    """An agent that began anew is not the one that failed."""
    before = msgspec.structs.replace(demand(), avoid=(source("a", incarnation=0),))
    assert agents(planned(holder("a"), wants=before)) == ["a"]


def test_a_part_is_planned_alone() -> None:
    """Pieces in any order, overlapping: each once."""
    found = planned(holder("a"), wants=demand(pieces=((9, 2), (3, 2), (4, 3))))
    assert found.shares[0].pieces == ((3, 4), (9, 2))
    assert found.shares[0].nbytes == 6 * 4 * MIB


def test_nothing_to_read_is_a_plan_without_shares() -> None:
    assert planned(holder("a"), sizes=PieceSizes([])).shares == ()
    assert planned(holder("a"), wants=demand(pieces=())).why == "there is nothing to read"


def test_nobody_is_left() -> None:
    """The refusal says of each who could have served why it can't."""
    found = refused(
        answer(
            holder("a"),
            holder("b", root="other"),
            holder("c", layout="x" * 64),
            wants=demand(avoid=["a"]),
            absent=("on-d/0 on d is draining version 12",),
        )
    )
    assert found.error == "VersionUnavailable"
    for reason in ("a failed this read", "b holds root other", "c has another layout", "d is draining version 12"):
        assert reason in found.reason


def test_pieces_that_nobody_has_are_named() -> None:
    found = refused(answer(holder("a", pieces=((0, 250),))))
    assert "pieces 250-255 of version 12" in found.reason


def test_too_many_sources_are_named() -> None:
    parts = [holder(name, pieces=((n * 64, 64),)) for n, name in enumerate("abcd")]
    assert "at most 3 sources" in refused(answer(*parts, limits=PlanLimits(shares_max=3))).reason
    assert len(planned(*parts, limits=PlanLimits(shares_max=4)).shares) == 4


def test_only_other_layouts() -> None:
    """The layouts are asked for, so that the refusal can name the tensors; a shard that can't serve changes nothing."""
    found = differs(answer(holder("a", layout="x" * 64), holder("b", shards=2), absent=("on-d/0 on d is filling",)))
    assert found.holder.source == source("a")
    assert found.holders == 2


def test_a_holder_of_another_layout_beside_one_of_the_readers_own_changes_nothing() -> None:
    assert agents(planned(holder("beside", layout="x" * 64), holder("a"))) == ["a"]


def test_what_would_not_read_everything_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with the choice: the proof raises before anybody acts on it."""
    monkeypatch.setattr("tensorhub_planner.planning.plan.select_sources", lambda *_: ((), NOTHING))
    with pytest.raises(PlanError, match="pieces 0-255 are wanted, and no share gives them"):
        planned(holder("a"))


@pytest.mark.parametrize("pieces", [((0, 257),), ((-1, 2),), ((3, 0),), ((256, 1),), ((0, 1),) * (RANGES_MAX + 1)])
def test_a_demand_that_makes_no_sense(pieces: tuple[tuple[int, int], ...]) -> None:
    assert refused(answer(holder("a"), wants=demand(pieces=pieces))).error == "BadCommand"


def test_a_chain_is_bounded() -> None:
    busy: LoadView = {("a", "ucxx"): Load(9, 1)}
    deep = holder("b", turn=40, depth=3)
    assert agents(planned(deep, holder("a"), load=busy, limits=PlanLimits(chain_max=3))) == ["b"]
    found = planned(deep, holder("a"), load=busy, limits=PlanLimits(chain_max=2))
    assert agents(found) == ["a"]
    assert "through 3 others" in found.why


def test_readers_spread_over_idle_sources() -> None:
    """Planners that don't know of each other's plans still don't send everybody to one source."""
    holders = HolderSet(tuple(map(holder, "abcd")))
    seats = [msgspec.structs.replace(SEAT, me=source("me", f"rollout-{n}")) for n in range(32)]
    found = [make_plan(demand(), seat, SIZES, holders, TOPOLOGY, {}, PlanLimits()) for seat in seats]
    firsts = Counter(each.shares[0].source.agent for each in found if isinstance(each, Plan))
    assert firsts.total() == 32
    assert set(firsts) == set("abcd")


def test_a_part_may_begin_with_the_first_piece_and_have_as_many_ranges_as_are_allowed() -> None:
    assert planned(holder("a"), wants=demand(pieces=((0, 1),))).shares[0].pieces == ((0, 1),)
    assert planned(holder("a"), wants=demand(pieces=((0, 1),) * RANGES_MAX)).shares[0].pieces == ((0, 1),)


def test_the_reader_and_who_has_none_of_the_pieces_are_left_out_and_told() -> None:
    own = msgspec.structs.replace(holder("me"), source=SEAT.me)
    found = planned(own, holder("a"), holder("b", pieces=((0, 4),)), wants=demand(pieces=((8, 4),)))
    assert agents(found) == ["a"]
    assert found.why.endswith(
        "; left out: rollout/0 on me is the reader itself, on-b/0 on b has none of the wanted pieces"
    )


HOST = Topology({**TOPOLOGY.places, "neighbour": TOPOLOGY.places["me"]})


def test_why_not_more_sources() -> None:
    assert "more would hardly be faster than 43.9 ms by the model" in planned(holder("a"), holder("b")).why
    beside = planned(holder("beside"), holder("neighbour"), topology=HOST)
    assert "the reader's own copying or the link is the bound there: more would gain nothing" in beside.why


def test_why_so_many_sources() -> None:
    """Of two with one reader each: in milliseconds, which 1 GiB takes from both and would take from one."""
    load: LoadView = {(agent, "ucxx"): Load(1, 1) for agent in "ab"}
    assert planned(holder("a"), holder("b"), load=load).why == (
        "256 pieces (1 GiB); 2 of 2 sources on the same site, which by the model takes 44.9 ms instead of 86.9 from one"
    )


def test_many_choices_are_cut_short() -> None:
    parts = [holder(name, pieces=((n * 10, 10),)) for n, name in enumerate("abcde")]
    found = planned(*parts, holder("far"), sizes=SIZES)
    assert "and 2 more groups of pieces" in found.why
    all_told = planned(*parts[:3], holder("far"), sizes=SIZES)
    assert all_told.why.count("; ") == 4
    assert "more groups" not in all_told.why


def test_a_refusal_says_what_to_do() -> None:
    assert refused(answer(holder("a"), wants=demand(avoid=["a"]))).reason == (
        "no source is left for version 12 of 'policy' (on-a/0 on a failed this read): "
        "wait for another holder, and ask again"
    )


def mapped(*avoid: str) -> PlanRequest:
    return msgspec.structs.replace(demand(avoid=avoid), mapped=True)


def test_all_of_a_holder_on_the_readers_host_is_mapped() -> None:
    found = planned(holder("a"), holder("beside"), wants=mapped())
    [share] = found.shares
    assert (share.source, share.transport) == (source("beside"), "local")
    assert (share.pieces, share.nbytes) == (((0, len(SIZES)),), SIZES.of(((0, len(SIZES)),)))
    assert found.why == share.why == "mapped from the same host (0 readers): nothing is copied"
    assert found.version == 12


def test_the_nearest_comes_first_and_then_who_has_fewest_readers() -> None:
    own = holder("me")
    assert agents(planned(holder("beside"), own, wants=mapped())) == ["me"]
    load: LoadView = {("me", "local"): Load(readers=5, nbytes=0)}
    assert agents(planned(holder("beside"), own, wants=mapped(), load=load)) == ["me"]
    there = Topology({**TOPOLOGY.places, "neighbour": TOPOLOGY.places["me"]})
    for busy, idle in (("beside", "neighbour"), ("neighbour", "beside")):
        load = {(busy, "local"): Load(readers=1, nbytes=0)}
        found = planned(holder("beside"), holder("neighbour"), wants=mapped(), load=load, topology=there)
        assert agents(found) == [idle]


def test_no_memory_of_another_host_and_none_that_is_being_filled_is_mapped() -> None:
    said = refused(answer(holder("a"), holder("far"), holder("beside", turn=1), wants=mapped()))
    assert said.error == VersionUnavailable.__name__
    assert "no holder of version 12 of 'policy' stands ready on the host of agent 'me' with this layout" in said.reason
    assert "on a stands on another host, " in said.reason
    assert "on far stands on another site, " in said.reason
    assert "on beside is still being filled" in said.reason


def test_another_layout_or_a_failed_holder_is_not_mapped_and_both_are_named() -> None:
    other = holder("beside", layout="m" * len(LAYOUT))
    assert "has another layout" in refused(answer(other, wants=mapped())).reason
    assert "failed this read" in refused(answer(holder("beside"), wants=mapped("beside"))).reason
