"""A read whose sources stop, are slow, or go: who waits for whom, for how long, and what is read again."""

import pytest
from tests.unit.agent.transfer.driver import (
    LIST,
    PIECE_BATCHES,
    PIECE_BYTES,
    PIECES,
    STALL_S,
    Driven,
    running,
    source_id,
)

from tensorhub_agent.core.operations.read_report import report_of
from tensorhub_agent.rates.source_rate import BATCHES_MIN
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS
from tensorhub_agent.transfer.plan_requests import NO_ANSWER, PLAN_AGAIN_S, PLANS_MAX
from tensorhub_agent.transfer.source import SourcePhase
from tensorhub_agent.transfer.transfer import TransferPhase
from tensorhub_common.errors import VersionUnavailable
from tensorhub_common.protocol.plans import Plan, Refusal

NOBODY = Refusal(error=VersionUnavailable.__name__, reason="nobody has it")


def flying(driven: Driven, number: int) -> int:
    return len(driven.transfer.sources[number].in_flight)


def counts(driven: Driven) -> tuple[int, int, int]:
    """Return (got bytes, wasted bytes, retried pieces)."""
    report = report_of(driven.transfer, [PIECE_BYTES] * PIECES, total_s=0.0)
    return report.got_bytes, report.wasted_bytes, report.retried


# The window.


def test_a_stopped_source_with_the_whole_window_under_way_keeps_nobody_waiting() -> None:
    driven, [stopped, fast] = running(
        ("a", ((0, 4),)), ("b", ((4, 2),)), window_bytes=PIECE_BYTES, transport="ucxx", limits=PIECE_BATCHES
    )
    assert (flying(driven, stopped), flying(driven, fast)) == (BATCHES_MIN, BATCHES_MIN)
    for _ in range(4):
        driven.brings(fast, 0.01)
    assert driven.transfer.sources[fast].got_pieces == 4, "what the stopped one had waiting it brings as well"


def test_a_source_of_unknown_rate_has_two_batches_under_way_then_its_part_of_the_window() -> None:
    driven, [one, other] = running(
        ("a", ((0, 5),)), ("b", ((5, 1),)), window_bytes=80, transport="ucxx", limits=PIECE_BATCHES
    )
    assert flying(driven, one) == BATCHES_MIN
    driven.brings(one, 0.001)
    assert flying(driven, one) == 4, "half of the window, for the other one has something under way"
    driven.brings(other, 0.001)
    assert sum(len(source.in_flight) for source in driven.transfer.sources.values()) == 4


# Silence.


def test_a_source_that_was_fast_is_left_after_a_second() -> None:
    driven, [number] = running(("a", ((0, PIECES),)), transport="ucxx", limits=PIECE_BATCHES)
    driven.brings(number, 0.01)
    stopped_at = driven.now
    assert driven.wait() == [number]
    assert driven.now - stopped_at == pytest.approx(DEFAULT_LIMITS.stall_min_s)


def test_a_source_that_is_slow_by_nature_has_longer() -> None:
    driven, [number] = running(("a", ((0, PIECES),)), transport="ucxx", limits=PIECE_BATCHES)
    driven.brings(number, 1.0)
    assert driven.wait(DEFAULT_LIMITS.stall_min_s * 2) == []
    assert driven.wait() == [number]


def test_a_local_source_has_the_long_bound_however_fast_it_was() -> None:
    driven, [number] = running(("a", ((0, PIECES),)), limits=PIECE_BATCHES)
    driven.brings(number, 0.01)
    assert driven.wait(STALL_S - 0.1) == []


