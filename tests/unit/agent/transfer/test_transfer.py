"""A read without I/O: a piece is with one source at a time, and counts only by what the log vouches for."""

import pytest
from tests.unit.agent.transfer.driver import (
    LIST,
    PIECE_BATCHES,
    PIECES,
    RIGHT,
    STALL_S,
    WRONG,
    Driven,
    running,
    source_id,
)

from tensorhub_agent.transfer.limits import DEFAULT_LIMITS
from tensorhub_agent.transfer.plan_requests import NO_ANSWER, PLAN_AGAIN_S, PLAN_S_MAX
from tensorhub_agent.transfer.transfer import TransferPhase
from tensorhub_common.errors import LayoutMismatch, VersionUnavailable
from tensorhub_common.protocol.plans import Refusal


def test_asks_for_a_plan_of_all_pieces_and_waits_for_all_leases() -> None:
    driven = Driven()
    assert driven.tick().plan == (((0, PIECES),), ())
    one, two = driven.planned(("a", ((0, 3),)), ("b", ((3, 3),)))
    driven.opened(one)
    assert driven.phase() is TransferPhase.LEASING
    driven.opened(two)
    assert driven.phase() is TransferPhase.LEASED
    assert driven.actions.post == [], "nothing is written before the round has started"


def test_counts_what_matches_and_is_done() -> None:
    driven, [number] = running(("a", ((0, PIECES),)))
    [(_, batch, ranges)] = driven.actions.post
    assert ranges == ((0, PIECES),)
    driven.done(number, batch, LIST)
    assert driven.phase() is TransferPhase.DONE
    assert driven.actions.close == [number]
    assert driven.quiet()


def test_a_list_that_is_not_the_logs_is_not_used() -> None:
    """A source that has moved on to another version can't vouch for this one."""
    driven = Driven()
    driven.tick()
    [number] = driven.planned(("a", ((0, PIECES),)))
    assert driven.opened(number, WRONG * PIECES).close == [number]


def test_what_a_lost_source_had_is_asked_for_elsewhere_only_once_it_is_closed() -> None:
    driven, [number] = running(("a", ((0, PIECES),)))
    driven.transfer.lost(number, "gone", driven.now)
    actions = driven.take()
    assert (actions.plan, actions.close) == (None, [number])
    assert not driven.quiet()
    driven.transfer.closed(number, driven.now)
    actions = driven.take()
    assert actions.plan == (((0, PIECES),), (source_id("a"),))
    assert driven.transfer.sources[number].retried == PIECES


def test_a_batch_that_ends_while_its_source_is_closed_still_counts() -> None:
    driven, [number] = running(("a", ((0, PIECES),)))
    [(_, batch, _)] = driven.actions.post
    driven.transfer.lost(number, "gone", driven.now)
    driven.done(number, batch, LIST)
    driven.transfer.closed(number, driven.now)
    assert driven.phase() is TransferPhase.DONE


def test_wrong_bytes_of_a_source_whose_lease_is_over_are_a_lost_source() -> None:
    driven, [number] = running(("a", ((0, PIECES),)))
    [(_, batch, _)] = driven.actions.post
    actions = driven.done(number, batch, WRONG + LIST[16:])
    assert actions.confirm == [number]
    assert sum(driven.transfer.verification.done) == PIECES - 1
    driven.transfer.confirmed(number, holds=False, now=driven.now)
    assert _fails_for_want_of_a_source(driven, number) == VersionUnavailable.__name__


def test_wrong_bytes_of_a_source_that_kept_its_lease_are_damage() -> None:
    driven, [number] = running(("a", ((0, PIECES),)))
    [(_, batch, _)] = driven.actions.post
    driven.done(number, batch, WRONG + LIST[16:])
    driven.transfer.confirmed(number, holds=True, now=driven.now)
    assert _fails_for_want_of_a_source(driven, number) == "IntegrityError"


