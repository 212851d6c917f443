"""Which source brings which piece once the plan is given: idle sources take over, and slow ones are left."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tests.unit.agent.transfer.driver import PIECE_BATCHES, Driven, share, source_id

from tensorhub_agent.primitives.ranges import set_marks
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS
from tensorhub_agent.transfer.source import BATCH_PIECES_MAX
from tensorhub_common.protocol.plans import Share
from tensorhub_common.protocol.ranges import Range

PIECES = 40


def read(
    *shares: Share, there: Mapping[str, tuple[Range, ...]] | None = None, **transfer: Any
) -> tuple[Driven, list[int]]:
    """Return a read by units that has begun; sources in `there` are half-filled and have these pieces."""
    pieces = max(first + count for each in shares for first, count in each.pieces)
    driven = Driven(pieces=pieces, window_bytes=20, limits=PIECE_BATCHES, **transfer)
    driven.tick()
    numbers = driven.planned(*shares)
    for number in numbers:
        name = driven.transfer.sources[number].share.source.agent
        driven.transfer.opened(number, driven.digests, driven.now, (there or {}).get(name))
    driven.take()
    driven.transfer.start(driven.now)
    driven.take()
    return driven, numbers


def pieces_of(driven: Driven, number: int) -> set[int]:
    """Return the pieces that a source is to bring and has not brought."""
    runs = [run for place in driven.transfer.sources[number].places() for run in place]
    return {piece for first, count in runs for piece in range(first, first + count)}


def own(units: dict[str, Range]) -> Callable[[Share], bytearray]:
    """Return which units a share's source gives, by its layout."""

    def able(of: Share) -> bytearray:
        marks = bytearray(PIECES)
        set_marks(marks, [units[of.layout or ""]])
        return marks

    return able


@pytest.mark.parametrize(("giver_s", "taker_s", "taken"), [(1.0, 1.0, 9), (0.5, 2.0, 4), (0.01, 1.0, 1)])
def test_an_idle_source_takes_the_later_part_of_what_the_busiest_waits_for_by_their_rates(
    giver_s: float, taker_s: float, taken: int
) -> None:
    driven, [taker, giver] = read(share("taker", (0, 1)), share("giver", (1, 20)))
    driven.brings(giver, giver_s)
    before = pieces_of(driven, giver)
    driven.brings(taker, taker_s - giver_s)
    mine = pieces_of(driven, taker)
    assert mine == set(sorted(before)[-len(mine) :]), "the later ones"
    assert abs(len(mine) - taken) <= 1
    assert pieces_of(driven, giver) == before - mine


def test_an_idle_source_takes_from_the_busiest_of_several() -> None:
    driven, [taker, busy, _] = read(share("taker", (0, 1)), share("busy", (1, 6)), share("busiest", (7, 20)))
    untouched = pieces_of(driven, busy)
    driven.brings(taker, 0.1)
    assert pieces_of(driven, busy) == untouched
    assert pieces_of(driven, taker) <= set(range(7, 27))


def test_a_half_filled_source_takes_only_what_it_has() -> None:
    there = {"half": ((0, 1), (18, 2))}
    driven, [half, whole] = read(share("half", (0, 1)), share("whole", (1, 20)), there=there)
    driven.brings(half, 0.1)
    assert pieces_of(driven, half) == {18, 19}
    assert pieces_of(driven, whole) == {*range(1, 18), 20}


def test_what_a_source_of_the_site_has_does_not_cross_again() -> None:
    """A crosser takes over from a far source what it has; a far source takes nothing from a crosser."""
    far, mate = share("far", (1, 20), far=True), share("mate", (0, 1), crosses=True)
    driven, numbers = read(far, mate, there={"mate": ((0, 1), (10, 3))})
    by_name = {driven.transfer.sources[number].share.source.agent: number for number in numbers}
    driven.brings(by_name["mate"], 0.1)
    assert pieces_of(driven, by_name["mate"]) == {10, 11, 12}
    for _ in range(17):
        driven.brings(by_name["far"], 0.01)
    assert pieces_of(driven, by_name["far"]) == set()
    assert pieces_of(driven, by_name["mate"]) == {10, 11, 12}


