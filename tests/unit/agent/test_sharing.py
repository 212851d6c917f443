"""Who gives whose pieces: parts by rate, parts of the window, and which source is too slow."""

from collections.abc import Iterable

import msgspec
import pytest

from tensorhub_agent.primitives.ranges import take_first
from tensorhub_agent.rates.source_rate import AHEAD_S, BatchLimits, SourceRate
from tensorhub_agent.transfer import balancing
from tensorhub_agent.transfer.balancing import (
    assign_plan,
    check,
    distribute,
    feed_idle_sources,
    fill_window,
    slowest_replaceable,
    steal_from_busiest,
)
from tensorhub_agent.transfer.exclusions import FORGIVEN_MAX, Exclusions
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS
from tensorhub_agent.transfer.role_index import RoleIndex
from tensorhub_agent.transfer.source import Source, SourcePhase
from tensorhub_common.protocol.plans import Plan, Share, SourceId, Transport
from tensorhub_common.protocol.ranges import Range

MIB = 1024 * 1024


def source(
    number: int, *, rate: float = 0.0, queue: tuple[Range, ...] = (), flying: int = 0, transport: Transport = "ucxx"
) -> Source:
    who = SourceId(f"agent-{number}", 1, "trainer", 0)
    share = Share(source=who, transport=transport, pieces=(), nbytes=0, why="")
    reading = Source(number, share, SourcePhase.OPEN, 0.0)
    reading.queue.extend(queue)
    if rate:
        reading.pace.record(round(rate), 1.0)
    if flying:
        reading.in_flight[1], reading.in_flight_bytes = (((100, 1),), flying), flying
    return reading


def index_of(sources: Iterable[Source]) -> RoleIndex:
    """Return the index of a read that has these sources, and has not got on since."""
    index = RoleIndex(DEFAULT_LIMITS)
    index.running = True
    for each in sources:
        index.add(each)
    index.settle()
    return index


@pytest.mark.parametrize(
    ("wanted", "taken", "left"),
    [(0, [], [(0, 2), (5, 3)]), (3, [(0, 2), (5, 1)], [(6, 2)]), (9, [(0, 2), (5, 3)], [])],
)
def test_pieces_are_taken_from_the_front(wanted: int, taken: list[Range], left: list[Range]) -> None:
    ranges = [(0, 2), (5, 3)]
    assert take_first(ranges, wanted) == taken
    assert ranges == left


def test_loose_pieces_are_shared_out_whole() -> None:
    sources = [source(number) for number in range(3)]
    loose = [(0, 5), (9, 2)]
    distribute(loose, sources)
    assert [each.waiting for each in sources] == [3, 2, 2]
    assert loose == []


@pytest.mark.parametrize(("mine", "theirs", "taken"), [(0.0, 0.0, 5), (300.0, 100.0, 8), (1.0, 1e9, 1), (1e9, 1.0, 10)])
def test_an_idle_source_takes_a_part_by_the_rates_and_at_least_one_piece(
    mine: float, theirs: float, taken: int
) -> None:
    taker, giver = source(1, rate=mine), source(2, rate=theirs, queue=((0, 4), (7, 6)))
    steal_from_busiest(taker, [taker, giver])
    assert (taker.waiting, giver.waiting) == (taken, 10 - taken)


def test_nobody_is_too_slow_for_an_idle_source_without_a_rate_or_for_a_busy_one() -> None:
    slow = source(1, rate=1.0, flying=1000)
    assert slowest_replaceable(index_of([slow, source(2)]), 0.0) is None
    assert slowest_replaceable(index_of([slow, source(2, rate=1e6, flying=1)]), 0.0) is None
    assert slowest_replaceable(index_of([slow, source(2, rate=1e6)]), 0.0) is slow


def test_who_is_silent_is_expected_to_be_so_for_as_long_again() -> None:
    slow = source(1, rate=1e6, flying=10)
    idle = source(2, rate=1e6)
    assert slowest_replaceable(index_of([slow, idle]), DEFAULT_LIMITS.slow_min_s) is None
    assert slowest_replaceable(index_of([slow, idle]), DEFAULT_LIMITS.slow_min_s + 0.1) is slow


def test_a_local_source_is_never_too_slow() -> None:
    assert (
        slowest_replaceable(index_of([source(1, rate=1.0, flying=1000, transport="local"), source(2, rate=1e6)]), 9.0)
        is None
    )


