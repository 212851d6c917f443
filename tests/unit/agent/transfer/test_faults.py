"""Sources that stop, are slow, or go, and a planner that is silent: who is waited for, and what is read again."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.agent.transfer.driver import (
    ALL,
    NOBODY,
    PIECE_BATCHES,
    PIECE_BYTES,
    PIECES,
    SILENCE,
    STALL_S,
    Driven,
    planning,
    reading,
    running,
    share,
    source_id,
)

from tensorhub_agent.transfer.exclusions import FORGIVEN_MAX
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS
from tensorhub_agent.transfer.plan_requests import PLAN_AGAIN_S, PLAN_AGAIN_S_MAX, PLAN_S_MAX, PLANS_MAX
from tensorhub_agent.transfer.source import SourcePhase
from tensorhub_agent.transfer.transfer import TransferPhase
from tensorhub_common.errors import VersionUnavailable
from tensorhub_common.protocol.plans import Refusal
from tensorhub_common.protocol.ranges import Range

HELD = Refusal(error=VersionUnavailable.__name__, reason="its holder failed this read", is_held=True)
GONE = Refusal(error=VersionUnavailable.__name__, reason="nobody has it", is_held=False)
REST: Range = (1, PIECES - 1)


# Silence.

Scene = tuple[Driven, int]


def asked(first_s: float | None = None, **more: Any) -> Scene:
    """Return a read whose source has two batches under way, and brought one before in this time."""
    driven, [number] = reading(window_bytes=20, **more)
    if first_s is not None:
        driven.brings(number, first_s)
    return driven, number


def opening(**fields: Any) -> Scene:
    driven = planning(transport="ucxx")
    driven.tick(0.1)
    [number] = driven.planned(share("a", *ALL, **fields))
    return driven, number


def confirming() -> Scene:
    driven, number = asked(verify=False)
    while driven.source(number).in_flight:
        driven.brings(number, 0.01)
    return driven, number


def other_site(nbytes: int = 10, *, is_lost: bool = False, awaits: bool = False, **fields: Any) -> Scene:
    """Return a read of one piece from a source in another site, or from a mate that crosses; the log may lose it."""
    whole, there = share("a", (0, 1), **fields), {"a": ()} if awaits else {}
    driven, [number] = running(whole, there=there, promises=True, pieces=1, sizes=[nbytes], transport="ucxx")
    driven.transfer.promised(number, ((0, 1),))
    if is_lost:
        driven.transfer.pool.lose_agent("a", 1)
    return driven, number


THIN = DEFAULT_LIMITS.far_bps_min


SILENT_FOR = {
    "was fast": (lambda: asked(0.01), DEFAULT_LIMITS.stall_min_s),
    "is slow by nature": (lambda: asked(0.2), DEFAULT_LIMITS.stall_times * 2 * 0.2),
    "is very slow": (lambda: asked(1.0), STALL_S),
    "of unknown rate": (asked, STALL_S),
    "local": (lambda: asked(0.01, transport="local"), STALL_S),
    "half-filled, says nothing": (lambda: asked(there={"a": ()}), DEFAULT_LIMITS.waiting_silent_s),
    "asked for its word": (confirming, STALL_S),
    "does not open": (opening, DEFAULT_LIMITS.open_s_max),
    "mate does not open": (lambda: opening(crosses=True), DEFAULT_LIMITS.crosser_open_s_max),
    "far, does not open": (lambda: opening(far=True), DEFAULT_LIMITS.crosser_open_s_max),
    "far, by a thin line": (lambda: other_site(4 * THIN, far=True), STALL_S + 4),
    "far, much under way": (lambda: other_site(1000 * THIN, far=True), DEFAULT_LIMITS.far_silent_s),
    "lost far one": (lambda: other_site(4 * THIN, far=True, is_lost=True), STALL_S),
    "mate": (lambda: other_site(crosses=True), DEFAULT_LIMITS.crosser_silent_s),
    "lost mate": (lambda: other_site(crosses=True, is_lost=True), STALL_S),
    "mate, awaited": (lambda: other_site(crosses=True, awaits=True), DEFAULT_LIMITS.crosser_silent_s),
    "mate, awaited and lost to the log": (
        lambda: other_site(crosses=True, awaits=True, is_lost=True),
        DEFAULT_LIMITS.waiting_silent_s,
    ),
}
"""By whom, the read then, and how long it may be silent."""


@pytest.mark.parametrize(("scene", "bound_s"), SILENT_FOR.values(), ids=SILENT_FOR)
def test_a_source_may_be_silent_for_so_long(scene: Callable[[], Scene], bound_s: float) -> None:
    """For some times what is under way should take, within bounds.

    A local source does nothing itself, so it has the long one; far ones as long as a thin line takes. A mate's part
    would cross once more: of one that is killed the connection ends, and a stopped one the log loses.
    """
    driven, number = scene()
    silent_since = driven.now
    assert driven.wait() == [number]
    assert driven.now - silent_since == pytest.approx(bound_s)
    assert driven.source(number).lost == "it made no progress"
    assert driven.left_out == (source_id("a"),)


def test_what_comes_within_a_batch_is_progress_but_never_more_than_is_under_way() -> None:
    driven, [number] = reading()
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
    driven = planning(transport="ucxx", limits=PIECE_BATCHES)
    [number] = driven.planned(share("a", *ALL))
    driven.opened(number)
    driven.wait_exactly(3 * STALL_S)
    driven.start()
    assert driven.tick().close == []
    driven.wait_exactly(STALL_S - 0.1)


def test_a_pause_of_the_reader_is_nobodys_silence() -> None:
    driven, [number] = reading()
    driven.brings(number, 0.01)
    for _ in range(3):
        assert driven.tick(10.0).close == [], "the reader was stopped, and finds everything at once when it goes on"
    assert driven.wait() == [number]
    driven, [half] = reading(there={"a": ()})
    assert driven.tick(100.0).close == [], "nor is it what a half-filled source lacks"
    assert min(driven.source(half).last_new_at, driven.source(half).last_progress_at) > 90.0


@pytest.mark.parametrize(("called_at", "late_s"), [(1.25, 0.0), (1.3125, 0.0), (1.375, 0.0), (1.5, 0.25)])
def test_a_call_that_comes_later_than_its_bound_shows_a_pause(called_at: float, late_s: float) -> None:
    """It was wanted at 1.25; before the last progress it would have been wanted at 1.125, for a source's silence."""
    driven, number = asked(0.125, limits=replace(PIECE_BATCHES, look_s=0.25, late_s=0.125, stall_min_s=1.0))
    driven.wait_exactly(0.875)
    driven.tick()
    driven.transfer.progressed(number, PIECE_BYTES // 2, 1.0625)
    driven.now = called_at
    driven.tick()
    assert driven.source(number).last_progress_at == 1.0625 + late_s


def test_a_pause_shows_also_while_only_the_planner_is_to_be_asked_again() -> None:
    driven = planning(limits=PIECE_BATCHES)
    opening, dead = driven.planned(share("a", (0, 3)), share("b", (3, 3)))
    driven.is_gone(dead)
    driven.tick()
    driven.refused(HELD)
    assert driven.transfer.deadline() == PLAN_AGAIN_S < DEFAULT_LIMITS.look_s
    driven.tick(0.3)
    assert driven.source(opening).last_progress_at == pytest.approx(0.3 - PLAN_AGAIN_S)


def test_a_half_filled_source_that_lives_and_starves_is_left_later() -> None:
    """What is new gives it all of its time again."""
    driven, [number] = reading(there={"a": ((0, 1),)})
    driven.brings(number)
    for pieces in ((), ((1, 1),)):
        driven.available(number, *pieces)
    driven.brings(number)
    began, left = driven.now, list[int]()
    while not left and driven.now - began < 10 * STALL_S:
        left = driven.wait(1.0)
        driven.available(number)
    assert left == [number]
    assert driven.now - began == pytest.approx(DEFAULT_LIMITS.starved_times * STALL_S, abs=0.1)


def test_a_half_filled_source_that_brings_something_is_not_judged_by_what_it_lacks() -> None:
    driven, [number] = reading(there={"a": ((0, 1),)})
    driven.wait_exactly(STALL_S - 1.0)
    driven.available(number)
    assert driven.wait() == [number]
    assert driven.now == pytest.approx(STALL_S), "that it lives says nothing of what is under way"


# Suspects.


def stalled() -> Driven:
    driven, [number] = reading()
    driven.brings(number, 0.01)
    assert driven.wait() == [number]
    assert driven.closed(number).plan == ((REST,), (source_id("a"),)), "it is left out while there are others"
    return driven


def comes_back(driven: Driven) -> int:
    """Nobody else has the pieces, so the planner names the stalled source again."""
    assert driven.refused().plan == ((REST,), ()), "forgiven"
    [again] = driven.planned(share("a", REST))
    return again


def test_a_stalled_source_is_used_again_when_nobody_else_has_it_and_then_has_the_long_bound() -> None:
    driven = stalled()
    again = comes_back(driven)
    driven.opened(again)
    driven.brings(again, 0.01)
    driven.wait_exactly(STALL_S - 0.1)
    for _ in range(4):
        driven.brings(again)
    assert driven.phase() is TransferPhase.DONE
    assert driven.counts() == (60, 50, 5)


def test_a_stalled_source_that_does_not_open_again_has_failed() -> None:
    driven = stalled()
    again = comes_back(driven)
    assert driven.wait() == [again]
    assert driven.actions.plan == ((REST,), (source_id("a"),)), "at once, for nothing is under way there"
    driven.closed(again)
    left = "nobody has it (the last source, on a, was left because it made no progress)"
    assert driven.refused_for_long() == (VersionUnavailable.__name__, left)


def test_a_source_that_stalls_again_and_again_is_forgiven_so_often() -> None:
    driven = stalled()
    for _ in range(FORGIVEN_MAX):
        again = comes_back(driven)
        driven.opened(again)
        assert driven.wait() == [again]
        driven.closed(again)
    assert driven.refused().plan is None
    assert driven.left_out == (source_id("a"),)


def test_suspects_come_back_at_once_unless_the_log_counts_no_holder() -> None:
    assert stalled().refused(HELD).plan == ((REST,), ())
    driven = stalled()
    assert (driven.refused(GONE).plan, driven.phase()) == (None, TransferPhase.FAILED)


def test_a_source_that_has_failed_is_no_suspect_any_more() -> None:
    driven, [bad, _] = reading(share("a", (0, 3)), share("b", (3, 3)))
    driven.lost(bad)
    driven.transfer.pool.exclusions.exclude_for_now(source_id("a"))
    assert not driven.transfer.pool.exclusions.readmit_suspects()
    assert driven.left_out == (source_id("a"),)


@pytest.mark.parametrize("is_final", [False, True])
def test_a_source_that_will_never_serve_is_not_tried_again_though_the_log_counts_it(*, is_final: bool) -> None:
    driven, [bad, _] = reading(share("a", (0, 3)), share("b", (3, 3)))
    driven.lost(bad, "it is in other memory", is_final=is_final)
    driven.refused(HELD)
    assert driven.transfer.pool.exclusions.readmit_failed() == (not is_final)
    assert driven.left_out == ((source_id("a"),) if is_final else ())


# Slow ones.


def one_slow() -> tuple[Driven, int, int]:
    """The fast source has brought its pieces and what the slow one had waiting; two batches are with the slow one."""
    driven, [fast, slow] = reading(share("a", (0, 2)), share("b", (2, 4)))
    for _ in range(4):
        driven.brings(fast, 0.01)
    return driven, fast, slow


@pytest.mark.parametrize("ends_one", [False, True])
def test_what_a_slow_source_has_under_way_is_brought_by_an_idle_one_once_it_is_closed(*, ends_one: bool) -> None:
    """But for a batch that the slow source ends while it is closed."""
    driven, fast, slow = one_slow()
    began = driven.now
    assert driven.wait() == [slow]
    assert driven.source(slow).lost == "it was slow, and another source had nothing left to bring"
    assert driven.now - began <= 2 * DEFAULT_LIMITS.slow_min_s
    assert (driven.posts, driven.actions.plan) == ([], None), "not before the slow one is closed"
    if ends_one:
        driven.brings(slow)
    driven.closed(slow)
    assert {number for number, _ in driven.posts} == {fast}
    assert driven.actions.plan is None, "the fast one has its lease already"
    while driven.phase() is TransferPhase.RUNNING:
        driven.brings(fast)
    assert driven.counts() == ((60, 10, 1) if ends_one else (60, 20, 2))


def test_the_last_source_and_one_that_will_soon_be_done_are_never_closed_for_being_slow() -> None:
    driven, fast, slow = one_slow()
    driven.is_gone(fast)
    driven.wait_exactly(STALL_S / 2)
    assert driven.source(slow).phase is SourcePhase.OPEN
    driven, _, slow = one_slow()
    driven.brings(slow, 0.2)
    driven.brings(slow, 0.2)
    assert driven.phase() is TransferPhase.DONE
    assert driven.counts() == (60, 0, 0)


@pytest.mark.parametrize(
    ("before", "closes"), [(DEFAULT_LIMITS.slow_closed_max - 1, True), (DEFAULT_LIMITS.slow_closed_max, False)]
)
def test_so_many_sources_are_closed_for_being_slow(before: int, closes: bool) -> None:  # noqa: FBT001
    driven, _, slow = one_slow()
    driven.transfer.pool._slow_closed = before
    driven.wait(6 * DEFAULT_LIMITS.slow_min_s)
    assert driven.source(slow).lost.startswith("it was slow") is closes


def test_one_slow_source_is_closed_after_the_other() -> None:
    shares = [share(name, (2 * number, 2)) for number, name in enumerate("abc")]
    driven, [fast, *slow] = reading(*shares, window_bytes=60)
    for _ in range(2):
        driven.brings(fast, 0.01)
    [first] = driven.wait()
    assert driven.wait(DEFAULT_LIMITS.slow_min_s) == [], "the first one is being closed still"
    driven.closed(first)
    while driven.source(fast).in_flight:
        driven.brings(fast, 0.01)
    assert driven.wait(STALL_S - 1.0) == [each for each in slow if each != first]
    assert driven.transfer.pool._slow_closed == 2


# The planner.


def test_one_question_is_out_at_a_time_and_a_silent_planner_is_asked_again_for_ever() -> None:
    driven = Driven()
    assert driven.transfer.deadline() == driven.now, "it is asked at once"
    assert driven.transfer.plan_requests.unanswered is None
    for _ in range(100):
        assert driven.tick(1.01 * PLAN_AGAIN_S).plan == (ALL, ()), "silence says nothing of sources"
        assert driven.transfer.deadline() == driven.now + PLAN_S_MAX
        assert driven.tick(PLAN_S_MAX - 0.01).plan is None
        assert driven.transfer.plan_requests.waiting
        assert driven.tick(0.02).plan is None
        assert driven.transfer.deadline() == driven.now + PLAN_AGAIN_S
    driven.tick(1.01 * PLAN_AGAIN_S)
    driven.refused(SILENCE)
    assert driven.phase() is TransferPhase.LEASING


def test_a_question_that_is_kept_back_has_its_time_from_when_it_goes_out() -> None:
    driven = planning()
    driven.transfer.plan_requests.kept_back()
    assert driven.transfer.deadline() is None
    driven.tick(1e6)
    driven.transfer.plan_requests.goes_out(driven.now)
    assert driven.transfer.deadline() == driven.now + PLAN_S_MAX
    driven.tick(PLAN_S_MAX - 0.01)
    assert driven.transfer.plan_requests.waiting


def alone() -> Driven:
    """Return a read whose only source has gone after it had brought a piece."""
    driven, [number] = reading()
    driven.brings(number)
    driven.is_gone(number)
    return driven


def test_before_it_begins_and_where_the_log_counts_no_holder_a_read_without_sources_fails_at_once() -> None:
    for driven, refusal in ((planning(), NOBODY), (planning(), GONE), (alone(), GONE)):
        driven.refused(refusal)
        assert driven.phase() is TransferPhase.FAILED
        assert driven.transfer.error is not None
        assert driven.transfer.error[0] == VersionUnavailable.__name__


def test_a_read_that_has_begun_waits_for_a_source_for_a_while() -> None:
    """The time begins anew when there was a plan in between."""
    driven = alone()
    driven.refused()
    for name, seconds in (("b", DEFAULT_LIMITS.sources_lost_s - 0.1), ("c", PLAN_AGAIN_S)):
        driven.tick(seconds)
        driven.planned(share(name, *ALL))
        driven.is_gone(max(driven.transfer.sources))
        driven.refused()
    assert driven.phase() is TransferPhase.RUNNING
    began = driven.now
    while driven.phase() is TransferPhase.RUNNING:
        driven.tick(0.1)
        driven.refused()
    assert driven.now - began == pytest.approx(DEFAULT_LIMITS.sources_lost_s)


def test_while_the_log_counts_a_holder_it_is_asked_again_for_ever_with_growing_pauses() -> None:
    driven = alone()

    def pauses(times: int) -> list[float]:
        found = []
        for _ in range(times):
            driven.refused(HELD)
            assert driven.left_out == (), "the holder that failed is asked again"
            due = driven.transfer.deadline()
            assert due is not None
            found.append(round(due - driven.now, 3))
            assert driven.tick(due - driven.now).plan is not None
        return found

    assert pauses(7) == [0.1, 0.2, 0.4, 0.8, *[PLAN_AGAIN_S_MAX] * 3]
    [number] = driven.planned(share("a", REST))
    driven.opened(number)
    driven.brings(number)
    driven.is_gone(number)
    assert pauses(2 * PLANS_MAX)[:2] == [0.1, 0.2], "they are short again once bytes have come"


def test_a_holder_whose_bytes_were_wrong_is_not_waited_for() -> None:
    driven, [bad, other] = reading(share("a", (0, 3)), share("b", (3, 3)))
    driven.done(bad, bytes(16))
    driven.confirmed(bad, holds=True)
    driven.closed(bad)
    driven.is_gone(other)
    driven.refused(HELD)
    assert driven.left_out == (source_id("a"),), "another one may come back"
    assert driven.tick(PLAN_AGAIN_S).plan is not None
    driven.refused(HELD)
    assert driven.phase() is TransferPhase.FAILED


@pytest.mark.parametrize("answers", [False, True])
def test_pieces_of_a_dead_source_go_to_the_open_ones_when_no_planner_answers(*, answers: bool) -> None:
    """Or where a plan names one of those."""
    driven, [alive, dead] = reading(share("a", (0, 3)), share("b", (3, 3)))
    driven.is_gone(dead)
    if answers:
        assert driven.planned(share("a", (3, 3))) == []
    else:
        driven.refused(SILENCE)
    assert driven.source(alive).waiting == 4
    for _ in range(PIECES):
        driven.brings(alive)
    assert driven.phase() is TransferPhase.DONE


def test_a_plan_that_names_only_who_has_failed_says_nothing_and_is_asked_for_again_but_not_for_ever() -> None:
    driven = planning(limits=PIECE_BATCHES)
    [number] = driven.planned(share("a", *ALL))
    driven.is_gone(number)
    plans = 1
    while driven.phase() is TransferPhase.LEASING:
        assert driven.planned(share("a", *ALL)) == []
        assert driven.actions.plan is None, "not at once"
        plans += 1
        driven.tick(PLAN_AGAIN_S)
    assert plans == PLANS_MAX
    assert driven.transfer.error is not None
    assert f"planned {PLANS_MAX} times" in driven.transfer.error[1]


def test_a_read_that_gets_on_is_planned_so_often_where_the_log_was_not_said_to_count_a_holder() -> None:
    driven = alone()
    driven.refused(HELD)
    driven.tick(PLAN_AGAIN_S)
    [number] = driven.planned(share("a", REST))
    driven.opened(number)
    driven.brings(number)
    for count in range(4, PLANS_MAX + 1):
        driven.is_gone(number)
        assert driven.transfer.plan_requests.count == count
        [number] = driven.planned(share(f"agent-{count}", REST))
    driven.is_gone(number)
    assert driven.phase() is TransferPhase.FAILED


@pytest.mark.parametrize("shares", [0, 200])
def test_an_empty_plan_and_one_with_far_too_many_sources_are_bounded(shares: int) -> None:
    driven = planning(limits=PIECE_BATCHES)
    numbers = driven.planned(*(share(f"agent-{n}", (n % PIECES, 1)) for n in range(shares)))
    assert len(numbers) == min(shares, PIECES)
    driven.planned()
    assert driven.phase() is TransferPhase.LEASING
