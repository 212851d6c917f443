"""What a read tells of itself: why each source was left, what counted, when; and what each may have under way."""

from dataclasses import replace

import pytest
from tests.unit.agent.transfer.driver import (
    LIST,
    PIECE_BATCHES,
    PIECE_BYTES,
    PIECES,
    RIGHT,
    WRONG,
    Driven,
    running,
    source_id,
)

from tensorhub_agent.rates.source_rate import BatchLimits
from tensorhub_agent.transfer import source_pool
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS, TransferLimits
from tensorhub_agent.transfer.plan_requests import PLAN_AGAIN_S, PLAN_S_MAX, PLANS_MAX
from tensorhub_agent.transfer.source import SourcePhase
from tensorhub_agent.transfer.transfer import Transfer, TransferPhase
from tensorhub_common.errors import IntegrityError, VersionUnavailable
from tensorhub_common.protocol.log.commands import NO_ROOT
from tensorhub_common.protocol.plans import Plan, Refusal, Share
from tensorhub_common.protocol.ranges import Range

NOBODY = Refusal(error=VersionUnavailable.__name__, reason="nobody has it")


SMALL_BATCHES = TransferLimits(batches=BatchLimits(least_bytes=PIECE_BYTES))


def why(driven: Driven, number: int) -> str:
    return driven.transfer.sources[number].lost


def opening(*names: str) -> tuple[Driven, list[int]]:
    """Return a read whose sources are not open yet."""
    driven = Driven()
    driven.tick()
    return driven, driven.planned(*((name, ((index, 1),)) for index, name in enumerate(names)))


def end(driven: Driven, number: int) -> tuple[str, str] | None:
    """Close the source, and let the planner say for long enough that there is nobody."""
    driven.closed(number)
    for _ in range(30):
        driven.transfer.planned(NOBODY, driven.now)
        driven.tick(0.1)
    return driven.transfer.error


# Why a source was left.


def test_a_list_that_is_not_the_logs_is_told_and_ends_as_damage() -> None:
    driven = Driven()
    driven.tick()
    [number] = driven.planned(("a", ((0, PIECES),)))
    driven.opened(number, WRONG * PIECES)
    assert why(driven, number) == "its digests are not those of the log"
    left = "nobody has it (the last source, on a, was left because its digests are not those of the log)"
    assert end(driven, number) == (IntegrityError.__name__, left)


@pytest.mark.parametrize("holds", [True, False])
def test_wrong_bytes_are_told_whoever_is_at_fault(holds: bool) -> None:  # noqa: FBT001
    driven, [number] = running(("a", ((0, PIECES),)))
    [(_, batch, _)] = driven.actions.post
    driven.done(number, batch, WRONG + LIST[16:])
    driven.transfer.confirmed(number, holds=holds, now=driven.now)
    assert why(driven, number) == "its bytes did not match the digests of the log"


def test_a_lease_that_did_not_hold_is_told() -> None:
    driven, [number] = running(("a", ((0, PIECES),)), verify=False)
    [(_, batch, _)] = driven.actions.post
    driven.done(number, batch, b"")
    driven.transfer.confirmed(number, holds=False, now=driven.now)
    assert why(driven, number) == "its lease did not hold to the end"


def test_silence_is_told() -> None:
    driven, [number] = running(("a", ((0, PIECES),)))
    driven.wait()
    assert why(driven, number) == "it made no progress"


# What counted.


def test_right_pieces_of_a_wrong_batch_count_and_are_shown_and_the_wrong_ones_are_wasted() -> None:
    driven, [number] = running(("a", ((0, PIECES),)))
    [(_, batch, _)] = driven.actions.post
    actions = driven.done(number, batch, LIST[:32] + WRONG + LIST[48:])
    assert actions.proven == [(0, 2), (3, 3)]
    source = driven.transfer.sources[number]
    assert (source.got_pieces, source.got_bytes) == (PIECES - 1, (PIECES - 1) * PIECE_BYTES)
    assert (source.retried, source.wasted_bytes) == (1, PIECE_BYTES)
    assert driven.transfer.done_bytes() == (PIECES - 1) * PIECE_BYTES


def test_right_batches_are_shown_as_they_come() -> None:
    driven, [number] = running(("a", ((0, PIECES),)))
    [(_, batch, _)] = driven.actions.post
    assert driven.done(number, batch, LIST).proven == [(0, PIECES)]


