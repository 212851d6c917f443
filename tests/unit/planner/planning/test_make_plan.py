"""One plan, case by case, with its sentences, and its proof; tests/property/test_plan.py shows what holds of all."""

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
from tests.unit.planner.given import (
    LAYOUT,
    ME,
    MIB,
    MY_TURN,
    ROOT,
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

from tensorhub_common.protocol.plans import Plan, PlanRequest, ReadPriority, Share, SourceId
from tensorhub_common.protocol.ranges import NOTHING, Ranges, merge_ranges
from tensorhub_planner.catalog_view.holders import ABSENT_MAX, Holder, HolderSet
from tensorhub_planner.load.ledger import LoadView
from tensorhub_planner.load.load import Load
from tensorhub_planner.planning.plan import RANGES_MAX, make_plan
from tensorhub_planner.planning.verifier import PlanError, verify_plan, verify_reused_plan
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_planner.primitives.piece_sizes import PieceSizes
from tensorhub_planner.primitives.topology import Topology

GIB = 1024 * MIB
HOST = Topology({**TOPOLOGY.places, "neighbour": TOPOLOGY.places["me"]})


def test_the_nearest_holder_gives_all() -> None:
    """The same agent before the same host before the same site before any other, whoever has another layout."""
    order = ["far", "a", "beside", "me"]
    for known in range(1, 5):
        found = planned(*(holder(agent) for agent in order[:known]), holder("me", shard=1, layout="x" * 64))
        assert agents(found) == [order[known - 1]]
        assert (found.shares[0].pieces, found.shares[0].nbytes) == (SIZES.all(), GIB)
    assert found.version == 12


def test_what_is_wanted_is_planned_alone_and_an_agent_that_began_anew_is_not_the_one_that_failed() -> None:
    found = planned(holder("a"), wants=demand(pieces=((9, 2), (3, 2), (4, 3))))
    assert (found.shares[0].pieces, found.shares[0].nbytes) == (((3, 4), (9, 2)), 6 * 4 * MIB)
    for count in (1, RANGES_MAX):
        assert planned(holder("a"), wants=demand(pieces=((0, 1),) * count)).shares[0].pieces == ((0, 1),)
    assert planned(holder("a"), sizes=PieceSizes([])).shares == ()
    assert planned(holder("a"), wants=demand(pieces=())).why == "there is nothing to read"
    before = msgspec.structs.replace(demand(), avoid=(source("a", incarnation=0),))
    assert agents(planned(holder("a"), wants=before)) == ["a"]


@pytest.mark.parametrize("pieces", [((0, 257),), ((-1, 2),), ((3, 0),), ((256, 1),), ((0, 1),) * (RANGES_MAX + 1)])
def test_a_demand_that_makes_no_sense(pieces: tuple[tuple[int, int], ...]) -> None:
    assert refused(answer(holder("a"), wants=demand(pieces=pieces))).error == "BadCommand"


def test_a_refusal_says_why_each_can_not_serve_and_what_to_do() -> None:
    assert refused(answer(holder("a"), wants=demand(avoid=["a"]))).reason == (
        "no source is left for version 12 of 'policy' (on-a/0 on a failed this read): "
        "wait for another holder, and ask again"
    )
    others = holder("a"), holder("b", root="other"), holder("c", layout="x" * 64)
    found = refused(answer(*others, wants=demand(avoid=["a"]), absent=("on-d/0 on d is draining version 12",)))
    assert found.error == "VersionUnavailable"
    for reason in ("a failed this read", "b holds root other", "c has another layout", "d is draining version 12"):
        assert reason in found.reason
    assert "pieces 250-255 of version 12" in refused(answer(holder("a", pieces=((0, 250),)))).reason
    parts = [holder(name, pieces=((n * 64, 64),)) for n, name in enumerate("abcd")]
    assert "at most 3 sources" in refused(answer(*parts, limits=PlanLimits(shares_max=3))).reason
    assert len(planned(*parts, limits=PlanLimits(shares_max=4)).shares) == 4


def test_only_other_layouts() -> None:
    """The layouts are asked for, so that the refusal can name the tensors; a shard that can't serve changes nothing."""
    found = differs(answer(holder("a", layout="x" * 64), holder("b", shards=2), absent=("on-d/0 on d is filling",)))
    assert (found.holder.source, found.holders) == (source("a"), 2)


def test_a_chain_is_bounded() -> None:
    busy: LoadView = {("a", "ucxx"): Load(9, 1)}
    deep = holder("b", turn=40, depth=3)
    assert agents(planned(deep, holder("a"), load=busy, limits=PlanLimits(chain_max=3))) == ["b"]
    found = planned(deep, holder("a"), load=busy, limits=PlanLimits(chain_max=2))
    assert agents(found) == ["a"]
    assert "through 3 others" in found.why


@pytest.mark.parametrize(
    "sources", [[source(agent) for agent in "abcd"], [source("a", replica) for replica in ("r1", "r2", "r3")]]
)
def test_readers_spread_over_idle_sources(sources: list[SourceId]) -> None:
    """Planners that don't know of each other's plans still don't send everybody to one agent, or one replica there."""
    holders = HolderSet(tuple(msgspec.structs.replace(holder("a"), source=each) for each in sources))
    seats = [msgspec.structs.replace(SEAT, me=source("me", f"rollout-{n}")) for n in range(32)]
    found = [make_plan(demand(), seat, SIZES, holders, TOPOLOGY, {}, PlanLimits()) for seat in seats]
    firsts = Counter(each.shares[0].source for each in found if isinstance(each, Plan))
    assert firsts.total() == 32
    assert set(firsts) == set(sources)


BUSY: LoadView = {("a", "ucxx"): Load(1, 2048)}
OF_ONE = "1 of 1 source on the same site"
OF_TWO = "1 of 2 sources on the same site, because more would hardly be faster than 43.9 ms by the model"


@pytest.mark.parametrize(
    ("holders", "nbytes", "why", "why_share"),
    [
        ([holder("a")], 7, f"1 piece (7 B); {OF_ONE}", "number 1 of 1 there by load (1 reader, 2 KiB assigned)"),
        ([holder("b")], 3000, f"1 piece (2.93 KiB); {OF_ONE}", "number 1 of 1 there by load (0 readers, 0 B assigned)"),
        (
            [holder("b", turn=40), holder("a")],
            GIB,
            f"1 piece (1 GiB); {OF_TWO}",
            "number 1 of 2 there by load (0 readers, 0 B assigned); half-filled, 1 hop from a ready holder",
        ),
        (
            [holder("b", turn=40, depth=2), holder("c", turn=60), holder("a")],
            GIB,
            f"1 piece (1 GiB); {OF_TWO}; left out: on-c/0 on c is being filled, and its turn is not earlier",
            "number 1 of 2 there by load (0 readers, 0 B assigned); half-filled, 2 hops from a ready holder",
        ),
    ],
)
def test_a_plan_and_its_share_say_why(holders: list[Holder], nbytes: int, why: str, why_share: str) -> None:
    found = planned(*holders, sizes=PieceSizes([nbytes]), load=BUSY)
    (share,) = found.shares
    assert (found.why, share.why) == (why, f"the same site; {why_share}")
    assert (share.layout, share.root, share.streams, share.far) == (None, None, 1, False)


def test_a_refusal_names_some_of_many_and_counts_the_rest() -> None:
    agents = [f"agent-{n}" for n in range(ABSENT_MAX + 4)]
    holders = HolderSet(tuple(map(holder, agents)), absent_more=2)
    found = make_plan(demand(avoid=agents), SEAT, SIZES, holders, TOPOLOGY, {}, PlanLimits())
    named = ", ".join(f"on-{agent}/0 on {agent} failed this read" for agent in agents[:ABSENT_MAX])
    assert refused(found).reason == (
        f"no source is left for version 12 of 'policy' ({named} and 6 more): wait for another holder, and ask again"
    )
    assert "(no other replica has registered)" in refused(answer()).reason


def test_a_chain_also_ends_at_what_follows_from_what_ready_ones_have() -> None:
    """Else nobody could read scales that half-filled ones have made of partials."""
    holders = HolderSet((holder("a", pieces=((0, 100),)), holder("b", turn=40)), made=((100, 156),))
    found = make_plan(demand(), SEAT, SIZES, holders, TOPOLOGY, {}, PlanLimits())
    assert isinstance(found, Plan)
    assert "b" in agents(found)


def test_why_these_sources() -> None:
    """The time of two with one reader each: in milliseconds, which 1 GiB takes from both and would take from one."""
    own = msgspec.structs.replace(holder("me"), source=SEAT.me)
    found = planned(own, holder("a"), holder("b", pieces=((0, 4),)), wants=demand(pieces=((8, 4),)))
    assert agents(found) == ["a"]
    assert found.why.endswith(
        "; left out: rollout/0 on me is the reader itself, on-b/0 on b has none of the wanted pieces"
    )
    assert "more would hardly be faster than 43.9 ms by the model" in planned(holder("a"), holder("b")).why
    beside = planned(holder("beside"), holder("neighbour"), topology=HOST)
    assert "the reader's own copying or the link is the bound there: more would gain nothing" in beside.why
    load: LoadView = {(agent, "ucxx"): Load(1, 1) for agent in "ab"}
    assert planned(holder("a"), holder("b"), load=load).why == (
        "256 pieces (1 GiB); 2 of 2 sources on the same site, which by the model takes 44.9 ms instead of 86.9 from one"
    )
    parts = [holder(name, pieces=((n * 10, 10),)) for n, name in enumerate("abcde")]
    assert "and 2 more groups of pieces" in planned(*parts, holder("far")).why
    all_told = planned(*parts[:3], holder("far"))
    assert all_told.why.count("; ") == 4
    assert "more groups" not in all_told.why


# ------------------------------------------------------------------------------------------------------------- mapped


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
    for busy, idle in (("beside", "neighbour"), ("neighbour", "beside")):
        load = {(busy, "local"): Load(readers=1, nbytes=0)}
        found = planned(holder("beside"), holder("neighbour"), wants=mapped(), load=load, topology=HOST)
        assert agents(found) == [idle]


def test_what_is_on_another_host_still_filled_cut_otherwise_or_failed_is_not_mapped() -> None:
    said = refused(answer(holder("a"), holder("far"), holder("beside", turn=1), wants=mapped()))
    assert said.error == "VersionUnavailable"
    for reason in (
        "no holder of version 12 of 'policy' stands ready on the host of agent 'me' with this layout",
        "on a stands on another host, ",
        "on far stands on another site, ",
        "on beside is still being filled",
    ):
        assert reason in said.reason
    assert "has another layout" in refused(answer(holder("beside", layout="m" * 64), wants=mapped())).reason
    assert "failed this read" in refused(answer(holder("beside"), wants=mapped("beside"))).reason


# --------------------------------------------------------------------------------------------------- from another site

FAR = holder("far")


def mate(agent: str, number: int) -> Holder:
    """Return one whose round the same command has decided as the reader's."""
    return msgspec.structs.replace(holder(agent), turn=ReadPriority(MY_TURN.decided, number))


MATES = (mate("a", 48), mate("b", 49), mate("c", 51))
"""Two of them have an earlier turn than the reader, one has a later one."""


def asks(wants: PlanRequest | None = None, uncrossed: Sequence[str] = ()) -> PlanRequest:
    return msgspec.structs.replace(
        wants or demand(), promises=True, uncrossed=tuple(source(agent) for agent in uncrossed)
    )


def by_agent(found: Plan) -> dict[str, Share]:
    return {share.source.agent: share for share in found.shares}


def test_a_reader_crosses_its_part_and_reads_the_rest_from_its_mates() -> None:
    found = planned(FAR, *MATES, wants=asks())
    assert found.why.endswith("; each of 4 in this site brings a part over, and they exchange the rest")
    shares = by_agent(found)
    by_program = planned(FAR, *MATES, wants=msgspec.structs.replace(asks(), program="p"))
    layouts = [[each.layout for each in plan.shares] for plan in (found, by_program)]
    assert layouts == [[None] * 4, [LAYOUT] * 4], "said where it may be another one than the reader's"
    parts = {agent: SIZES.of(share.pieces) // MIB for agent, share in shares.items()}
    assert parts == dict.fromkeys(("a", "b", "c", "far"), 256)
    assert shares["far"].far
    assert shares["far"].streams == PlanLimits().wan_streams // 4
    assert not shares["far"].crosses
    assert all(shares[agent].crosses and not shares[agent].far for agent in "abc")
    numbers = {agent: shares[agent].why.rpartition(": ")[2] for agent in "abc"}
    assert numbers == {"a": "number 1 of 4", "b": "number 2 of 4", "c": "number 4 of 4"}, "the reader is the third"


def test_one_that_knows_no_promises_reads_in_a_chain_and_who_pulls_alone_shares_the_line_of_its_source() -> None:
    (share,) = planned(FAR, *MATES).shares
    assert share.source.agent in {"a", "b"}, "of an earlier turn"
    assert not share.crosses
    for readers, streams in ((3, PlanLimits().wan_streams // 4), (100, 1)):
        (share,) = planned(FAR, wants=asks(), load={("far", "ucxx"): Load(readers, 0)}).shares
        assert share.streams == streams
    assert "no source is left" in refused(answer(*MATES, wants=asks())).reason, "mates alone have nothing"


@pytest.mark.parametrize(("agent", "from_whom"), [("d", {"a": False}), ("far", {"a": True, "b": True})])
def test_what_drains_in_the_site_does_not_cross_to_it(agent: str, from_whom: dict[str, bool]) -> None:
    """Nobody brings anything over: mates would wait for each other. An earlier turn has its lease already."""
    holders = HolderSet(MATES[:2], draining=True, draining_on=(agent,))
    found = make_plan(asks(), SEAT, SIZES, holders, TOPOLOGY, {}, PlanLimits())
    assert isinstance(found, Plan)
    assert {share.source.agent: share.crosses for share in found.shares} == from_whom


@pytest.mark.parametrize(
    ("near", "crossing"),
    [(holder("d"), ()), (holder("d", turn=7), ()), (holder("d", pieces=((0, 128),)), ((128, 128),))],
    ids=["ready", "earlier", "in part"],
)
def test_nothing_crosses_where_the_site_has_it_or_will(near: Holder, crossing: Ranges) -> None:
    others = [FAR, *MATES, near]
    for told in (others, others[::-1]):
        shares = planned(*told, wants=asks()).shares
        assert merge_ranges(run for each in shares if each.far or each.crosses for run in each.pieces) == crossing


@pytest.mark.parametrize(
    ("near", "avoid"),
    [
        (holder("d"), ["d"]),
        (holder("d", layout="x" * 64), []),
        (holder("d", root="s" * 32), []),
        (holder("d", turn=MY_TURN.decided + 1), []),
        (holder("far", shard=1), []),
    ],
    ids=["avoided", "other-layout", "other-root", "later", "other-site"],
)
def test_who_can_give_nothing_keeps_nothing_from_crossing(near: Holder, avoid: list[str]) -> None:
    alone = planned(FAR, *MATES, wants=asks(demand(avoid=avoid)))
    found = planned(FAR, *MATES, near, wants=asks(demand(avoid=avoid)))
    parts = [sorted((share.crosses, share.far, share.pieces) for share in each.shares) for each in (alone, found)]
    assert parts[0] == parts[1]


def test_those_beyond_the_streams_read_what_the_others_cross() -> None:
    """The reader's turn is the third of four."""
    found = planned(FAR, *MATES, wants=asks(), limits=PlanLimits(wan_streams=2))
    assert {share.source.agent for share in found.shares} <= {"a", "b"}
    assert all(not share.crosses for share in found.shares)


@pytest.mark.parametrize("why", ["avoid", "uncrossed"])
def test_the_part_of_one_that_fell_out_is_divided(why: str) -> None:
    whole = by_agent(planned(FAR, *MATES, wants=asks()))
    lost = whole["a"].pieces
    wants = asks(demand(lost, avoid=["a"])) if why == "avoid" else asks(demand(lost), uncrossed=["a"])
    shares = by_agent(planned(FAR, *MATES, wants=wants))
    assert set(shares) == {"far", "b", "c"}
    assert sum(share.nbytes for share in shares.values()) == SIZES.of(lost)


def test_what_is_divided_anew_is_so_among_those_of_the_first_plan() -> None:
    """The log has lost one of them meanwhile: the runs of the others stay what they are."""
    first = planned(FAR, *MATES, wants=asks())
    whole = by_agent(first)
    lost = whole["a"].pieces
    again = msgspec.structs.replace(asks(demand(lost, avoid=["a"])), crossers=first.crossers)
    gone = by_agent(planned(FAR, *MATES[1:], wants=again))
    assert gone == by_agent(planned(FAR, *MATES, wants=again)), "whether the planner has heard or not"
    forgotten = by_agent(planned(FAR, *MATES[1:], wants=asks(demand(lost, avoid=["a"]))))
    assert [share.pieces for share in gone.values()] != [share.pieces for share in forgotten.values()]


# ---------------------------------------------------------------------------------------------------------- the proof


def test_what_would_not_read_everything_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with the choice: the proof raises before anybody acts on it."""
    monkeypatch.setattr("tensorhub_planner.planning.plan.select_sources", lambda *_: ((), NOTHING))
    with pytest.raises(PlanError, match="pieces 0-255 are wanted, and no share gives them"):
        planned(holder("a"))


EIGHT = PieceSizes([10] * 8)
ALL = ((0, 8),)
HOLDERS = [holder("a"), holder("b"), holder("part", pieces=((0, 2),)), holder("later", turn=60)]


def share(agent: str | SourceId, pieces: Ranges, nbytes: int | None = None) -> Share:
    return Share(
        source=source(agent) if isinstance(agent, str) else agent,
        transport="ucxx",
        pieces=pieces,
        nbytes=EIGHT.of(pieces) if nbytes is None else nbytes,
        why="",
    )


def check(*shares: Share, wanted: Ranges = ALL, holders: list[Holder] = HOLDERS, avoid: tuple[str, ...] = ()) -> None:
    verify_plan(
        Plan(version=12, shares=shares, why=""),
        wanted=wanted,
        sizes=EIGHT,
        holders={each.source: each for each in holders},
        reader=ME,
        avoid=frozenset(source(agent) for agent in avoid),
        turn=MY_TURN,
        ends=ALL,
    )


def test_a_good_plan_passes() -> None:
    check(share("a", ((2, 6),)), share("part", ((0, 2),)))
    check(share("a", ((0, 1), (4, 4))), share("b", ((1, 3),)))
    check(wanted=())
    check(share("half", ALL), holders=[*HOLDERS, holder("half", turn=40)])


@pytest.mark.parametrize(
    ("shares", "fault"),
    [
        ((share("a", ((0, 7),)),), "pieces 7 are wanted"),
        ((share("a", ((0, 5),)), share("b", ((4, 4),))), "pieces 4 of on-b/0 on b are read twice"),
        ((share("a", ((0, 9),), 90),), "pieces 8 of on-a/0 on a are read twice or not wanted"),
        ((share("a", ((0, 4),)), share("a", ((4, 4),))), "stands in the plan twice"),
        ((share("a", ()), share("b", ALL)), "empty or not in order"),
        ((share("a", ((4, 4), (0, 4))),), "empty or not in order"),
        ((share("a", ((0, 4), (4, 4))),), "empty or not in order"),
        ((share("a", ALL, 79),), "says 79 bytes and has 80"),
        ((share("a", ALL, 81),), "says 81 bytes and has 80"),
        ((share("part", ALL),), "ends at no shard that is ready"),
        ((share("later", ALL),), "ends at no shard that is ready"),
        ((share("unheard-of", ALL),), "ends at no shard that is ready"),
        ((share(ME, ALL),), "must not be read"),
        ((share("b", ((0, 4),)), share("failed", ((4, 4),))), "must not be read"),
        ((msgspec.structs.replace(share("a", ALL), crosses=True),), "pieces 0-7 are not those that on-a/0 on a brings"),
    ],
)
def test_a_faulty_plan_is_found(shares: tuple[Share, ...], fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        check(*shares, avoid=("failed",))


OLD = msgspec.structs.replace(share("a", ((0, 2),)), root="old", layout=LAYOUT)
PROVEN = Plan(version=11, shares=(OLD,), why="", program="p")


@pytest.mark.parametrize(
    ("changes", "given", "fault"),
    [
        ({}, [holder("a")], None),
        ({"pieces": ((0, 3),)}, [holder("a")], "not the one that was proven"),
        ({"nbytes": 21}, [holder("a")], "not the one that was proven"),
        ({"source": source("b")}, [holder("b")], "not the one that was proven"),
        ({"root": "old"}, [holder("a")], "holds root"),
        ({"layout": "x" * 64}, [holder("a")], "another layout"),
        ({"source": ME}, [holder("a")], "must not be read"),
        ({"source": source("failed")}, [holder("a")], "must not be read"),
        ({}, [holder("a", turn=40)], "does not stand ready"),
        ({}, [holder("a", layout="x" * 64)], "another layout"),
        ({}, [holder("b")], "does not stand ready"),
        (None, [], "^the plan has other shares than the one that was proven$"),
        ("another program", [holder("a")], "^a plan can be made again only for the same transfer program$"),
    ],
)
def test_a_reused_plan_may_differ_in_roots_alone(changes: Any, given: list[Holder], fault: str | None) -> None:
    new = msgspec.structs.replace(OLD, **({"root": ROOT} | changes if isinstance(changes, dict) else {"root": ROOT}))
    shares = () if changes is None else (new,)
    plan = Plan(version=12, shares=shares, why="", program="q" if isinstance(changes, str) else "p")
    avoid = frozenset((source("failed"),))
    with pytest.raises(PlanError, match=fault) if fault else nullcontext():
        verify_reused_plan(plan, PROVEN, given, reader=ME, avoid=avoid)
