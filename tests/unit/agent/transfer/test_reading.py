"""A read to its end: a piece is with one source at a time, and counts only by what the log vouches for."""

import pytest
from tests.unit.agent.transfer.driver import (
    ALL,
    LIST,
    PIECES,
    RIGHT,
    WRONG,
    Driven,
    planning,
    running,
    share,
    source_id,
)

from tensorhub_agent.primitives.ranges import set_marks
from tensorhub_agent.transfer import source_pool
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS, TransferLimits
from tensorhub_agent.transfer.source import SourcePhase
from tensorhub_agent.transfer.transfer import TransferPhase
from tensorhub_common.errors import IntegrityError, LayoutMismatch, VersionUnavailable
from tensorhub_common.protocol.plans import Refusal, Share
from tensorhub_common.protocol.ranges import Range

HALF = share("half", *ALL)


def test_waits_for_all_leases_then_counts_what_matches_and_is_done() -> None:
    driven = Driven()
    assert driven.tick().plan == (ALL, ())
    one, two = driven.planned(share("a", (0, 3)), share("b", (3, 3)))
    driven.opened(one)
    assert driven.phase() is TransferPhase.LEASING
    driven.opened(two)
    assert driven.posts == [], "nothing is written before the round has started"
    assert driven.transfer.deadline() is None, "a read that waits for the others' leases wants no time"
    driven.start()
    assert driven.posts == [(one, ((0, 3),)), (two, ((3, 3),))]
    assert driven.brings(two).proven == [(3, 3)]
    driven.brings(one)
    assert driven.phase() is TransferPhase.DONE
    assert sorted(driven.actions.close) == [one, two]


def test_what_was_kept_is_not_asked_for_and_only_its_list_counts() -> None:
    driven = Driven(kept=(bytearray([1, 1, 1, 0, 0, 1]), LIST))
    assert driven.tick().plan == (((3, 2),), ())
    one, two = driven.planned(share("a", (3, 1)), share("b", (4, 1)))
    assert driven.opened(one, WRONG * PIECES).close == [one]
    assert driven.opened(two).close == []
    assert Driven(kept=(bytearray([1] * PIECES), LIST)).phase() is TransferPhase.LEASED
    unproven = Driven(verify=False, kept=(bytearray([1] * PIECES), LIST))
    assert unproven.tick().plan == (ALL, ()), "kept without digests, it is read again"


@pytest.mark.parametrize("digests", [WRONG * PIECES, LIST[16:], b""], ids=["another", "too short", "none"])
def test_a_list_that_is_not_the_logs_is_not_used(digests: bytes) -> None:
    """A source that has moved on to another version can't vouch for this one."""
    driven = planning()
    [number] = driven.planned(share("a", *ALL))
    assert driven.opened(number, digests).close == [number]
    driven.closed(number)
    left = "nobody has it (the last source, on a, was left because its digests are not those of the log)"
    assert driven.refused_for_long() == (IntegrityError.__name__, left)


@pytest.mark.parametrize(
    ("digests", "proven"),
    [
        (LIST, ALL),
        (LIST[:32] + WRONG + LIST[48:], ((0, 2), (3, 3))),
        (WRONG + LIST[16:80] + WRONG, ((1, 4),)),
        (b"".join(reversed(RIGHT[:PIECES])), ()),
        (LIST[:48], ((0, 3),)),
        (b"", ()),
    ],
    ids=["all", "third wrong", "ends wrong", "in another order", "three alone", "none"],
)
def test_each_piece_is_held_against_its_own_digest(digests: bytes, proven: tuple[Range, ...]) -> None:
    driven, [number] = running(share("a", *ALL))
    assert driven.done(number, digests).proven == list(proven)
    right = sum(count for _, count in proven)
    source = driven.source(number)
    assert (source.got_pieces, source.got_bytes, source.retried) == (right, 10 * right, PIECES - right)
    assert (source.wasted_bytes, driven.transfer.done_bytes()) == (10 * (PIECES - right), 10 * right)
    assert driven.actions.confirm == ([] if right == PIECES else [number])
    kept = driven.transfer.verification.keep()
    assert (kept is None) is (right == 0)
    assert kept is None or (sum(kept[0]), kept[1], kept[0] is driven.transfer.verification.done) == (right, LIST, False)