def test_what_waits_for_its_sources_word_is_told_as_come() -> None:
    limits = TransferLimits(batches=BatchLimits(memory_bytes=2 * PIECE_BYTES))
    driven, [number] = running(("a", ((0, PIECES),)), verify=False, limits=limits)
    for came, confirms in ((20, []), (40, []), (60, [number])):
        batch = next(iter(driven.transfer.sources[number].in_flight))
        actions = driven.done(number, batch, b"")
        assert (driven.transfer.done_bytes(), actions.confirm) == (came, confirms)
    driven.transfer.confirmed(number, holds=True, now=driven.now)
    source = driven.transfer.sources[number]
    assert (driven.phase(), source.got_bytes, source.unconfirmed_bytes) == (TransferPhase.DONE, 60, 0)


def test_when_things_happened_is_kept() -> None:
    driven = Driven(window_bytes=20)
    driven.tick()
    driven.now = 0.5
    [number] = driven.planned(("a", ((0, PIECES),)))
    read = driven.transfer
    driven.now = 2.0
    driven.opened(number)
    assert (read.planned_at, read.leased_at) == (0.5, 2.0)
    driven.now = 3.0
    read.start(driven.now)
    driven.now = 3.5
    driven.brings(number)
    driven.now = 4.0
    driven.brings(number)
    assert (read.started, read.first_at, read.last_at) == (3.0, 3.5, 4.0)
    while driven.phase() is TransferPhase.RUNNING:
        driven.brings(number)
    assert read.ended == driven.now


def test_a_plan_in_mid_read_is_not_the_one_that_the_read_began_with() -> None:
    driven, [number] = running(("a", ((0, PIECES),)))
    driven.now = 1.0
    driven.transfer.lost(number, "gone", driven.now)
    driven.closed(number)
    driven.planned(("b", ((0, PIECES),)))
    assert driven.transfer.planned_at == 0.0


# What a half-filled source says that it has.


@pytest.mark.parametrize("there", [((0, 1),), ((0, PIECES),), ((PIECES - 1, 1),)])
def test_pieces_of_the_shard_are_taken_note_of(there: tuple[Range, ...]) -> None:
    driven, number = waiting_for_a_half_filled_one()
    driven.transfer.available(number, there, driven.now)
    assert sum(driven.transfer.sources[number].has or ()) == sum(count for _, count in there)


@pytest.mark.parametrize("there", [((-1, 2),), ((0, 0),), ((0, PIECES + 1),), ((PIECES, 1),), ((PIECES - 1, 2),)])
def test_pieces_that_the_shard_does_not_have_are_not(there: tuple[Range, ...]) -> None:
    driven, number = waiting_for_a_half_filled_one()
    driven.transfer.available(number, ((0, 1), *there), driven.now)
    assert driven.transfer.sources[number].has == bytearray(PIECES)


def waiting_for_a_half_filled_one() -> tuple[Driven, int]:
    driven = Driven()
    driven.tick()
    [number] = driven.planned(("a", ((0, PIECES),)))
    driven.transfer.opened(number, LIST, driven.now, ())
    driven.transfer.start(driven.now)
    driven.take()
    return driven, number


# How much is under way.


def test_the_window_is_divided_among_who_has_something_to_bring() -> None:
    driven, [one, two] = running(
        ("a", ((0, 3),)), ("b", ((3, 3),)), window_bytes=80, transport="ucxx", limits=SMALL_BATCHES
    )
    assert [(number, ranges) for number, _, ranges in driven.actions.post] == [
        (one, ((0, 2),)),
        (one, ((2, 1),)),
        (two, ((3, 2),)),
        (two, ((5, 1),)),
    ]


def test_batches_are_short_while_others_wait_for_what_comes() -> None:
    driven = Driven(transport="ucxx", limits=SMALL_BATCHES)
    driven.tick()
    [number] = driven.planned(("a", ((0, PIECES),)))
    driven.opened(number)
    driven.transfer.has_downstream_readers = True
    driven.transfer.start(driven.now)
    assert [ranges for _, _, ranges in driven.take().post] == [((0, 1),), ((1, 1),)]


def test_a_source_that_is_being_closed_holds_up_nobody() -> None:
    driven, [one, two] = running(("a", ((0, 3),)), ("b", ((3, 3),)), window_bytes=20, transport="ucxx")
    driven.transfer.lost(one, "gone", driven.now)
    driven.take()
    assert [number for number, _, _ in driven.brings(two).post] == [two]


