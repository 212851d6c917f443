"""A read from a half-filled source asks for what stands there, waits for the rest within bounds, and moves on."""

from tests.unit.agent.transfer.driver import LIST, PIECES, STALL_S, Driven, source_id

from tensorhub_agent.transfer.limits import DEFAULT_LIMITS
from tensorhub_agent.transfer.transfer import TransferPhase
from tensorhub_common.protocol.ranges import Range

ALL: tuple[Range, ...] = ((0, PIECES),)


def begun(*there: Range, window_bytes: int = 1000) -> tuple[Driven, int]:
    """Return a read that has begun, and the number of its one source, which has these pieces."""
    driven = Driven(transport="ucxx", window_bytes=window_bytes)
    driven.tick()
    (number,) = driven.planned(("half", ALL))
    driven.transfer.opened(number, LIST, driven.now, there)
    driven.transfer.start(driven.now)
    return driven, number


def asked(driven: Driven) -> list[tuple[Range, ...]]:
    return [ranges for _, _, ranges in driven.take().post]


def told(driven: Driven, number: int, *pieces: Range) -> list[tuple[Range, ...]]:
    driven.transfer.available(number, pieces, driven.now)
    return asked(driven)


def test_only_what_stands_there_is_asked_for() -> None:
    driven, number = begun((0, 2))
    assert asked(driven) == [((0, 2),)]
    assert told(driven, number, (3, 1)) == [((3, 1),)]
    assert told(driven, number, (3, 1)) == [], "it was told before"
    driven.brings(number)
    assert told(driven, number, (2, 1), (4, 2)) == [((2, 1), (4, 2))]
    driven.brings(number)
    driven.brings(number)
    assert driven.phase() is TransferPhase.DONE


def test_pieces_that_do_not_exist_are_no_news() -> None:
    driven, number = begun()
    assert told(driven, number, (0, PIECES + 1)) == []
    assert told(driven, number, (-1, 2)) == []


def test_a_source_that_says_nothing_is_left() -> None:
    driven, number = begun()
    driven.take()
    assert driven.wait(DEFAULT_LIMITS.waiting_silent_s - 0.1) == []
    assert driven.wait(0.2) == [number]
    assert driven.transfer.pool.exclusions.left_out() == (source_id("half"),)


def test_a_source_that_lives_and_starves_is_left_later() -> None:
    driven, number = begun((0, 1))
    driven.take()
    driven.brings(number)
    left: list[int] = []
    for _ in range(int(4 * STALL_S)):
        left += driven.wait(1.0)
        driven.transfer.available(number, (), driven.now)
    assert left == [number]
    assert driven.now >= 2 * STALL_S


def test_what_it_had_brought_is_not_read_again() -> None:
    driven, number = begun((0, 2))
    driven.take()
    driven.brings(number)
    driven.transfer.lost(number, "its fill was given up", driven.now)
    driven.closed(number)
    driven.tick()
    (other,) = driven.planned(("ready", ALL))
    posts = driven.opened(other).post
    assert [ranges for _, _, ranges in posts] == [((2, PIECES - 2),)]


def test_a_ready_source_takes_what_a_half_filled_one_waits_for() -> None:
    """And a half-filled one takes from nobody what it lacks."""
    driven = Driven(transport="ucxx")
    driven.tick()
    half, ready = driven.planned(("half", ((0, 5),)), ("ready", ((5, 1),)))
    driven.transfer.opened(half, LIST, driven.now, ((0, 1),))
    driven.opened(ready)
    driven.transfer.start(driven.now)
    driven.take()
    actions = driven.brings(ready)
    assert [(number, ranges) for number, _, ranges in actions.post] == [(ready, ((3, 2),))], "the later half"
    actions = driven.brings(half)
    assert actions.post == [], "it has none of what the other one has under way, nor of its own rest"


def test_what_is_proven_is_shown() -> None:
    driven, number = begun((0, 2))
    driven.take()
    assert driven.brings(number).proven == [(0, 2)]