def test_a_slow_source_is_asked_for_little_at_a_time() -> None:
    pace = SourceRate("ucxx")
    assert pace.batch_bytes(64 * MIB) == BatchLimits().ucxx_bytes
    assert pace.in_flight_limit(64 * MIB) == 0, "beyond its first two batches"
    pace.record(MIB, 1.0)
    assert pace.batch_bytes(64 * MIB) == BatchLimits().least_bytes
    assert pace.in_flight_limit(64 * MIB) == MIB * AHEAD_S
    fast = SourceRate("ucxx")
    fast.record(1000 * MIB, 1.0)
    assert fast.in_flight_limit(64 * MIB) == 64 * MIB
    assert fast.batch_bytes(4 * MIB) == 2 * MIB, "two batches in its part of the window"


def test_a_suspect_is_forgiven_so_often_and_a_failure_never() -> None:
    trust = Exclusions()
    suspect, failure = (SourceId(name, 1, "trainer", 0) for name in "ab")
    trust.fail(failure)
    for _ in range(FORGIVEN_MAX):
        trust.exclude_for_now(suspect)
        assert trust.left_out() == (failure, suspect)
        assert trust.readmit_suspects()
    assert trust.left_out() == (failure,)
    trust.exclude_for_now(suspect)
    assert trust.has_failed(suspect)
    assert not trust.readmit_suspects()


# What a plan gives, what idle ones take, and what is asked for.


def share(name: str, *pieces: Range) -> Share:
    return Share(source=SourceId(name, 1, "trainer", 0), transport="ucxx", pieces=pieces, nbytes=0, why="")


def test_a_plan_gives_each_loose_piece_once_and_leaves_what_it_does_not_name() -> None:
    one, two, three = share("a", (0, 4)), share("b", (2, 4)), share("c", (0, 2))
    given, loose = assign_plan(Plan(version=1, shares=(one, two, three), why=""), [(1, 7)], 10)
    assert given == [(one, [(1, 3)]), (two, [(4, 2)])]
    assert loose == [(6, 2)]


def test_what_is_not_loose_is_not_given() -> None:
    given, loose = assign_plan(Plan(version=1, shares=(share("a", (0, 10)),), why=""), [(2, 1), (5, 2)], 10)
    assert [ranges for _, ranges in given] == [[(2, 1), (5, 2)]]
    assert loose == []


def test_loose_pieces_go_to_whole_sources_and_to_half_filled_ones_only_what_they_have() -> None:
    loose = [(0, 6)]
    busy, whole, half = source(1, queue=((9, 1),)), source(2), source(3)
    half.fills(10, [(0, 3)], 0.0)
    feed_idle_sources(index_of([busy, whole, half]), loose)
    assert (busy.waiting, whole.waiting, half.waiting, loose) == (1, 6, 0, [])
    loose = [(0, 6)]
    half = source(3)
    half.fills(10, [(1, 2)], 0.0)
    feed_idle_sources(index_of([busy, half]), loose)
    assert (list(half.queue), half.awaiting_source) == ([(1, 2)], [])
    assert loose == [(0, 1), (3, 3)]


def test_nobody_is_relieved_of_its_pieces_while_some_are_loose() -> None:
    idle, busy = source(1), source(2, queue=((0, 4),))
    feed_idle_sources(index_of([idle, busy]), [])
    assert (idle.waiting, busy.waiting) == (2, 2)
    idle, busy = source(1), source(2, queue=((0, 4),))
    feed_idle_sources(index_of([idle, busy]), [(8, 1)])
    assert (idle.waiting, busy.waiting) == (1, 4)


def test_a_half_filled_source_takes_only_what_it_has() -> None:
    idle, busy = source(1), source(2, queue=((0, 8),))
    idle.fills(10, [(0, 2), (9, 1)], 0.0)
    steal_from_busiest(idle, [idle, busy])
    assert sorted(idle.queue) == [(0, 2)]
    assert not idle.awaiting_source
    assert busy.waiting == 6


