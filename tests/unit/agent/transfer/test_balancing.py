"""Which source brings which piece once the plan is given, how much is under way, and who is left for being slow."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.agent.transfer.driver import (
    ALL,
    PIECE_BATCHES,
    PIECE_BYTES,
    Driven,
    numbers_of,
    planning,
    reading,
    running,
    share,
    source_id,
)

from tensorhub_agent.primitives.ranges import set_marks
from tensorhub_agent.rates.source_rate import BATCHES_MIN, BatchLimits
from tensorhub_agent.transfer import balancing
from tensorhub_agent.transfer.balancing import slowest_replaceable, steal_from_busiest
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS, TransferLimits
from tensorhub_agent.transfer.role_index import RoleIndex
from tensorhub_agent.transfer.source import BATCH_PIECES_MAX, Source, SourcePhase
from tensorhub_agent.transfer.source_pool import SourcePool
from tensorhub_agent.transfer.transfer import TransferPhase
from tensorhub_common.protocol.plans import Share
from tensorhub_common.protocol.ranges import Range

PIECES = 40
SMALL_BATCHES = TransferLimits(batches=BatchLimits(least_bytes=PIECE_BYTES))


def many(
    *shares: Share, there: Mapping[str, tuple[Range, ...]] | None = None, **more: object
) -> tuple[Driven, list[int]]:
    """Return a read of many pieces, of which two batches are under way at each source."""
    pieces = max(first + count for each in shares for first, count in each.pieces)
    changes = {"transport": "local", "pieces": pieces, "window_bytes": 20, **more}
    return reading(*shares, there=there, **changes)


# Which source.


@pytest.mark.parametrize(("giver_s", "taker_s", "taken"), [(1.0, 1.0, 9), (0.5, 2.0, 4), (0.01, 1.0, 1)])
def test_an_idle_source_takes_the_later_part_of_what_the_busiest_waits_for_by_their_rates(
    giver_s: float, taker_s: float, taken: int
) -> None:
    driven, [taker, giver, busy] = many(share("taker", (0, 1)), share("giver", (1, 20)), share("busy", (21, 6)))
    untouched = driven.pieces_of(busy)
    driven.brings(giver, giver_s)
    before = driven.pieces_of(giver)
    driven.brings(taker, taker_s - giver_s)
    mine = driven.pieces_of(taker)
    assert mine == set(sorted(before)[-len(mine) :]), "the later ones"
    assert abs(len(mine) - taken) <= 1
    assert (driven.pieces_of(giver), driven.pieces_of(busy)) == (before - mine, untouched)


def of_rate(number: int, bps: int | None = None, **fields: Any) -> Source:
    made = Source(number, share(str(number), transport="ucxx", **fields), SourcePhase.OPEN, 0.0)
    if bps is not None:
        made.pace.record(bps, 1.0)
    return made


@pytest.mark.parametrize(
    ("taker", "giver", "taken"),
    [
        ({}, {}, 5),
        ({"bps": 1}, {"bps": 1000}, 1),
        ({"far": True}, {}, 5),
        ({}, {"crosses": True}, 5),
        ({"far": True}, {"crosses": True}, 0),
    ],
    ids=["half without rates", "one at least", "far", "from a crosser", "far from a crosser"],
)
def test_of_two_that_wait_for_as_much_the_first_one_gives(taker: Any, giver: Any, taken: int) -> None:
    idle, *givers = of_rate(3, **taker), of_rate(2, **giver), of_rate(1, **giver)
    for each in givers:
        each.give([(0, 9)])
    steal_from_busiest(idle, [idle, *givers])
    assert (idle.waiting, *(each.waiting for each in givers)) == (taken, 9, 9 - taken)


def test_what_is_loose_and_a_busy_half_filled_source_has_is_asked_for_elsewhere() -> None:
    driven, [half, dead] = many(share("half", (0, 3)), share("dead", (3, 3)), there={"half": ALL})
    assert driven.lost(dead).plan == (((5, 1),), (source_id("dead"),))
    driven.brings(half)
    assert driven.pieces_of(half) == {1, 2}


def test_nobody_looks_for_more_where_only_a_busy_source_brings_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the idle ones could take they have taken."""
    looks, relieve = list[str | None](), balancing._relieve
    shares = [share(name, run, layout=name) for name, run in (("a", (0, 1)), ("b", (1, 30)), ("c", (31, 2)))]
    driven, [idle, _, busy] = many(*shares, able=own({"a": (0, 1), "b": (1, 30), "c": (31, 2)}))
    driven.brings(idle)

    def noted(index: RoleIndex, kind: str | None) -> None:
        looks.append(kind)
        relieve(index, kind)

    monkeypatch.setattr(balancing, "_relieve", noted)
    driven.brings(busy)
    assert looks == []


