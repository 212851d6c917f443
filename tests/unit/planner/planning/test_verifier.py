"""The verifier finds every fault that a plan could have."""

from typing import Any

import msgspec
import pytest
from tests.unit.planner.given import LAYOUT, ME, MY_TURN, ROOT, holder, source

from tensorhub_common.protocol.plans import Plan, Share, SourceId
from tensorhub_common.protocol.ranges import Ranges
from tensorhub_planner.catalog_view.holders import Holder
from tensorhub_planner.planning.verifier import PlanError, verify_plan, verify_reused_plan
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
        ((share("a", ALL, 81),), "says 81 bytes and has 80"),
        ((share("part", ALL),), "ends at no shard that is ready"),
        ((share("unheard-of", ALL),), "ends at no shard that is ready"),
        ((share(ME, ALL),), "must not be read"),
        ((share("b", ((0, 4),)), share("failed", ((4, 4),))), "must not be read"),
    ],
)
def test_a_faulty_plan_is_found(shares: tuple[Share, ...], fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        check(*shares, avoid=("failed",))


def test_a_plan_that_reads_from_a_later_turn_is_found() -> None:
    half = holder("half", turn=60)
    with pytest.raises(PlanError, match="ends at no shard that is ready"):
        check(share("half", ALL), holders=[*HOLDERS, half])
    check(share("half", ALL), holders=[*HOLDERS, holder("half", turn=40)])


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
        (None, [], "other shares"),
        ("another program", [holder("a")], "the same transfer program"),
    ],
)
def test_a_reused_plan_that_differs_in_more_than_roots_is_found(
    changes: Any, given: list[Holder], fault: str | None
) -> None:
    new = msgspec.structs.replace(OLD, **({"root": ROOT} | changes if isinstance(changes, dict) else {"root": ROOT}))
    shares = () if changes is None else (new,)
    plan = Plan(version=12, shares=shares, why="", program="q" if isinstance(changes, str) else "p")
    avoid = frozenset((source("failed"),))
    if fault is None:
        verify_reused_plan(plan, PROVEN, given, reader=ME, avoid=avoid)
        return
    with pytest.raises(PlanError, match=fault):
        verify_reused_plan(plan, PROVEN, given, reader=ME, avoid=avoid)
