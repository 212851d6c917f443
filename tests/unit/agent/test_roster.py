"""Who is in which role, and whose patience ends first: known after each event, however many sources there are."""

from random import Random

import pytest

from tensorhub_agent.primitives.deadlines import NEVER
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS
from tensorhub_agent.transfer.role_index import FLYING, GIVING, IDLE, INSIDE, LIVE, RoleIndex, by_number
from tensorhub_agent.transfer.source import Source, SourcePhase
from tensorhub_common.protocol.plans import Share, SourceId

STALL_S = 5.0


def source(number: int, layout: str = "") -> Source:
    who = SourceId(f"agent-{number}", 1, "trainer", 0)
    share = Share(source=who, transport="ucxx", pieces=(), nbytes=0, why="", layout=layout)
    return Source(number, share, SourcePhase.OPENING, 0.0, covered=bytearray(8) if layout else None)


def roster_of(*sources: Source) -> RoleIndex:
    roster = RoleIndex(DEFAULT_LIMITS)
    for each in sources:
        roster.add(each)
    roster.check()
    return roster


def test_what_is_not_touched_is_not_looked_at() -> None:
    """Else an event would cost what there are sources."""
    roster = roster_of(*map(source, range(100)))
    roster.fresh.clear()
    roster.of(LIVE)[7].give([(0, 1)])
    roster.settle()
    assert list(roster.fresh) == [7]
    assert list(roster.of(GIVING)) == [7]


def test_a_change_that_is_not_told_is_found_by_the_check() -> None:
    roster = roster_of(source(1))
    roster.of(LIVE)[1].phase = SourcePhase.CLOSED
    with pytest.raises(AssertionError, match="LIVE"):
        roster.check()


def test_the_first_whose_patience_ends_is_known_though_it_was_put_off() -> None:
    first, second = source(1), source(2)
    roster = roster_of(first, second)
    assert roster.next_due() == DEFAULT_LIMITS.open_s_max
    first.begins(1.0)
    assert roster.next_due() == DEFAULT_LIMITS.open_s_max
    second.begins(0.5)
    assert roster.next_due() == DEFAULT_LIMITS.open_s_max + 0.5
    assert roster.due_after() == DEFAULT_LIMITS.open_s_max + 0.5
    assert roster.overdue(DEFAULT_LIMITS.open_s_max + 0.7) == [second]
    assert roster.next_due() == DEFAULT_LIMITS.open_s_max + 0.5, "it is told again as long as nothing is done about it"
    second.closes("late")
    assert roster.next_due() == DEFAULT_LIMITS.open_s_max + 1.0
    first.closes("late")
    assert roster.next_due() == NEVER
    roster.check()


def test_open_sources_have_all_the_time_before_the_read_begins() -> None:
    one = source(1)
    roster = roster_of(one)
    one.opens(0.0)
    one.asked(1, ((0, 1),), 10, 0.0)
    assert roster.next_due() == NEVER
    roster.begins()
    assert roster.next_due() == STALL_S


def test_the_idle_and_those_who_have_pieces_are_known_by_layout() -> None:
    sources = [source(1, "a"), source(2, "a"), source(3, "b")]
    roster = roster_of(*sources)
    for each in sources:
        each.opens(0.0)
    sources[0].give([(0, 2)])
    roster.check()
    assert by_number(roster.idle_of("a")) == [sources[1]]
    assert list(roster.idle_kinds()) == ["a", "b"]
    assert by_number(roster.of_layout(GIVING, "a")) == [sources[0]]
    assert not roster.of_layout(GIVING, "b")
    assert by_number(roster.of_layout(GIVING, None)) == [sources[0]]
    sources[1].closes()
    roster.check()
    assert list(roster.idle_kinds()) == ["b"]


def moves(each: Source, now: float) -> None:
    """Let a source take the next step of its life."""
    match each.phase:
        case SourcePhase.OPENING if each.number % 2 and now < 50:
            each.leased()
        case SourcePhase.OPENING:
            each.opens(now)
        case SourcePhase.HELD:
            each.request_transport(now)
        case SourcePhase.OPEN if now > 100:
            each.closes("gone")
            each.let_all_go()
        case SourcePhase.CLOSING:
            each.ends(now)
            each.give_up()
        case _:
            pass


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_everybody_is_counted_as_what_it_is(seed: int) -> None:
    rng = Random(seed)
    sources = [source(number, rng.choice(("", "a", "b"))) for number in range(8)]
    roster = roster_of(*sources)
    batch = 0
    for step in range(200):
        now, each = float(step), rng.choice(sources)
        what = rng.randrange(9)
        if what > 4:
            moves(each, now)
        match what:
            case 1:
                each.give([(rng.randrange(8), 1)])
            case 2 if each.phase is SourcePhase.OPEN and each.queue:
                ranges, nbytes = each.cut_batch([3] * 8, 100)
                batch += 1
                each.asked(batch, ranges, nbytes, now)
            case 3 if each.in_flight:
                each.answered(next(iter(each.in_flight)), now)
            case 4:
                roster.begins()
        if rng.random() < 0.5:
            roster.check()
    roster.check()
    assert not set(roster.of(IDLE)) & set(roster.of(FLYING))


def test_who_waits_for_folds_takes_no_place() -> None:
    """All places might be taken by such, and the parts that they wait for be with those who wait for a place."""
    one = source(1, "a")
    roster = roster_of(one)
    one.request_lease(0.0, inside=True)
    one.opens(0.0)
    roster.settle()
    assert roster.count(INSIDE) == 1
    one.unknown = bytearray(b"\x01" * 8)
    one.by_amax = bytearray(b"\x01" * 8)
    one.give([(0, 1)])
    roster.settle()
    assert (list(one.queue), one.awaiting_fold, roster.count(INSIDE)) == ([], [(0, 1)], 0)
    one.unknown[0] = 0
    one.freed()
    roster.check()
    assert (list(one.queue), roster.count(INSIDE)) == ([(0, 1)], 1)