# Bounds.


def test_a_read_is_planned_at_most_so_often_and_says_so() -> None:
    driven = Driven()
    driven.transfer.plan_requests.count = PLANS_MAX - 1
    assert driven.tick().plan is not None
    driven.tick(PLAN_S_MAX)
    driven.tick(1.0)
    assert driven.transfer.error == (
        VersionUnavailable.__name__,
        f"the read was planned {PLANS_MAX} times, and its sources failed each time",
    )


def test_before_it_begins_a_read_without_sources_fails_at_once() -> None:
    driven = Driven()
    driven.tick()
    driven.transfer.planned(NOBODY, driven.now)
    assert driven.transfer.error == (VersionUnavailable.__name__, "nobody has it")


@pytest.mark.parametrize(
    ("before", "closes"), [(DEFAULT_LIMITS.slow_closed_max - 1, True), (DEFAULT_LIMITS.slow_closed_max, False)]
)
def test_so_many_sources_are_closed_for_being_slow(before: int, closes: bool) -> None:  # noqa: FBT001
    driven, [fast, slow] = running(("a", ((0, 2),)), ("b", ((2, 4),)), transport="ucxx", limits=PIECE_BATCHES)
    driven.transfer.pool._slow_closed = before
    for _ in range(4):
        driven.brings(fast, 0.01)
    driven.wait(6 * DEFAULT_LIMITS.slow_min_s)
    source = driven.transfer.sources[slow]
    assert source.lost.startswith("it was slow") is closes
    assert why(driven, slow) == ("it was slow, and another source had nothing left to bring" if closes else "")


def test_one_slow_source_is_closed_after_the_other() -> None:
    shares = (("a", ((0, 2),)), ("b", ((2, 2),)), ("c", ((4, 2),)))
    driven, [fast, *slow] = running(*shares, transport="ucxx", window_bytes=60, limits=PIECE_BATCHES)
    for _ in range(2):
        driven.brings(fast, 0.01)
    first = driven.wait()
    assert len(first) == 1
    assert driven.wait(DEFAULT_LIMITS.slow_min_s) == [], "the first one is being closed still"
    [number] = first
    driven.closed(number)
    while driven.transfer.sources[fast].in_flight:
        driven.brings(fast, 0.01)
    assert driven.wait(STALL_BOUND_S) == [each for each in slow if each != number]
    assert driven.transfer.pool._slow_closed == 2


STALL_BOUND_S = 4.0
"""Less than the bound of silence, so that nobody is left for that."""


def test_a_doubted_source_is_asked_once_and_gets_nothing_more() -> None:
    driven, [number] = running(("a", ((0, PIECES),)), window_bytes=20)
    actions = driven.done(number, next(iter(driven.transfer.sources[number].in_flight)), WRONG)
    assert actions.confirm == [number]
    assert driven.transfer.sources[number].phase is SourcePhase.OPEN
    assert driven.transfer.pool.exclusions.has_failed(source_id("a"))
    while driven.transfer.sources[number].in_flight:
        assert driven.done(number, next(iter(driven.transfer.sources[number].in_flight)), WRONG).confirm == []


def test_the_digests_that_count_are_those_of_the_pieces() -> None:
    driven, [number] = running(("a", ((0, PIECES),)))
    [(_, batch, _)] = driven.actions.post
    actions = driven.done(number, batch, b"".join(reversed(RIGHT)))
    assert actions.proven == []
    assert driven.phase() is TransferPhase.RUNNING


def test_a_read_that_has_begun_waits_for_a_source_for_a_while() -> None:
    driven, [number] = running(("a", ((0, PIECES),)))
    driven.transfer.lost(number, "gone", driven.now)
    driven.closed(number)
    driven.transfer.planned(NOBODY, driven.now)
    assert driven.phase() is TransferPhase.RUNNING
    began = driven.now
    while driven.phase() is TransferPhase.RUNNING:
        driven.tick(0.1)
        driven.transfer.planned(NOBODY, driven.now)
    assert driven.now - began == pytest.approx(1.2)


def test_a_source_that_has_given_its_word_is_asked_for_more() -> None:
    driven, [one, two] = running(("a", ((0, 3),)), ("b", ((3, 3),)), verify=False)
    batch = next(iter(driven.transfer.sources[one].in_flight))
    assert driven.done(one, batch, b"").confirm == [one]
    driven.transfer.confirmed(one, holds=True, now=driven.now)
    driven.transfer.lost(two, "gone", driven.now)
    driven.transfer.closed(two, driven.now)
    driven.transfer.planned(NOBODY, driven.now)
    assert [(number, ranges) for number, _, ranges in driven.take().post] == [(one, ((3, 3),))]


