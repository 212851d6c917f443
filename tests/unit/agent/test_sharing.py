"""Who gives whose pieces: parts by rate, parts of the window, and which source is too slow."""

import pytest

from tensorhub_agent.pace import AHEAD_S, BATCH_BYTES_MIN, UCXX_BATCH_BYTES, Pace
from tensorhub_agent.ranges import take_first
from tensorhub_agent.reading import Reading, SourcePhase
from tensorhub_agent.sharing import SLOW_MIN_S, share_out, take_over, too_slow
from tensorhub_agent.trust import FORGIVEN_MAX, Trust
from tensorhub_common.wire.transfer import Range, Share, SourceId, Transport

MIB = 1024 * 1024


def source(
    number: int, *, rate: float = 0.0, queue: tuple[Range, ...] = (), flying: int = 0, transport: Transport = "ucxx"
) -> Reading:
    who = SourceId(f"agent-{number}", 1, "trainer", 0)
    share = Share(source=who, transport=transport, pieces=(), nbytes=0, why="")
    reading = Reading(number, share, SourcePhase.OPEN, 0.0)
    reading.queue.extend(queue)
    if rate:
        reading.pace.came(round(rate), 1.0)
    if flying:
        reading.flying[1] = (((100, 1),), flying)
    return reading


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
    share_out(loose, sources)
    assert [each.waiting for each in sources] == [3, 2, 2]
    assert loose == []


@pytest.mark.parametrize(("mine", "theirs", "taken"), [(0.0, 0.0, 5), (300.0, 100.0, 8), (1.0, 1e9, 1), (1e9, 1.0, 10)])
def test_an_idle_source_takes_a_part_by_the_rates_and_at_least_one_piece(
    mine: float, theirs: float, taken: int
) -> None:
    taker, giver = source(1, rate=mine), source(2, rate=theirs, queue=((0, 4), (7, 6)))
    take_over(taker, [taker, giver])
    assert (taker.waiting, giver.waiting) == (taken, 10 - taken)


def test_nobody_is_too_slow_for_an_idle_source_without_a_rate_or_for_a_busy_one() -> None:
    slow = source(1, rate=1.0, flying=1000)
    assert too_slow([slow, source(2)], 0.0) is None
    assert too_slow([slow, source(2, rate=1e6, flying=1)], 0.0) is None
    assert too_slow([slow, source(2, rate=1e6)], 0.0) is slow


def test_who_is_silent_is_expected_to_be_so_for_as_long_again() -> None:
    slow = source(1, rate=1e6, flying=10)
    idle = source(2, rate=1e6)
    assert too_slow([slow, idle], SLOW_MIN_S) is None
    assert too_slow([slow, idle], SLOW_MIN_S + 0.1) is slow


def test_a_local_source_is_never_too_slow() -> None:
    assert too_slow([source(1, rate=1.0, flying=1000, transport="local"), source(2, rate=1e6)], 9.0) is None


def test_a_slow_source_is_asked_for_little_at_a_time() -> None:
    pace = Pace("ucxx")
    assert pace.batch_bytes(64 * MIB) == UCXX_BATCH_BYTES
    assert pace.ahead_bytes(64 * MIB) == 0, "beyond its first two batches"
    pace.came(MIB, 1.0)
    assert pace.batch_bytes(64 * MIB) == BATCH_BYTES_MIN
    assert pace.ahead_bytes(64 * MIB) == MIB * AHEAD_S
    fast = Pace("ucxx")
    fast.came(1000 * MIB, 1.0)
    assert fast.ahead_bytes(64 * MIB) == 64 * MIB
    assert fast.batch_bytes(4 * MIB) == 2 * MIB, "two batches in its part of the window"


def test_a_suspect_is_forgiven_so_often_and_a_failure_never() -> None:
    trust = Trust()
    suspect, failure = (SourceId(name, 1, "trainer", 0) for name in "ab")
    trust.fail(failure)
    for _ in range(FORGIVEN_MAX):
        trust.suspect(suspect)
        assert trust.left_out() == (failure, suspect)
        assert trust.forgive()
    assert trust.left_out() == (failure,)
    trust.suspect(suspect)
    assert trust.has_failed(suspect)
    assert not trust.forgive()