def test_a_source_of_another_layout_takes_over_from_its_own_layout_alone() -> None:
    units = {"one": (0, 20), "two": (20, 20)}
    shares = [
        share(name, run, layout=layout)
        for name, run, layout in (("a", (0, 1), "one"), ("b", (1, 19), "one"), ("c", (20, 20), "two"))
    ]
    driven, [idle, like, unlike] = read(*shares, able=own(units))
    untouched = pieces_of(driven, unlike)
    driven.brings(idle, 0.1)
    assert pieces_of(driven, idle) <= set(range(1, 20))
    assert pieces_of(driven, idle)
    assert pieces_of(driven, unlike) == untouched
    assert pieces_of(driven, like).isdisjoint(pieces_of(driven, idle))


def test_a_plan_gives_each_missing_piece_once_and_what_it_leaves_out_is_asked_for() -> None:
    driven = Driven(pieces=PIECES, limits=PIECE_BATCHES)
    driven.tick()
    one, two = driven.planned(share("a", (0, 20)), share("b", (10, 20)), share("c", (5, 5)))
    assert (pieces_of(driven, one), pieces_of(driven, two)) == (set(range(20)), set(range(20, 30)))
    assert driven.actions.plan is not None or driven.tick(1.0).plan is not None
    assert driven.actions.plan == (((30, 10),), ())


def test_a_batch_of_tiny_pieces_is_bounded() -> None:
    driven = Driven(verify=False, pieces=2 * BATCH_PIECES_MAX, piece_bytes=0, transport="ucxx")
    driven.tick()
    [number] = driven.planned(share("a", (0, 3), (3, 2 * BATCH_PIECES_MAX - 3)))
    driven.opened(number, b"")
    driven.transfer.start(driven.now)
    first = driven.take().post[0][2]
    assert sum(count for _, count in first) == BATCH_PIECES_MAX


@pytest.mark.parametrize("slower", [1.1, 0.9])
def test_a_source_is_left_for_an_idle_one_only_where_that_is_faster_by_enough(slower: float) -> None:
    """Closing it costs `switch_s` and the bytes again at the idle one's rate; it must take `slow_times` as long."""
    driven, [fast, slow] = read(share("fast", (0, 1)), share("slow", (1, 2)), transport="ucxx")
    driven.brings(fast, 0.01)
    elsewhere_s = DEFAULT_LIMITS.switch_s + 20 / (10 / 0.01)
    bound_s = max(DEFAULT_LIMITS.slow_min_s, DEFAULT_LIMITS.slow_times * elsewhere_s)
    left = driven.wait(bound_s * slower - driven.now + (DEFAULT_LIMITS.look_s if slower > 1 else 0.0))
    assert left == ([slow] if slower > 1 else [])


def test_a_local_source_is_never_left_for_being_slow() -> None:
    driven, [fast, _] = read(share("fast", (0, 1)), share("slow", (1, 2)), transport="local")
    driven.brings(fast, 0.01)
    assert driven.wait(DEFAULT_LIMITS.stall_s - 0.1) == []


def test_with_no_planner_loose_pieces_go_to_sources_in_equal_parts() -> None:
    driven, [one, two, dead] = read(share("a", (0, 2)), share("b", (2, 2)), share("dead", (4, 12)))
    driven.transfer.lost(dead, "gone", driven.now)
    driven.closed(dead)
    driven.transfer.planned(driven.nobody("no planner"), driven.now)
    driven.take()
    assert pieces_of(driven, one) | pieces_of(driven, two) == set(range(16))
    assert abs(len(pieces_of(driven, one)) - len(pieces_of(driven, two))) <= 1
    assert driven.transfer.pool.left_out() == (source_id("dead"),)