def test_what_comes_within_a_batch_is_progress_but_never_more_than_is_under_way() -> None:
    driven, [number] = running(("a", ((0, PIECES),)), transport="ucxx", limits=PIECE_BATCHES)
    for _ in range(4):
        driven.wait_exactly(STALL_S - 1.0)
        driven.transfer.progressed(number, PIECE_BYTES // 2, driven.now)
    last = driven.now
    driven.wait_exactly(STALL_S - 1.0)
    driven.transfer.progressed(number, 1000, driven.now)
    assert driven.wait() == [number]
    assert driven.now == pytest.approx(last + STALL_S), "a word without bytes does not keep it"


def test_patience_begins_when_a_source_is_asked_not_when_it_was_opened() -> None:
    """The siblings' leases, or another source's pieces, may come long after."""
    driven = Driven(transport="ucxx", limits=PIECE_BATCHES)
    driven.tick()
    [number] = driven.planned(("a", ((0, PIECES),)))
    driven.opened(number)
    driven.wait_exactly(3 * STALL_S)
    driven.transfer.start(driven.now)
    driven.take()
    assert driven.tick().close == []
    driven.wait_exactly(STALL_S - 0.1)


def test_a_pause_of_the_reader_is_nobodys_silence() -> None:
    driven, [number] = running(("a", ((0, PIECES),)), transport="ucxx", limits=PIECE_BATCHES)
    driven.brings(number, 0.01)
    for _ in range(3):
        assert driven.tick(10.0).close == [], "the reader was stopped, and finds everything at once when it goes on"
    assert driven.wait() == [number]


# Suspects.


def stalled() -> tuple[Driven, int]:
    driven, [number] = running(("a", ((0, PIECES),)), transport="ucxx", limits=PIECE_BATCHES)
    driven.brings(number, 0.01)
    assert driven.wait() == [number]
    driven.closed(number)
    return driven, number


def test_a_stalled_source_is_left_out_while_there_are_others() -> None:
    driven, _ = stalled()
    assert driven.actions.plan == (((1, 5),), (source_id("a"),))


def test_a_stalled_source_is_used_again_when_nobody_else_has_it_and_then_has_the_long_bound() -> None:
    driven, _ = stalled()
    driven.transfer.planned(NOBODY, driven.now)
    assert driven.take().plan == (((1, 5),), ()), "forgiven"
    [again] = driven.planned(("a", ((1, 5),)))
    driven.opened(again)
    driven.brings(again, 0.01)
    assert driven.wait(STALL_S - 0.1) == []
    for _ in range(4):
        driven.brings(again)
    assert driven.phase() is TransferPhase.DONE
    assert counts(driven) == (60, 50, 5)


def test_a_stalled_source_that_does_not_open_again_has_failed() -> None:
    driven, _ = stalled()
    driven.transfer.planned(NOBODY, driven.now)
    driven.take()
    [again] = driven.planned(("a", ((1, 5),)))
    assert driven.wait() == [again]
    assert driven.actions.plan == (((1, 5),), (source_id("a"),)), "at once, for nothing is under way there"
    driven.closed(again)
    for _ in range(20):
        driven.transfer.planned(NOBODY, driven.now)
        driven.tick(PLAN_AGAIN_S)
    left = "nobody has it (the last source, on a, was left because it made no progress)"
    assert driven.transfer.error == (VersionUnavailable.__name__, left)


# Slow ones.


def one_slow() -> tuple[Driven, int, int]:
    """The fast source has brought its pieces and what the slow one had waiting; two batches are with the slow one."""
    driven, [fast, slow] = running(("a", ((0, 2),)), ("b", ((2, 4),)), transport="ucxx", limits=PIECE_BATCHES)
    for _ in range(4):
        driven.brings(fast, 0.01)
    return driven, fast, slow


def test_what_a_slow_source_has_under_way_is_brought_by_an_idle_one_once_it_is_closed() -> None:
    driven, fast, slow = one_slow()
    began = driven.now
    assert driven.wait() == [slow]
    assert driven.now - began <= 2 * DEFAULT_LIMITS.slow_min_s
    assert driven.actions.post == [], "not before the slow one is closed"
    assert driven.actions.plan is None
    actions = driven.closed(slow)
    assert {number for number, _, _ in actions.post} == {fast}
    assert actions.plan is None, "the fast one has its lease already"
    driven.brings(fast)
    driven.brings(fast)
    assert driven.phase() is TransferPhase.DONE
    assert counts(driven) == (60, 20, 2)


def test_a_batch_that_the_slow_source_ends_while_it_is_closed_is_not_read_again() -> None:
    driven, fast, slow = one_slow()
    driven.wait()
    driven.brings(slow)
    driven.closed(slow)
    driven.brings(fast)
    assert counts(driven) == (60, 10, 1)


def test_the_last_source_is_never_closed_for_being_slow() -> None:
    driven, fast, slow = one_slow()
    driven.transfer.lost(fast, "gone", driven.now)
    assert driven.take().close == [fast]
    driven.closed(fast)
    assert driven.wait(STALL_S / 2) == []
    assert driven.transfer.sources[slow].phase is SourcePhase.OPEN


def test_a_source_that_will_soon_be_done_is_not_closed() -> None:
    driven, _, slow = one_slow()
    driven.brings(slow, 0.2)
    driven.brings(slow, 0.2)
    assert driven.phase() is TransferPhase.DONE
    assert counts(driven) == (60, 0, 0)


# The planner.


def test_pieces_of_a_dead_source_go_to_the_open_ones_when_no_planner_answers() -> None:
    driven, [alive, dead] = running(("a", ((0, 3),)), ("b", ((3, 3),)), transport="ucxx", limits=PIECE_BATCHES)
    driven.transfer.lost(dead, "gone", driven.now)
    driven.closed(dead)
    driven.transfer.planned(Refusal(error=NO_ANSWER, reason=""), driven.now)
    driven.take()
    for _ in range(PIECES):
        driven.brings(alive)
    assert driven.phase() is TransferPhase.DONE


def test_a_plan_that_names_an_open_source_adds_to_its_queue() -> None:
    driven, [alive, dead] = running(("a", ((0, 3),)), ("b", ((3, 3),)), transport="ucxx", limits=PIECE_BATCHES)
    driven.transfer.lost(dead, "gone", driven.now)
    driven.closed(dead)
    assert driven.planned(("a", ((3, 3),))) == []
    assert driven.transfer.sources[alive].waiting == 4


def test_a_plan_that_names_only_who_has_failed_says_nothing_and_is_asked_for_again_but_not_for_ever() -> None:
    driven = Driven(limits=PIECE_BATCHES)
    driven.tick()
    [number] = driven.planned(("a", ((0, PIECES),)))
    driven.transfer.lost(number, "refused", driven.now)
    driven.closed(number)
    plans = 1
    while driven.phase() is TransferPhase.LEASING:
        assert driven.planned(("a", ((0, PIECES),))) == []
        plans += 1
        driven.tick(PLAN_AGAIN_S)
    assert plans == PLANS_MAX
    assert driven.transfer.error is not None


@pytest.mark.parametrize("shares", [0, 200])
def test_an_empty_plan_and_one_with_far_too_many_sources_are_bounded(shares: int) -> None:
    driven = Driven(limits=PIECE_BATCHES)
    driven.tick()
    numbers = driven.planned(*((f"agent-{n}", ((n % PIECES, 1),)) for n in range(shares)))
    assert len(numbers) == min(shares, PIECES)
    driven.transfer.planned(Plan(version=3, shares=(), why=""), driven.now)
    assert driven.phase() is TransferPhase.LEASING


# Counting.


def test_without_digests_what_a_source_did_not_confirm_is_wasted() -> None:
    driven, [number] = running(("a", ((0, PIECES),)), verify=False, limits=PIECE_BATCHES)
    while driven.transfer.sources[number].in_flight:
        batch = next(iter(driven.transfer.sources[number].in_flight))
        driven.done(number, batch, b"")
    assert driven.actions.confirm == [number]
    assert driven.transfer.done_bytes() == 60, "a progress bar shows what has come"
    assert counts(driven) == (0, 0, 0)
    driven.transfer.confirmed(number, holds=False, now=driven.now)
    driven.take()
    driven.closed(number)
    assert counts(driven) == (0, 60, PIECES)


def test_words_that_come_twice_or_too_late_change_nothing() -> None:
    driven, [number] = running(("a", ((0, PIECES),)), limits=PIECE_BATCHES)
    [batch, later] = driven.transfer.sources[number].in_flight
    driven.brings(number)
    before = counts(driven)
    driven.done(number, batch, LIST[:16])
    driven.opened(number)
    driven.transfer.confirmed(number, holds=False, now=driven.now)
    driven.transfer.lost(number, "gone", driven.now)
    driven.transfer.lost(number, "gone again", driven.now)
    assert driven.take().close == [number]
    driven.closed(number)
    driven.closed(number)
    driven.done(number, later, LIST[16:32])
    assert counts(driven) == (before[0], 20, 2)
    assert driven.transfer.sources[number].lost == "gone"