def test_a_piece_in_two_places_is_found_out() -> None:
    with pytest.raises(AssertionError, match="piece 0 is in 2 places"):
        balancing.check(bytearray(1), [(0, 1), (0, 1)], ())


def test_a_half_filled_source_takes_only_what_it_has() -> None:
    there = {"half": ((0, 1), (18, 2))}
    driven, [half, whole] = many(share("half", (0, 1)), share("whole", (1, 20)), there=there)
    driven.brings(half, 0.1)
    assert driven.pieces_of(half) == {18, 19}
    assert driven.pieces_of(whole) == {*range(1, 18), 20}


def test_a_ready_source_takes_what_a_half_filled_one_waits_for() -> None:
    """And a half-filled one takes from nobody what it lacks."""
    shares = (share("half", (0, 5)), share("ready", (5, 1)))
    driven, [half, ready] = running(*shares, there={"half": ((0, 1),)}, transport="ucxx")
    driven.brings(ready)
    assert driven.posts == [(ready, ((3, 2),))], "the later half"
    assert driven.brings(half).post == [], "it has none of what the other one has under way, nor of its own rest"


def test_what_a_source_of_the_site_has_does_not_cross_again() -> None:
    """A crosser takes over from a far source what it has; a far source takes nothing from a crosser."""
    far, mate = share("far", (1, 20), far=True), share("mate", (0, 1), crosses=True)
    driven, [far_one, mate_one] = many(far, mate, there={"mate": ((0, 1), (10, 3))})
    driven.brings(mate_one, 0.1)
    assert driven.pieces_of(mate_one) == {10, 11, 12}
    for _ in range(17):
        driven.brings(far_one, 0.01)
    assert (driven.pieces_of(far_one), driven.pieces_of(mate_one)) == (set(), {10, 11, 12})


def own(units: dict[str, Range]) -> Callable[[Share], bytearray]:
    """Return which units a share's source gives, by its layout."""

    def able(of: Share) -> bytearray:
        marks = bytearray(PIECES)
        set_marks(marks, [units[of.layout or ""]])
        return marks

    return able


def test_a_source_of_another_layout_takes_over_from_its_own_layout_alone() -> None:
    units = {"one": (0, 20), "two": (20, 20)}
    parts = (("a", (0, 1), "one"), ("b", (1, 19), "one"), ("c", (20, 20), "two"))
    shares = [share(name, run, layout=layout) for name, run, layout in parts]
    driven, [idle, like, unlike] = many(*shares, able=own(units))
    untouched = driven.pieces_of(unlike)
    driven.brings(idle, 0.1)
    assert driven.pieces_of(idle)
    assert driven.pieces_of(idle) <= set(range(1, 20))
    assert driven.pieces_of(unlike) == untouched
    assert driven.pieces_of(like).isdisjoint(driven.pieces_of(idle))