def _fails_for_want_of_a_source(driven: Driven, number: int) -> str:
    driven.transfer.closed(number, driven.now)
    driven.tick()
    no = Refusal(error=VersionUnavailable.__name__, reason="nobody has it")
    for _ in range(20):
        driven.transfer.planned(no, driven.now)
        driven.tick(PLAN_AGAIN_S)
    assert driven.phase() is TransferPhase.FAILED
    assert driven.transfer.error is not None
    return driven.transfer.error[0]


def test_without_digests_a_piece_counts_by_the_word_of_its_source() -> None:
    driven, [number] = running(("a", ((0, PIECES),)), verify=False)
    [(_, batch, _)] = driven.actions.post
    assert driven.done(number, batch, b"").confirm == [number]
    assert driven.phase() is TransferPhase.RUNNING
    driven.transfer.confirmed(number, holds=True, now=driven.now)
    assert driven.phase() is TransferPhase.DONE


def test_without_digests_a_lease_that_did_not_hold_makes_all_its_pieces_loose() -> None:
    driven, [number] = running(("a", ((0, PIECES),)), verify=False)
    [(_, batch, _)] = driven.actions.post
    driven.done(number, batch, b"")
    driven.transfer.confirmed(number, holds=False, now=driven.now)
    driven.take()
    driven.transfer.closed(number, driven.now)
    assert driven.take().plan == (((0, PIECES),), (source_id("a"),))


@pytest.mark.parametrize("open_first", [True, False])
def test_a_source_without_progress_is_left_out_at_its_deadline(*, open_first: bool) -> None:
    """A driver that ticks at `deadline()` gets on: equal times are due."""
    if open_first:
        driven, [number] = running(("a", ((0, PIECES),)))
        bound = STALL_S
    else:
        driven = Driven()
        driven.tick(0.1)
        [number] = driven.planned(("a", ((0, PIECES),)))
        bound = DEFAULT_LIMITS.open_s_max
    asked = driven.now
    assert driven.wait() == [number]
    assert driven.now == pytest.approx(asked + bound)


def test_a_silent_planner_is_asked_again_and_says_nothing_about_sources() -> None:
    driven = Driven()
    driven.tick()
    for _ in range(10):
        driven.tick(PLAN_S_MAX)
        assert driven.tick(PLAN_AGAIN_S).plan is not None
    driven.transfer.planned(Refusal(error=NO_ANSWER, reason=""), driven.now)
    assert driven.phase() is TransferPhase.LEASING


def test_other_layouts_fail_at_once() -> None:
    driven = Driven()
    driven.tick()
    driven.transfer.planned(Refusal(error=LayoutMismatch.__name__, reason="'w' differs"), driven.now)
    assert driven.transfer.error == (LayoutMismatch.__name__, "'w' differs")


def test_an_idle_source_takes_the_later_half_of_what_the_busiest_has_not_asked_for() -> None:
    driven = Driven(window_bytes=20, limits=PIECE_BATCHES)
    driven.tick()
    fast, slow = driven.planned(("a", ((0, 1),)), ("b", ((1, 5),)))
    driven.opened(fast)
    driven.opened(slow)
    driven.transfer.start(driven.now)
    posts = {number: (batch, ranges) for number, batch, ranges in driven.take().post}
    batch, _ = posts[fast]
    actions = driven.done(fast, batch, RIGHT[0])
    assert [(number, ranges) for number, _, ranges in actions.post] == [(fast, ((4, 1),)), (fast, ((5, 1),))]


def test_what_was_kept_is_not_asked_for() -> None:
    driven = Driven(kept=(bytearray([1, 1, 1, 0, 0, 1]), LIST))
    assert driven.tick().plan == (((3, 2),), ())
    whole = Driven(kept=(bytearray([1] * PIECES), LIST))
    assert whole.transfer.phase is TransferPhase.LEASED


def test_a_stopped_read_is_quiet_once_what_is_under_way_has_ended() -> None:
    driven, [number] = running(("a", ((0, PIECES),)))
    driven.transfer.stop()
    assert driven.take().close == [number]
    assert not driven.quiet()
    driven.transfer.closed(number, driven.now)
    assert driven.quiet()
    assert driven.transfer.deadline() is None
