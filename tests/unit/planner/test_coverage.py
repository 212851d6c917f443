"""The proof finds every fault that a plan could have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.planner.given import ME, holder, pieces_of, source

from tensorhub_common.wire.transfer import Plan, Share, SourceId
from tensorhub_planner.coverage import PlanError, grounded, prove
from tensorhub_planner.ranges import Ranges, Sizes, normal
from tensorhub_planner.sources import Holder

SIZES = Sizes([10] * 8)
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
    prove(
        Plan(version=12, shares=shares, why=""),
        wanted=wanted,
        sizes=SIZES,
        holders={each.source: each for each in holders},
        reader=ME,
        avoid=frozenset(source(agent) for agent in avoid),
        chain_max=4,
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


def trace(at: SourceId, pieces: Ranges, *holders: Holder, chain_max: int = 4) -> Ranges:
    return grounded(at, pieces, {each.source: each for each in holders}, ME, chain_max)


def test_a_half_filled_holder_gives_what_it_will_have() -> None:
    """It has 0-3, reads 4-5 from a ready shard, and will never have the rest."""
    half = holder("half", pieces=((0, 6),), feeds=[("a", ((4, 2),))])
    assert trace(half.source, ALL, half, holder("a")) == ((0, 6),)
    assert trace(half.source, ALL, half) == ((0, 4),), "its source is gone"


def test_two_that_wait_for_each_other_give_nothing() -> None:
    one, other = holder("a", feeds=[("b", ((0, 4),))]), holder("b", feeds=[("a", ((2, 6),))])
    assert trace(one.source, ALL, one, other) == ((0, 2), (4, 4)), "pieces 2 and 3 go round"
    itself = holder("a", feeds=[("a", ((0, 1),))])
    assert trace(itself.source, ALL, itself) == ((1, 7),)


def test_what_comes_from_the_reader_is_no_source_for_it() -> None:
    half = holder("half", feeds=[("me", ((0, 4),))])
    assert trace(half.source, ALL, half) == ((4, 4),)


def test_a_chain_is_bounded() -> None:
    chain = [holder("0")] + [holder(str(n), feeds=[(str(n - 1), ALL)]) for n in range(1, 5)]
    assert trace(chain[3].source, ALL, *chain) == ALL
    assert trace(chain[4].source, ALL, *chain) == ()


names = st.sampled_from("abcd")
parts = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 3)), max_size=3).map(
    lambda some: normal((first, min(count, 8 - first)) for first, count in some)
)
worlds = st.dictionaries(names, st.tuples(st.none() | parts, st.lists(st.tuples(names, parts), max_size=3)))


@given(worlds, names, parts)
def test_grounded_agrees_with_a_walk_piece_by_piece(
    world: dict[str, tuple[Ranges | None, list[tuple[str, Ranges]]]], start: str, wanted: Ranges
) -> None:
    """A piece counts when somebody on its one chain has it now."""
    holders = [holder(name, pieces=pieces, feeds=feeds) for name, (pieces, feeds) in world.items()]

    def has(name: str, piece: int, below: tuple[str, ...]) -> bool:
        if name not in world or name in below or len(below) >= 4:
            return False
        pieces, feeds = world[name]
        if pieces is not None and piece not in pieces_of(pieces):
            return False
        feeder = next((feed for feed, fed in feeds if piece in pieces_of(fed)), None)
        return feeder is None or has(feeder, piece, (*below, name))

    expected = {piece for piece in pieces_of(wanted) if has(start, piece, ())}
    assert pieces_of(trace(source(start), wanted, *holders)) == expected