def test_an_idle_source_takes_from_the_busiest() -> None:
    idle, busy, busiest = source(1), source(2, queue=((0, 3),)), source(3, queue=((3, 6),))
    steal_from_busiest(idle, [idle, busy, busiest])
    assert (idle.waiting, busy.waiting, busiest.waiting) == (3, 3, 3)
    nobody = source(4)
    steal_from_busiest(nobody, [nobody])
    steal_from_busiest(nobody, [nobody, source(5)])
    assert nobody.waiting == 0


def filled(reading: Source, share_bytes: int, room_bytes: int) -> list[int]:
    """Return the bytes of each batch that is cut, as a read asks for it."""
    found = []
    for ranges, nbytes in fill_window(reading, [MIB] * 100, share_bytes, room_bytes):
        reading.asked(100 + len(reading.in_flight), ranges, nbytes, 0.0)
        found.append(nbytes // MIB)
    return found


def test_two_batches_are_asked_for_in_any_case_and_more_while_there_is_room() -> None:
    assert filled(source(1, queue=((0, 100),)), 64 * MIB, 64 * MIB) == [8, 8]
    fast = 1000.0 * MIB
    assert filled(source(1, rate=fast, queue=((0, 100),)), 32 * MIB, 64 * MIB) == [8, 8, 8, 8]
    assert filled(source(1, rate=fast, queue=((0, 100),)), 32 * MIB, 24 * MIB) == [8, 8, 8]
    assert filled(source(1, rate=fast, queue=((0, 100),)), 32 * MIB, 0) == [8, 8]
    assert filled(source(1, rate=fast, queue=((0, 10),)), 32 * MIB, 64 * MIB) == [8, 2]


def test_what_is_under_way_already_counts_for_its_part() -> None:
    under_way = source(1, rate=1000.0 * MIB, queue=((0, 100),), flying=24 * MIB)
    assert filled(under_way, 32 * MIB, 64 * MIB) == [8]
    assert filled(under_way, 32 * MIB, 64 * MIB) == []


# Who is too slow, at the bounds.


def test_a_source_that_an_idle_one_would_hardly_beat_is_kept() -> None:
    """Another takes `switch_s` and the bytes at its own rate, and has to be better by `slow_times`."""
    idle = source(2, rate=10e6)
    elsewhere_s = DEFAULT_LIMITS.switch_s + 1.0
    bound_s = DEFAULT_LIMITS.slow_times * elsewhere_s
    slow = source(1, rate=10e6 / (bound_s * 1.01), flying=10_000_000)
    assert slowest_replaceable(index_of([slow, idle]), 0.0) is slow
    kept = source(1, rate=10e6 / (bound_s * 0.99), flying=10_000_000)
    assert slowest_replaceable(index_of([kept, idle]), 0.0) is None


def test_what_would_have_to_be_read_again_counts_for_the_slow_one() -> None:
    idle = source(2, rate=10e6)
    slow = source(1, rate=1e6, flying=1_000_000)
    assert slowest_replaceable(index_of([slow, idle]), 0.0) is slow
    slow.unconfirmed_bytes = 10_000_000
    assert slowest_replaceable(index_of([slow, idle]), 0.0) is None


def test_of_several_slow_ones_the_slowest_is_named_and_none_that_has_nothing_under_way() -> None:
    idle = source(3, rate=1e6)
    slow, slowest = source(1, rate=100.0, flying=1000), source(2, rate=10.0, flying=1000)
    assert slowest_replaceable(index_of([slow, slowest, idle]), 0.0) is slowest
    assert slowest_replaceable(index_of([source(1, rate=1.0, queue=((0, 1),)), idle]), 0.0) is None
    slowest.confirming = True
    assert slowest_replaceable(index_of([slow, slowest, idle]), 0.0) is slow


def test_the_check_names_a_piece_that_is_nowhere_or_twice() -> None:
    holds = source(1, queue=((0, 1),))
    check(bytearray([0, 1, 0]), [(2, 1)], [holds])
    with pytest.raises(AssertionError, match="piece 2 is in 0 places"):
        check(bytearray([0, 1, 0]), [], [holds])
    with pytest.raises(AssertionError, match="piece 0 is in 2 places"):
        check(bytearray([0, 1, 0]), [(2, 1), (0, 1)], [holds])
    with pytest.raises(AssertionError, match="piece 1 is in 1 places"):
        check(bytearray([0, 1, 0]), [(1, 2)], [holds])


def test_who_failed_is_not_suspected_and_who_was_forgiven_is_known() -> None:
    trust = Exclusions()
    source_id = SourceId("a", 1, "trainer", 0)
    trust.exclude_for_now(source_id)
    assert not trust.has_forgiven(source_id)
    trust.readmit_suspects()
    assert trust.has_forgiven(source_id)
    trust.exclude_for_now(source_id)
    trust.fail(source_id)
    assert trust.left_out() == (source_id,)
    trust.exclude_for_now(source_id)
    assert trust.left_out() == (source_id,)
    assert not trust.readmit_suspects()


def test_whoever_is_late_is_kept_where_nobody_idle_is_known_to_be_faster() -> None:
    late = source(1, rate=1.0, flying=1)
    assert slowest_replaceable(index_of([late]), 1000.0) is None
    assert slowest_replaceable(index_of([late, source(2, rate=1e6, flying=1)]), 1000.0) is None
    assert slowest_replaceable(index_of([late, source(2)]), 1000.0) is None
    assert slowest_replaceable(index_of([late, source(2, rate=1e6)]), 1000.0) is late


def test_the_room_is_for_what_is_asked_for_now() -> None:
    under_way = source(1, rate=1000.0 * MIB, queue=((0, 100),))
    for batch in (1, 2):
        under_way.asked(batch, ((100 + batch, 1),), 8 * MIB, 0.0)
    assert filled(under_way, 32 * MIB, 20 * MIB) == [8, 8]


def test_sources_are_not_compared_where_nobody_has_anything_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read may have a thousand sources that each bring a piece, and nothing else happens as often."""
    looks: list[int] = []

    def looked(taker: Source, others: "Iterable[Source]") -> None:
        looks.append(len(list(others)))
        steal_from_busiest(taker, others)

    monkeypatch.setattr(balancing, "steal_from_busiest", looked)
    sources = [source(number) for number in range(50)]
    index = index_of(sources)
    feed_idle_sources(index, [])
    assert not looks
    index.fresh.clear()
    sources[7].give([(0, 3)])
    feed_idle_sources(index, [])
    assert sum(looks) < 3 * len(sources), "of all others the few that have something are looked at"
    assert sorted(run for each in sources for run in each.queue) == [(0, 1), (1, 1), (2, 1)]


def test_of_sources_with_layouts_of_their_own_nobody_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a thousand has ended its part: it can bring nothing of the others'."""

    def looked(*_: object) -> None:
        raise AssertionError("nobody can take over from anybody")

    monkeypatch.setattr(balancing, "steal_from_busiest", looked)
    sources = [of_a_program(number, far=True, units=50, queue=((number, 1),)) for number in range(50)]
    for each in sources:
        each.share = msgspec.structs.replace(each.share, layout=f"layout-{each.number}")
    index = index_of(sources)
    sources[7].cut_batch([1] * 50, 10)
    feed_idle_sources(index, [])
    assert index.idle_of("layout-7")
    assert slowest_replaceable(index, 1000.0) is None


def of_a_program(number: int, *, far: bool, units: int = 4, queue: tuple[Range, ...] = ()) -> Source:
    """Return a source of a read by a program: far away and of another layout, or a mate of the reader's own."""
    reading = source(number, queue=queue, rate=1.0)
    layout = "theirs" if far else "own"
    reading.share = msgspec.structs.replace(reading.share, far=far, crosses=not far, layout=layout)
    reading.covered = bytearray(b"\1" * units)
    return reading


def test_a_mate_takes_over_what_it_has_from_a_far_source_of_another_layout() -> None:
    """What somebody in the site has need not cross."""
    far, mate = of_a_program(1, far=True, queue=((0, 4),)), of_a_program(2, far=False)
    mate.has = bytearray(b"\0\1\1\0")
    steal_from_busiest(mate, [far, mate])
    assert list(mate.queue) == [(1, 2)]
    steal_from_busiest(far, [far, mate])
    assert list(far.queue) == [(0, 1), (3, 1)], "and a far source takes nothing over from a mate"


def test_with_nobody_to_ask_what_is_loose_is_brought_from_afar_and_not_awaited_from_mates() -> None:
    far, mate = of_a_program(1, far=True), of_a_program(2, far=False)
    loose = [(0, 4)]
    distribute(loose, [mate, far])
    assert (list(far.queue), list(mate.queue), loose) == ([(0, 4)], [], [])
