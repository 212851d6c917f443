"""The proof finds every fault that a plan could have."""

import pytest
from tests.unit.planner.given import ME, MY_TURN, holder, source

from tensorhub_common.protocol.plans import Plan, ReadPriority, Share, SourceId
from tensorhub_common.protocol.ranges import Ranges
from tensorhub_planner.catalog_view.holders import Holder
from tensorhub_planner.planning.verifier import PlanError, chain_ends, servable_pieces, verify_plan
from tensorhub_planner.primitives.piece_sizes import PieceSizes

SIZES = PieceSizes([10] * 8)
ALL = ((0, 8),)
HOLDERS = [holder("a"), holder("b"), holder("part", pieces=((0, 2),))]


def share(agent: str | SourceId, pieces: Ranges, nbytes: int | None = None) -> Share:
    return Share(
        source=source(agent) if isinstance(agent, str) else agent,
        transport="ucxx",
        pieces=pieces,
        nbytes=SIZES.of(pieces) if nbytes is None else nbytes,
        why="",
    )


def check(*shares: Share, wanted: Ranges = ALL, holders: list[Holder] = HOLDERS, avoid: tuple[str, ...] = ()) -> None:
    verify_plan(
        Plan(version=12, shares=shares, why=""),
        wanted=wanted,
        sizes=SIZES,
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
        ((share("part", ALL),), "ends at no shard that is ready"),
        ((share("unheard-of", ALL),), "ends at no shard that is ready"),
        ((share(ME, ALL),), "must not be read"),
        ((share("b", ((0, 4),)), share("failed", ((4, 4),))), "must not be read"),
    ],
)
def test_a_faulty_plan_is_found(shares: tuple[Share, ...], fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        check(*shares, avoid=("failed",))


def test_a_half_filled_holder_gives_those_whose_turn_is_later() -> None:
    half = holder("half", turn=5)
    assert servable_pieces(half, ALL, ReadPriority(6, 1), ALL) == ALL
    assert servable_pieces(half, ALL, ReadPriority(5, 6), ALL) == ALL, "of one command the round counts"
    assert servable_pieces(half, ALL, ReadPriority(5, 5), ALL) == (), "not itself"
    assert servable_pieces(half, ALL, ReadPriority(4, 9), ALL) == ()
    assert servable_pieces(half, ALL, None, ALL) == (), "an agent that knows no turns"


def test_what_has_no_ready_holder_comes_from_no_half_filled_one() -> None:
    half, part = holder("half", turn=5), holder("part", pieces=((0, 3),))
    ends = chain_ends([half, part, holder("other", layout="x" * 64)], half.key, ALL, draining=False)
    assert ends == ((0, 3),)
    assert servable_pieces(half, ALL, ReadPriority(6, 1), ends) == ((0, 3),)
    assert servable_pieces(part, ALL, None, ()) == ((0, 3),)


def test_a_draining_shard_ends_a_chain() -> None:
    """It grants no new lease, and those that read from it go on."""
    assert chain_ends([holder("half", turn=5)], holder("half").key, ALL, draining=True) == ALL


def test_a_plan_that_reads_from_a_later_turn_is_found() -> None:
    half = holder("half", turn=60)
    with pytest.raises(PlanError, match="ends at no shard that is ready"):
        check(share("half", ALL), holders=[*HOLDERS, half])
    check(share("half", ALL), holders=[*HOLDERS, holder("half", turn=40)])
