"""What is decided, case by case; tests/property/test_plan.py shows what holds of all of them."""

import time
from collections import Counter

import msgspec
import pytest
from tests.unit.planner.given import (
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

from tensorhub_common.protocol.plans import Plan
from tensorhub_common.protocol.ranges import NOTHING
from tensorhub_planner.catalog_view.holders import HolderSet
from tensorhub_planner.load.ledger import LoadView
from tensorhub_planner.load.load import AgentTransport, Load
from tensorhub_planner.planning.plan import RANGES_MAX, make_plan
from tensorhub_planner.planning.verifier import PlanError
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_planner.primitives.piece_sizes import PieceSizes

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


def test_the_transport_follows_from_the_distance() -> None:
    by_agent = {agent: planned(holder(agent)).shares[0].transport for agent in ("me", "beside", "a", "far")}
    assert by_agent == {"me": "local", "beside": "local", "a": "ucxx", "far": "ucxx"}


def test_the_least_loaded_among_equals() -> None:
    load: LoadView = {("a", "ucxx"): Load(1, 10), ("b", "ucxx"): Load(0, 0), ("c", "ucxx"): Load(2, 1)}
    assert agents(planned(*map(holder, "abc"), load=load)) == ["b"]


def test_local_readers_are_no_load_on_the_network() -> None:
    load: LoadView = {("a", "local"): Load(9, 9 * GIB), ("b", "ucxx"): Load(1, 1)}
    assert agents(planned(*map(holder, "ab"), load=load)) == ["a"]


def test_busy_sources_are_striped_by_bytes() -> None:
    """Two with one reader each: contiguous halves, and the reasons give the model's numbers."""
    load: LoadView = {(agent, "ucxx"): Load(1, GIB) for agent in "ab"}
    found = planned(*map(holder, "ab"), load=load)
    assert sorted(agents(found)) == ["a", "b"]
    assert [share.pieces for share in found.shares] == [((0, 128),), ((128, 128),)]
    assert "2 of 2 sources on the same site" in found.why
    assert "instead of" in found.why
    assert "1 reader, 1 GiB assigned" in found.shares[0].why


def test_one_piece_comes_from_one_source() -> None:
    """However busy the sources are, and however large it is."""
    load: LoadView = {(agent, "ucxx"): Load(3, GIB) for agent in "abc"}
    assert len(planned(*map(holder, "abc"), load=load, sizes=PieceSizes([GIB])).shares) == 1


def test_one_host_is_never_striped_and_says_why() -> None:
    found = planned(holder("beside"), holder("me"), load={("beside", "local"): Load(3, GIB)})
    assert agents(found) == ["me"]
    both = planned(holder("beside"), holder("a"))
    assert agents(both) == ["beside"]


def test_what_failed_is_avoided_and_told() -> None:
    found = planned(holder("a"), holder("b"), wants=demand(avoid=["a"]))
    assert agents(found) == ["b"]
    assert "left out: on-a/0 on a failed this read" in found.why


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


def test_nobody_at_all() -> None:
    found = refused(answer())
    assert found.error == "VersionUnavailable"
    assert "(nobody else has registered)" in found.reason


def test_an_empty_demand_needs_a_holder_too() -> None:
    """Else a version that nobody holds would count as read."""
    assert refused(answer(wants=demand(pieces=()))).error == "VersionUnavailable"


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
    with pytest.raises(PlanError, match="pieces 0-255 are wanted and nobody gives them"):
        planned(holder("a"))


@pytest.mark.parametrize("pieces", [((0, 257),), ((-1, 2),), ((3, 0),), ((256, 1),), ((0, 1),) * (RANGES_MAX + 1)])
def test_a_demand_that_makes_no_sense(pieces: tuple[tuple[int, int], ...]) -> None:
    assert refused(answer(holder("a"), wants=demand(pieces=pieces))).error == "BadCommand"


def test_a_half_filled_holder_of_an_earlier_turn_serves() -> None:
    """`a` has a reader already; the plan says what the half-filled one is."""
    found = planned(holder("b", turn=40), holder("a"), load={("a", "ucxx"): Load(1, 1)})
    assert agents(found) == ["b"]
    assert "half-filled, 1 hop from a ready holder" in found.shares[0].why


def test_a_half_filled_holder_of_a_later_turn_does_not() -> None:
    found = planned(holder("b", turn=60), holder("a"), load={("a", "ucxx"): Load(1, 1)})
    assert agents(found) == ["a"]
    assert "b is being filled, and its turn is not earlier" in found.why


def test_without_a_ready_holder_a_chain_has_no_end() -> None:
    refusal = refused(answer(holder("b", turn=40)))
    assert refusal.error == "VersionUnavailable"


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


def test_planning_is_fast() -> None:
    """Equal layouts, 300 pieces, 8 holders: well under a millisecond of the processor's time."""
    sizes = PieceSizes([4 * MIB] * 300)
    holders = [holder(agent) for agent in ("a", "b", "c", "d", "e", "beside", "far", "me")]
    best = 1.0
    for _ in range(50):
        begun = time.thread_time()
        planned(*holders, sizes=sizes)
        best = min(best, time.thread_time() - begun)
    assert best < 0.001


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


class Counted(dict[AgentTransport, Load]):
    """A load that notes what is looked up in it."""

    def __init__(self, load: LoadView) -> None:
        super().__init__(load)
        self.looked: list[str] = []

    def get(self, lane: AgentTransport, default: Load) -> Load:  # type: ignore[override]  # The plan has a default.
        self.looked.append(lane[0])
        return super().get(lane, default)


def test_how_busy_an_agent_is_is_looked_up_once() -> None:
    """However many replicas stand on it: what it has said of its readers is long, and is gone through each time."""
    load = Counted({("a", "ucxx"): Load(3, 3), ("b", "ucxx"): Load(1, 1)})
    replicas = [(agent, f"r{number}") for number in range(9) for agent in "ab"]
    holders = [msgspec.structs.replace(holder(agent), source=source(agent, name)) for agent, name in replicas]
    assert set(agents(planned(*holders, load=load))) == {"b"}
    assert sorted(load.looked) == ["a", "b"]
