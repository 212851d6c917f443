"""A read from many sources opens some at a time, so that the last of them is not late for the sake of the first."""

import pytest
from tests.unit.agent.transfer.driver import PIECES, Driven, source_id

from tensorhub_agent.primitives.ranges import set_marks
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS, TransferLimits
from tensorhub_agent.transfer.transfer import TransferPhase
from tensorhub_common.protocol.plans import Refusal, Share

AT_A_TIME = 2


@pytest.fixture
def driven() -> Driven:
    """Return a read that has asked for its plan."""
    made = Driven(limits=TransferLimits(opening_max=AT_A_TIME))
    made.tick()
    return made


def planned(driven: Driven) -> list[int]:
    """Plan one source for each piece; return the numbers of those that are to be opened."""
    return driven.planned(*((f"s{piece}", ((piece, 1),)) for piece in range(PIECES)))


def test_as_many_are_being_opened_at_a_time(driven: Driven) -> None:
    under_way, seen = planned(driven), 0
    while under_way:
        assert len(under_way) <= AT_A_TIME
        assert driven.phase() is TransferPhase.LEASING
        # Each comes just in time; the wait of those behind it is not theirs.
        driven.now += 0.9 * DEFAULT_LIMITS.open_s_max / AT_A_TIME
        driven.transfer.tick(driven.now)
        seen += 1
        under_way = [*under_way[1:], *(number for number, _ in driven.opened(under_way[0]).open)]
    assert seen == PIECES
    assert driven.phase() is TransferPhase.LEASED
    assert not any(source.lost for source in driven.transfer.sources.values())


def test_whoever_does_not_open_in_its_time_gives_its_turn_to_the_next(driven: Driven) -> None:
    first, second = planned(driven)
    assert sorted(driven.wait()) == [first, second]
    assert driven.now == DEFAULT_LIMITS.open_s_max
    driven.closed(first)
    assert len(driven.actions.open) + len(driven.closed(second).open) <= AT_A_TIME
    waiting = [source for source in driven.transfer.sources.values() if not source.is_asked]
    assert len(waiting) == PIECES - 2 * AT_A_TIME


def test_who_is_late_to_open_is_asked_once_more_where_nobody_else_has_its_pieces() -> None:
    """One of thousands may be busy just then, and all of the read would be decided anew for its sake."""
    driven, nobody = Driven(), Refusal(error="VersionUnavailable", reason="nobody else")
    driven.tick()
    for has_failed in (False, True):
        [number] = driven.planned(("a", ((0, PIECES),)))
        assert driven.wait() == [number]
        assert driven.transfer.pool.exclusions.has_failed(source_id("a")) is has_failed
        assert driven.actions.plan == (((0, PIECES),), (source_id("a"),))
        driven.closed(number)
        driven.transfer.planned(nobody, driven.now)
        assert (driven.take().plan is None) is has_failed
    assert driven.phase() is TransferPhase.FAILED


def test_what_was_never_opened_has_nothing_to_close(driven: Driven) -> None:
    """Nobody would tell of its end, for nobody knows it."""
    under_way = planned(driven)
    driven.transfer.stop()
    assert driven.take().close == under_way
    for number in under_way:
        driven.closed(number)
    assert driven.quiet()
    assert driven.take().open == []


# Of many sources some are inside, and of the others the lease is held.


def own_piece(share: Share) -> bytearray:
    """Say that each source can bring what it was planned to, and nothing else."""
    marks = bytearray(PIECES)
    set_marks(marks, share.pieces)
    return marks


@pytest.fixture
def crowded() -> tuple[Driven, list[int], list[int]]:
    """Return a read of which two sources may be inside; it has begun. Then who is inside, and who is held."""
    driven = Driven(verify=False, transport="ucxx", limits=TransferLimits(transports_max=2))
    driven.transfer.pool._able = own_piece
    driven.tick()
    inside = planned(driven)
    held = [number for number, _ in driven.actions.hold]
    for number in inside:
        driven.opened(number, b"")
    for number in held:
        assert driven.phase() is TransferPhase.LEASING
        driven.transfer.held(number, b"", driven.now)
        driven.take()
    assert driven.phase() is TransferPhase.LEASED, "all leases are there before anything is overwritten"
    driven.transfer.start(driven.now)
    assert [number for number, _, _ in driven.take().post] == inside, "nothing is asked of who is not inside"
    return driven, inside, held


def ends(driven: Driven, number: int) -> None:
    """Let a source bring its part, and say that its lease held."""
    driven.brings(number)
    driven.transfer.confirmed(number, True, driven.now)  # noqa: FBT003 (as the machine takes it)
    driven.take()


def test_who_has_brought_its_part_leaves_and_the_next_one_enters(crowded: tuple[Driven, list[int], list[int]]) -> None:
    driven, inside, held = crowded
    ends(driven, inside[1])
    assert (driven.actions.close, driven.actions.enter) == ([inside[1]], [])
    assert driven.closed(inside[1]).enter == [held[0]], "once the other's place is free"
    driven.transfer.held(held[0], b"", driven.now)
    assert driven.opened(held[0], b"").post, "a word that comes twice changes nothing"
    while driven.phase() is TransferPhase.RUNNING:
        number = next(each.number for each in driven.transfer.sources.values() if each.in_flight)
        ends(driven, number)
        for closing in driven.actions.close:
            for entering in driven.closed(closing).enter:
                driven.opened(entering, b"")
    assert driven.phase() is TransferPhase.DONE
    assert not any(source.lost for source in driven.transfer.sources.values())


def test_who_is_given_up_while_it_is_held_does_not_enter(crowded: tuple[Driven, list[int], list[int]]) -> None:
    driven, inside, held = crowded
    driven.transfer.lost(held[0], "its lease is over", driven.now)
    driven.take()
    driven.closed(held[0])
    ends(driven, inside[1])
    assert driven.closed(inside[1]).enter == [held[1]]


def test_the_last_ones_stay_when_nobody_waits_for_their_place(crowded: tuple[Driven, list[int], list[int]]) -> None:
    driven, inside, held = crowded
    for number in held:
        driven.transfer.lost(number, "its lease is over", driven.now)
        driven.take()
        driven.closed(number)
    ends(driven, inside[0])
    assert driven.actions.close == []


def test_a_place_is_free_once_its_source_is_closed_whyever(crowded: tuple[Driven, list[int], list[int]]) -> None:
    driven, inside, held = crowded
    driven.transfer.lost(inside[0], "killed", driven.now)
    assert driven.take().enter == []
    assert driven.closed(inside[0]).enter == [held[0]]


def test_who_is_let_in_and_does_not_open_gives_its_place_to_the_next(
    crowded: tuple[Driven, list[int], list[int]],
) -> None:
    """Its patience begins when it enters, however long it was held."""
    driven, inside, held = crowded
    driven.wait_exactly(DEFAULT_LIMITS.open_s_max)
    ends(driven, inside[0])
    assert driven.closed(inside[0]).enter == [held[0]]
    ends(driven, inside[1])
    assert driven.closed(inside[1]).enter == [held[1]]
    driven.opened(held[1], b"")
    assert driven.wait() == [held[0]]
    assert driven.closed(held[0]).enter == [held[2]]


def test_what_is_held_is_let_go_when_the_read_ends(crowded: tuple[Driven, list[int], list[int]]) -> None:
    driven, inside, held = crowded
    driven.transfer.stop()
    assert driven.take().close == [*inside, *held]
    assert driven.take().enter == []