def test_pieces_of_several_ranges_are_each_held_against_their_own_digests() -> None:
    driven, [number] = running(share("a", (4, 2), (1, 1), (0, 1), (2, 2)))
    assert driven.posts == [(number, ((4, 2), (1, 1), (0, 1), (2, 2)))]
    digests = LIST[64:] + WRONG + RIGHT[0] + RIGHT[2] + WRONG
    assert driven.done(number, digests).proven == [(4, 2), (0, 1), (2, 1)]


@pytest.mark.parametrize(
    ("holds", "error"), [(False, VersionUnavailable.__name__), (True, IntegrityError.__name__)], ids=["over", "held"]
)
def test_wrong_bytes_are_damage_only_of_a_source_that_kept_its_lease(holds: bool, error: str) -> None:  # noqa: FBT001
    driven, [number] = running(share("a", *ALL), window_bytes=20)
    assert driven.done(number, WRONG).confirm == [number]
    assert driven.left_out == (source_id("a"),)
    while driven.source(number).in_flight:
        assert (driven.done(number, WRONG).confirm, driven.posts) == ([], []), "it is asked once, and gets nothing more"
    accused = driven.confirmed(number, holds=holds).accuse
    assert accused == ([number] if holds else [])
    assert driven.source(number).lost == "its bytes did not match the digests of the log"
    driven.closed(number)
    found = driven.refused_for_long()
    assert found is not None
    assert found[0] == error
    assert ("does not hold what was published" in found[1]) is holds


def test_without_digests_a_piece_counts_by_the_word_of_its_source() -> None:
    driven, [one, two] = running(share("a", (0, 3)), share("b", (3, 3)), verify=False)
    assert driven.brings(one).confirm == [one]
    assert (driven.transfer.done_bytes(), driven.actions.proven) == (30, []), "a progress bar shows what has come"
    assert driven.confirmed(one, holds=True).proven == [(0, 3)]
    driven.is_gone(two)
    assert driven.posts == [(one, ((3, 3),))], "who has given its word is asked for more"
    assert driven.brings(one).confirm == [one]
    driven.confirmed(one, holds=True)
    assert driven.phase() is TransferPhase.DONE


def test_what_a_lost_source_had_is_asked_for_elsewhere_only_once_it_is_closed() -> None:
    """A batch that ends meanwhile still counts."""
    driven, [number] = running(share("a", *ALL))
    actions = driven.lost(number)
    assert (actions.plan, actions.close, driven.quiet()) == (None, [number], False)
    assert driven.closed(number).plan == (ALL, (source_id("a"),))
    assert driven.source(number).retried == PIECES
    driven, [number] = running(share("a", *ALL))
    driven.lost(number)
    driven.brings(number)
    driven.closed(number)
    assert driven.phase() is TransferPhase.DONE


def test_other_layouts_fail_at_once() -> None:
    driven = planning()
    driven.refused(Refusal(error=LayoutMismatch.__name__, reason="'w' differs"))
    assert driven.transfer.error == (LayoutMismatch.__name__, "'w' differs")


def test_a_stopped_read_is_quiet_once_what_is_under_way_has_ended() -> None:
    driven, [number] = running(share("a", *ALL))
    driven.transfer.stop()
    assert driven.take().close == [number]
    assert not driven.quiet()
    driven.closed(number)
    assert driven.quiet()
    assert driven.transfer.deadline() is None


@pytest.mark.parametrize("is_over", [True, False])
def test_a_plan_that_comes_after_the_end_or_twice_changes_nothing(is_over: bool) -> None:  # noqa: FBT001
    driven = planning()
    if is_over:
        driven.transfer.stop()
    else:
        driven.planned(share("a", *ALL))
    before = list(driven.transfer.sources)
    assert driven.planned(share("b", *ALL)) == []
    assert list(driven.transfer.sources) == before


# Half-filled sources.