def test_a_plan_gives_each_missing_piece_once_and_what_it_leaves_out_is_asked_for() -> None:
    driven = planning(pieces=PIECES, limits=PIECE_BATCHES)
    one, two = driven.planned(share("a", (0, 20)), share("b", (10, 20)), share("c", (5, 5)))
    assert (driven.pieces_of(one), driven.pieces_of(two)) == (set(range(20)), set(range(20, 30)))
    assert driven.actions.plan == (((30, 10),), ())


def test_a_plan_that_gives_nothing_is_not_asked_for_again_at_once() -> None:
    driven, [number] = reading()
    driven.is_gone(number)
    driven.planned(share("a", *ALL))
    assert driven.actions.plan is None
    assert driven.tick(0.1).plan is not None


def test_with_no_planner_loose_pieces_go_to_sources_in_equal_parts() -> None:
    driven, [one, two, dead] = many(share("a", (0, 2)), share("b", (2, 2)), share("dead", (4, 12)))
    driven.is_gone(dead)
    driven.wait_exactly(1.0)
    assert driven.pieces_of(one) | driven.pieces_of(two) == set(range(16))
    assert abs(len(driven.pieces_of(one)) - len(driven.pieces_of(two))) <= 1
    assert driven.left_out == (source_id("dead"),)


# Batches.