def test_a_source_alone_has_the_whole_window_and_one_that_has_nothing_yet_has_no_part_of_it() -> None:
    driven, _ = running(("a", ((0, PIECES),)), window_bytes=40, transport="ucxx", limits=SMALL_BATCHES)
    assert [ranges for _, _, ranges in driven.actions.post] == [((0, 2),), ((2, 2),)]
    driven = Driven(window_bytes=40, transport="ucxx", limits=SMALL_BATCHES)
    driven.tick()
    whole, half = driven.planned(("a", ((0, 5),)), ("b", ((5, 1),)))
    driven.opened(whole)
    driven.transfer.opened(half, LIST, driven.now, ())
    driven.transfer.start(driven.now)
    assert [ranges for _, _, ranges in driven.take().post] == [((0, 2),), ((2, 2),)]


def test_all_sources_together_have_no_more_under_way_than_the_window_but_for_two_batches_each() -> None:
    pieces, window_bytes = 60, 100
    read = Transfer(
        version=3,
        root=NO_ROOT,
        nbytes=[PIECE_BYTES] * pieces,
        verify=False,
        limits=replace(PIECE_BATCHES, window_bytes=window_bytes),
        first_number=1,
        now=0.0,
    )
    read.tick(0.0)
    shares = tuple(
        Share(source=source_id(name), transport="ucxx", pieces=((first, 20),), nbytes=0, why="")
        for name, first in (("a", 0), ("b", 20), ("c", 40))
    )
    read.planned(Plan(version=3, shares=shares, why=""), 0.0)
    one, two, late = read.sources
    read.opened(one, b"", 0.0)
    read.opened(two, b"", 0.0)
    read.opened(late, b"", 0.0, ())
    read.start(0.0)

    def bring(number: int, now: float = 0.001) -> None:
        read.batch_done(number, next(iter(read.sources[number].in_flight)), b"", now)

    for number in (one, two, one, two):
        bring(number)
    assert [read.sources[number].in_flight_bytes for number in (one, two)] == [50, 50]
    read.available(late, ((40, 20),), 0.001)
    assert read.sources[late].in_flight_bytes == 2 * PIECE_BYTES
    bring(late, 0.002)
    assert read.sources[late].in_flight_bytes == 2 * PIECE_BYTES
    for now in (0.003, 0.004, 0.005):
        bring(one, now)
    assert [read.sources[number].in_flight_bytes for number in (one, two, late)] == [30, 50, 20]
    read.check()


def test_a_plan_that_gives_nothing_is_not_asked_for_again_at_once() -> None:
    driven, [number] = running(("a", ((0, PIECES),)))
    driven.transfer.lost(number, "gone", driven.now)
    driven.closed(number)
    asked = driven.transfer.plan_requests.count
    driven.planned(("a", ((0, PIECES),)))
    assert driven.transfer.plan_requests.count == asked
    assert driven.tick(PLAN_AGAIN_S).plan is not None


def test_a_read_has_so_many_sources_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_pool, "SHARES_MAX", 2)
    driven = Driven()
    driven.tick()
    assert len(driven.planned(("a", ((0, 2),)), ("b", ((2, 1),)), ("c", ((3, 3),)))) == 2
    assert sorted(source.waiting for source in driven.transfer.sources.values()) == [2, 4]


def test_a_pause_of_the_reader_is_not_what_a_half_filled_source_lacks() -> None:
    driven, number = waiting_for_a_half_filled_one()
    driven.now += 100.0
    assert driven.tick().close == []
    source = driven.transfer.sources[number]
    assert source.last_new_at > 90.0
    assert source.last_progress_at > 90.0


def test_a_plan_that_comes_after_the_end_opens_nothing() -> None:
    driven = Driven()
    driven.tick()
    driven.transfer.stop()
    assert driven.planned(("a", ((0, PIECES),))) == []


def test_a_read_that_waits_for_the_others_leases_wants_no_time() -> None:
    driven = Driven()
    driven.tick()
    [number] = driven.planned(("a", ((0, PIECES),)))
    driven.opened(number)
    assert driven.phase() is TransferPhase.LEASED
    assert driven.transfer.deadline() is None