def test_only_what_stands_there_is_asked_for() -> None:
    driven, [number] = running(HALF, there={"half": ((0, 2),)}, transport="ucxx")
    assert driven.posts == [(number, ((0, 2),))]
    driven.available(number, (3, 1))
    assert driven.posts == [(number, ((3, 1),))]
    driven.available(number, (3, 1))
    assert driven.posts == [], "it was told before"
    assert driven.brings(number).proven == [(0, 2)]
    driven.available(number, (2, 1), (4, 2))
    assert driven.posts == [(number, ((2, 1), (4, 2)))]
    driven.brings(number)
    driven.brings(number)
    assert driven.phase() is TransferPhase.DONE


@pytest.mark.parametrize("there", [(-1, 2), (0, 0), (0, PIECES + 1), (PIECES, 1), (PIECES - 1, 2)])
def test_pieces_that_the_shard_does_not_have_are_no_news(there: Range) -> None:
    driven, [number] = running(HALF, there={"half": ()}, transport="ucxx")
    assert driven.available(number, (0, 1), there).post == []
    assert driven.source(number).has == bytearray(PIECES)


def test_what_a_half_filled_source_had_brought_is_not_read_again() -> None:
    driven, [number] = running(HALF, there={"half": ((0, 2),)}, transport="ucxx")
    driven.brings(number)
    driven.is_gone(number)
    [other] = driven.planned(share("ready", *ALL))
    driven.opened(other)
    assert driven.posts == [(other, ((2, PIECES - 2),))]


# Opening: of many sources some are opened at a time, so that the last of them is not late for the sake of the first.

AT_A_TIME = 2
EACH = [share(f"s{piece}", (piece, 1)) for piece in range(PIECES)]
"""One source for each piece."""


@pytest.fixture
def driven() -> Driven:
    return planning(limits=TransferLimits(opening_max=AT_A_TIME))


def test_as_many_are_being_opened_at_a_time(driven: Driven) -> None:
    under_way, seen = driven.planned(*EACH), 0
    while under_way:
        assert len(under_way) <= AT_A_TIME
        assert driven.phase() is TransferPhase.LEASING
        # Each comes just in time; the wait of those behind it is not theirs.
        driven.tick(0.9 * DEFAULT_LIMITS.open_s_max / AT_A_TIME)
        seen += 1
        under_way = [*under_way[1:], *(number for number, _ in driven.opened(under_way[0]).open)]
    assert seen == PIECES
    assert driven.phase() is TransferPhase.LEASED
    assert not any(source.lost for source in driven.transfer.sources.values())


def test_whoever_does_not_open_in_its_time_gives_its_turn_to_the_next(driven: Driven) -> None:
    first, second = driven.planned(*EACH)
    assert sorted(driven.wait()) == [first, second]
    assert driven.now == DEFAULT_LIMITS.open_s_max
    driven.closed(first)
    assert len(driven.actions.open) + len(driven.closed(second).open) <= AT_A_TIME
    waiting = [source for source in driven.transfer.sources.values() if not source.is_asked]
    assert len(waiting) == PIECES - 2 * AT_A_TIME


def test_who_is_late_to_open_is_asked_once_more_where_nobody_else_has_its_pieces() -> None:
    """One of thousands may be busy just then, and all of the read would be decided anew for its sake."""
    driven = planning()
    for has_failed in (False, True):
        [number] = driven.planned(share("a", *ALL))
        assert driven.wait() == [number]
        assert driven.transfer.pool.exclusions.has_failed(source_id("a")) is has_failed
        assert driven.actions.plan == (ALL, (source_id("a"),))
        driven.closed(number)
        assert (driven.refused().plan is None) is has_failed
    assert driven.phase() is TransferPhase.FAILED


def test_what_was_never_opened_has_nothing_to_close(driven: Driven) -> None:
    """Nobody would tell of its end, for nobody knows it."""
    under_way = driven.planned(*EACH)
    driven.transfer.stop()
    assert driven.take().close == under_way
    for number in under_way:
        assert driven.closed(number).open == []
    assert driven.quiet()
    assert {source.phase for source in driven.transfer.sources.values()} == {SourcePhase.CLOSED}