@given(st.lists(st.integers(0, 30), min_size=20, max_size=20), st.integers(2, 100))
def test_batches_bring_all_pieces_in_order_and_each_ends_with_the_piece_that_fills_it(
    sizes: list[int], window_bytes: int
) -> None:
    limits = TransferLimits(batches=BatchLimits(wire_bytes=40, least_bytes=1))
    driven, [number] = running(
        share("a", (8, 12), (0, 8)),
        verify=False,
        transport="ucxx",
        pieces=20,
        sizes=sizes,
        window_bytes=window_bytes,
        limits=limits,
    )
    largest, cut = min(40, window_bytes // BATCHES_MIN), list[int]()
    while driven.source(number).in_flight:
        for _, ranges in driven.posts:
            batch = numbers_of(ranges)
            nbytes = sum(sizes[piece] for piece in batch)
            cut += batch
            assert nbytes - sizes[batch[-1]] < largest, "the piece before filled it already"
            assert nbytes >= largest or len(cut) == 20
        driven.brings(number)
    assert cut == [*range(8, 20), *range(8)]


def test_a_batch_of_tiny_pieces_is_bounded() -> None:
    pieces = 2 * BATCH_PIECES_MAX
    whole = share("a", (0, 3), (3, pieces - 3))
    driven, _ = running(whole, verify=False, pieces=pieces, sizes=[0] * pieces, transport="ucxx")
    assert len(numbers_of(driven.posts[0][1])) == BATCH_PIECES_MAX


def test_batches_are_short_while_others_wait_for_what_comes() -> None:
    driven = planning(transport="ucxx", limits=SMALL_BATCHES)
    [number] = driven.planned(share("a", *ALL))
    driven.opened(number)
    driven.transfer.has_downstream_readers = True
    driven.start()
    assert driven.posts == [(number, ((0, 1),)), (number, ((1, 1),))]


# How much is under way.


@pytest.mark.parametrize(
    ("shares", "there", "window_bytes", "asked"),
    [
        ([share("a", (0, 3)), share("b", (3, 3))], {}, 80, [(0, 2), (2, 1), (3, 2), (5, 1)]),
        ([share("a", *ALL)], {}, 40, [(0, 2), (2, 2)]),
        ([share("a", (0, 5)), share("b", (5, 1))], {"b": ()}, 40, [(0, 2), (2, 2)]),
    ],
    ids=["in equal parts", "alone", "beside one that has nothing yet"],
)
def test_the_window_is_divided_among_who_has_something_to_bring(
    shares: list[Share], there: dict[str, tuple[Range, ...]], window_bytes: int, asked: list[Range]
) -> None:
    driven, _ = running(*shares, there=there, window_bytes=window_bytes, transport="ucxx", limits=SMALL_BATCHES)
    assert [ranges for _, ranges in driven.posts] == [(each,) for each in asked]


def flying(driven: Driven, *numbers: int) -> list[int]:
    return [len(driven.source(number).in_flight) for number in numbers]


def test_a_stopped_source_with_the_whole_window_under_way_keeps_nobody_waiting() -> None:
    driven, [stopped, fast] = reading(share("a", (0, 4)), share("b", (4, 2)), window_bytes=PIECE_BYTES)
    assert flying(driven, stopped, fast) == [BATCHES_MIN, BATCHES_MIN]
    for _ in range(4):
        driven.brings(fast, 0.01)
    assert driven.source(fast).got_pieces == 4, "what the stopped one had waiting it brings as well"


def test_a_source_that_is_being_closed_holds_up_nobody() -> None:
    driven, [one, two] = running(share("a", (0, 3)), share("b", (3, 3)), window_bytes=20, transport="ucxx")
    driven.lost(one)
    driven.brings(two)
    assert [number for number, _ in driven.posts] == [two]


def test_a_source_of_unknown_rate_has_two_batches_under_way_then_its_part_of_the_window() -> None:
    driven, [one, other] = reading(share("a", (0, 5)), share("b", (5, 1)), window_bytes=80)
    assert flying(driven, one) == [BATCHES_MIN]
    driven.brings(one, 0.001)
    assert flying(driven, one) == [4], "half of the window, for the other one has something under way"
    driven.brings(other, 0.001)
    assert sum(flying(driven, one, other)) == 4


def test_a_part_of_the_window_that_grows_is_used_at_once_and_until_then_nobody_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of many sources only those are looked at that an event concerned, or whose part has grown."""
    looked_at, ask = list[int](), SourcePool._ask

    def noted(pool: SourcePool, source: Source, *args: Any) -> int:
        looked_at.append(source.number)
        return ask(pool, source, *args)

    monkeypatch.setattr(SourcePool, "_ask", noted)
    driven, [full, other] = reading(share("a", (0, 30)), share("b", (30, 9)), window_bytes=80, pieces=39)
    for number in (full, other):
        driven.brings(number, 0.001)
    assert flying(driven, full) == [4]
    looked_at.clear()
    driven.brings(other, 0.001)
    assert looked_at == [other]
    driven.is_gone(other)
    assert flying(driven, full) == [8]


def test_all_sources_together_have_no_more_under_way_than_the_window_but_for_two_batches_each() -> None:
    shares = [share(name, (20 * number, 20)) for number, name in enumerate("abc")]
    driven, [one, two, late] = reading(*shares, there={"c": ()}, verify=False, pieces=60, window_bytes=100)

    def in_flight() -> list[int]:
        return [driven.source(number).in_flight_bytes for number in (one, two, late)]

    driven.now = 0.001
    for number in (one, two, one, two):
        driven.brings(number)
    assert in_flight() == [50, 50, 0]
    driven.available(late, (40, 20))
    assert in_flight()[2] == 2 * PIECE_BYTES
    driven.now = 0.002
    driven.brings(late)
    assert in_flight()[2] == 2 * PIECE_BYTES
    for driven.now in (0.003, 0.004, 0.005):
        driven.brings(one)
    assert in_flight() == [30, 50, 20]
    while driven.phase() is TransferPhase.RUNNING and any(in_flight()):
        driven.brings(next(number for number in (late, two, one) if flying(driven, number)[0]))
    assert driven.transfer.done_bytes() == 60 * PIECE_BYTES, "who waited for room was asked for more"


def waiting_for_room(**more: object) -> tuple[Driven, list[int]]:
    """Return a read of four sources whose window is full.

    Two have half of it each, and ten pieces each to bring before any room is left. Two came later: each has its two
    batches under way, and waits for room.
    """
    runs = (("a", (0, 30)), ("b", (30, 30)), ("c", (60, 20)), ("d", (80, 20)))
    shares = [share(name, run) for name, run in runs]
    driven, numbers = reading(*shares, there={"c": (), "d": ()}, verify=False, pieces=100, window_bytes=200, **more)
    driven.now = 0.001
    for number in numbers[:2]:
        driven.brings(number)
    for number, (_, run) in zip(numbers[2:], runs[2:], strict=True):
        driven.available(number, run)
    driven.now = 0.002
    for number in numbers[2:]:
        driven.brings(number)
    for _ in range(4):
        assert driven.brings(numbers[0]).post == [], "there is no room yet"
    return driven, numbers


def asked_when(driven: Driven, brings: int) -> list[int]:
    """Return the sources that are asked for a batch when this one has brought one."""
    driven.brings(brings)
    return [number for number, _ in driven.posts]


def test_room_in_the_window_goes_to_those_who_wait_for_it_in_turn_and_no_more_than_there_is() -> None:
    driven, [one, two, *late] = waiting_for_room()
    asked = []
    for giver in (one, *[two] * 5):
        asked += asked_when(driven, giver)
        assert sum(source.in_flight_bytes for source in driven.transfer.sources.values()) == 200
    assert asked == [*late] * 3


def test_the_last_byte_of_room_is_used() -> None:
    """A batch is not cut short, so the window may be exceeded by one."""
    sizes = [PIECE_BYTES] * 100
    sizes[6] = PIECE_BYTES - 1
    driven, [one, two, *late] = waiting_for_room(sizes=sizes)
    assert sum(source.in_flight_bytes for source in driven.transfer.sources.values()) == 209
    asked = asked_when(driven, one) + asked_when(driven, two)
    assert asked == late, "199 bytes are under way each time"


# Slow ones.


@pytest.mark.parametrize(
    ("idle_bps", "late_s", "slow_min_s", "is_left"),
    [(10, 4.3, 0.5, True), (10, 4.1, 0.5, False), (10, 5.0, 5.0, False), (None, 1000.0, 0.5, False)],
    ids=["far slower", "slower", "soon over", "idle one of unknown rate"],
)
def test_a_source_is_left_for_an_idle_one_only_where_that_is_faster_by_enough(
    idle_bps: int | None,
    late_s: float,
    slow_min_s: float,
    is_left: bool,  # noqa: FBT001
) -> None:
    """Closing it costs `switch_s` and the 20 bytes again at the idle one's rate; it must take twice as long."""
    index = RoleIndex(TransferLimits(slow_min_s=slow_min_s, slow_times=2, switch_s=0.1))
    index.add(of_rate(3, idle_bps))
    late = [of_rate(number) for number in (1, 2)]
    for each in late:
        each.pace.record(10, late_s)
        each.asked(1, ((0, 1),), 10, 0.0)
        each.unconfirmed, each.unconfirmed_bytes = [(1, 1)], 10
        index.add(each)
    assert slowest_replaceable(index, 0.0) is (late[0] if is_left else None)


def test_a_slow_source_is_left_only_for_an_idle_one_that_could_bring_its_layout() -> None:
    index = RoleIndex(DEFAULT_LIMITS)
    idle, unlike, slow = of_rate(1, 10, layout="one"), of_rate(2, 10, layout="two"), of_rate(3, layout="one")
    slow.pace.record(10, 1000.0)
    for each in (idle, unlike, slow):
        each.covered = bytearray(PIECES)
    index.add(unlike)
    index.add(slow)
    slow.asked(1, ((0, 1),), 10, 0.0)
    assert slowest_replaceable(index, 0.0) is None
    index.add(idle)
    assert slowest_replaceable(index, 0.0) is slow


def test_a_local_source_is_never_left_for_being_slow() -> None:
    driven, [fast, _] = many(share("fast", (0, 1)), share("slow", (1, 2)))
    driven.brings(fast, 0.01)
    driven.wait_exactly(DEFAULT_LIMITS.stall_s - 0.1)
