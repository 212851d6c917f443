"""What has to come from another site is divided over the readers of the site: each piece crosses once."""

from collections.abc import Sequence

import msgspec
import pytest
from tests.unit.planner.given import (
    MIB,
    MY_TURN,
    SEAT,
    SIZES,
    TOPOLOGY,
    answer,
    demand,
    holder,
    planned,
    refused,
    source,
)

from tensorhub_common.protocol.plans import Plan, PlanRequest, ReadPriority, Share
from tensorhub_common.protocol.ranges import merge_ranges
from tensorhub_planner.catalog_view.holders import Holder, HolderSet
from tensorhub_planner.load.load import Load
from tensorhub_planner.planning.plan import make_plan
from tensorhub_planner.primitives.limits import PlanLimits

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
    shares = by_agent(planned(FAR, *MATES, wants=asks()))
    assert {agent: SIZES.of(share.pieces) // MIB for agent, share in shares.items()} == dict.fromkeys("abc", 256) | {
        "far": 256
    }
    assert shares["far"].far
    assert shares["far"].streams == PlanLimits().wan_streams // 4
    assert not shares["far"].crosses
    assert all(shares[agent].crosses and not shares[agent].far for agent in "abc")
    numbers = {agent: shares[agent].why.rpartition(": ")[2] for agent in "abc"}
    assert numbers == {"a": "number 1 of 4", "b": "number 2 of 4", "c": "number 4 of 4"}, "the reader is the third"


def test_one_that_knows_no_promises_reads_in_a_chain() -> None:
    (share,) = planned(FAR, *MATES).shares
    assert share.source.agent in {"a", "b"}, "of an earlier turn"
    assert not share.crosses


def test_those_who_pull_from_one_source_by_themselves_share_its_line() -> None:
    (share,) = planned(FAR, wants=asks(), load={("far", "ucxx"): Load(3, 0)}).shares
    assert share.streams == PlanLimits().wan_streams // 4
    (share,) = planned(FAR, wants=asks(), load={("far", "ucxx"): Load(100, 0)}).shares
    assert share.streams == 1


@pytest.mark.parametrize(("agent", "from_whom"), [("d", {"a": False}), ("far", {"a": True, "b": True})])
def test_what_drains_in_the_site_does_not_cross_to_it(agent: str, from_whom: dict[str, bool]) -> None:
    """Nobody brings anything over: mates would wait for each other. An earlier turn has its lease already."""
    holders = HolderSet(MATES[:2], draining=True, draining_on=(agent,))
    found = make_plan(asks(), SEAT, SIZES, holders, TOPOLOGY, {}, PlanLimits())
    assert isinstance(found, Plan)
    assert {share.source.agent: share.crosses for share in found.shares} == from_whom


@pytest.mark.parametrize("near", [holder("d"), holder("d", turn=7)], ids=["ready", "earlier"])
def test_nothing_crosses_where_the_site_has_it_or_will(near: Holder) -> None:
    shares = planned(FAR, near, *MATES, wants=asks()).shares
    assert all(not share.far and not share.crosses for share in shares)


@pytest.mark.parametrize("turned", [False, True])
def test_what_the_site_has_in_part_does_not_cross(turned: bool) -> None:  # noqa: FBT001 (a column)
    """Whoever has it, in whichever order they are told of."""
    half = ((0, 128),)
    others = [FAR, *MATES, holder("d", pieces=half)]
    shares = planned(*(reversed(others) if turned else others), wants=asks()).shares
    crossing = merge_ranges(run for share in shares if share.far or share.crosses for run in share.pieces)
    assert crossing == ((128, 128),)


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
    parts = [(share.crosses, share.far, share.pieces) for share in found.shares]
    assert sorted(parts) == sorted((share.crosses, share.far, share.pieces) for share in alone.shares)


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


def test_mates_are_no_source_of_what_nobody_ready_has() -> None:
    assert "no source is left" in refused(answer(*MATES, wants=asks())).reason


def test_what_is_divided_anew_is_so_among_those_of_the_first_plan() -> None:
    """The log has lost one of them meanwhile: the runs of the others stay what they are."""
    first = planned(FAR, *MATES, wants=asks())
    whole = by_agent(first)
    lost = whole["a"].pieces
    again = msgspec.structs.replace(asks(demand(lost, avoid=["a"])), crossers=first.crossers)
    gone = by_agent(planned(FAR, *MATES[1:], wants=again))
    assert gone == by_agent(planned(FAR, *MATES, wants=again)), "whether the planner has heard or not"
    forgotten = by_agent(planned(FAR, *MATES[1:], wants=asks(demand(lost, avoid=["a"]))))
    assert {agent: share.pieces for agent, share in gone.items()} != {
        agent: share.pieces for agent, share in forgotten.items()
    }