def test_a_read_has_so_many_sources_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_pool, "SHARES_MAX", 2)
    driven = planning()
    assert len(driven.planned(share("a", (0, 2)), share("b", (2, 1)), share("c", (3, 3)))) == 2
    assert sorted(source.waiting for source in driven.transfer.sources.values()) == [2, 4]
    driven = planning(able=own_piece)
    assert len(driven.planned(share("a", (0, 2)), share("b", (2, 1)), share("c", (3, 3)))) == 2
    assert driven.transfer.pool.loose == [(3, 3)], "who gives its own pieces alone is given no others"


# Of many sources some are inside, and of the others the lease is held.


def own_piece(share: Share) -> bytearray:
    """Say that each source can bring what it was planned to, and nothing else."""
    marks = bytearray(PIECES)
    set_marks(marks, share.pieces)
    return marks


Crowd = tuple[Driven, list[int], list[int]]


@pytest.fixture
def crowd() -> Crowd:
    """Return a read of which two sources may be inside; it has begun. Then who is inside, and who is held."""
    driven = planning(verify=False, transport="ucxx", limits=TransferLimits(transports_max=2), able=own_piece)
    inside = driven.planned(*EACH)
    held = [number for number, _ in driven.actions.hold]
    for number in inside:
        driven.opened(number)
    for number in held:
        assert driven.phase() is TransferPhase.LEASING, "all leases are there before anything is overwritten"
        driven.transfer.held(number, b"", driven.now)
        driven.take()
    driven.start()
    assert [number for number, _ in driven.posts] == inside, "nothing is asked of who is not inside"
    return driven, inside, held


def ends(driven: Driven, number: int) -> None:
    """Let a source bring its part, and say that its lease held."""
    driven.brings(number)
    driven.confirmed(number, holds=True)


def test_who_has_brought_its_part_leaves_and_the_next_one_enters(crowd: Crowd) -> None:
    driven, inside, held = crowd
    ends(driven, inside[1])
    assert (driven.actions.close, driven.actions.enter) == ([inside[1]], [])
    assert driven.closed(inside[1]).enter == [held[0]], "once the other's place is free"
    driven.transfer.held(held[0], b"", driven.now)
    assert driven.opened(held[0]).post, "a word that comes twice changes nothing"
    while driven.phase() is TransferPhase.RUNNING:
        number = next(each.number for each in driven.transfer.sources.values() if each.in_flight)
        ends(driven, number)
        for closing in driven.actions.close:
            for entering in driven.closed(closing).enter:
                driven.opened(entering)
    assert driven.phase() is TransferPhase.DONE
    assert not any(source.lost for source in driven.transfer.sources.values())


def test_all_that_enter_are_told_however_much_happens_before_that_is_asked(crowd: Crowd) -> None:
    driven, inside, held = crowd
    for number in inside:
        driven.transfer.lost(number, "killed", driven.now)
        driven.transfer.closed(number, driven.now)
    assert driven.take().enter == held[:2]


def test_who_is_given_up_while_it_is_held_does_not_enter(crowd: Crowd) -> None:
    driven, inside, held = crowd
    driven.is_gone(held[0])
    ends(driven, inside[1])
    assert driven.closed(inside[1]).enter == [held[1]]
    for number in held[2:]:
        driven.is_gone(number)
    ends(driven, inside[0])
    assert driven.actions.close == [], "the last ones stay when nobody waits for their place"


def test_a_place_is_free_once_its_source_is_closed_whyever(crowd: Crowd) -> None:
    driven, inside, held = crowd
    assert driven.lost(inside[0], "killed").enter == []
    assert driven.closed(inside[0]).enter == [held[0]]
    driven.transfer.stop()
    assert driven.take().close == [inside[1], *held], "what is held is let go when the read ends"
    assert driven.actions.enter == []


def test_who_is_let_in_and_does_not_open_gives_its_place_to_the_next(crowd: Crowd) -> None:
    """Its patience begins when it enters, however long it was held."""
    driven, inside, held = crowd
    driven.wait_exactly(DEFAULT_LIMITS.open_s_max)
    ends(driven, inside[0])
    assert driven.closed(inside[0]).enter == [held[0]]
    ends(driven, inside[1])
    assert driven.closed(inside[1]).enter == [held[1]]
    driven.opened(held[1])
    assert driven.wait() == [held[0]]
    assert driven.closed(held[0]).enter == [held[2]]
