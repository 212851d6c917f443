"""Who is in which role, and whose patience ends first: known after each event, however many sources there are."""

from random import Random

import pytest

from tensorhub_agent.primitives.deadlines import NEVER
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS
from tensorhub_agent.transfer.role_index import GIVING, IDLE, IN_FLIGHT, INSIDE, LIVE, RoleIndex, by_number
from tensorhub_agent.transfer.source import Source, SourcePhase
from tensorhub_common.protocol.plans import Share, SourceId

STALL_S = 5.0


def source(number: int, layout: str = "") -> Source:
    who = SourceId(f"agent-{number}", 1, "trainer", 0)
    share = Share(source=who, transport="ucxx", pieces=(), nbytes=0, why="", layout=layout)
    return Source(number, share, SourcePhase.OPENING, 0.0, covered=bytearray(8) if layout else None)


def index_of(*sources: Source) -> RoleIndex:
    index = RoleIndex(DEFAULT_LIMITS)
    for each in sources:
        index.add(each)
    index.check()
    return index


def test_what_is_not_touched_is_not_looked_at() -> None:
    """Else an event would cost what there are sources."""
    index = index_of(*map(source, range(100)))
    index.fresh.clear()
    index.of(LIVE)[7].give([(0, 1)])
    index.settle()
    assert list(index.fresh) == [7]
    assert list(index.of(GIVING)) == [7]


def test_a_change_that_is_not_told_is_found_by_the_check() -> None:
    index = index_of(source(1))
    index.of(LIVE)[1].phase = SourcePhase.CLOSED
    with pytest.raises(AssertionError, match="LIVE"):
        index.check()


def test_the_first_whose_patience_ends_is_known_though_it_was_put_off() -> None:
    first, second = source(1), source(2)
    index = index_of(first, second)
    assert index.next_due() == DEFAULT_LIMITS.open_s_max
    first.begins(1.0)
    assert index.next_due() == DEFAULT_LIMITS.open_s_max
    second.begins(0.5)
    assert index.next_due() == DEFAULT_LIMITS.open_s_max + 0.5
    assert index.due_after() == DEFAULT_LIMITS.open_s_max + 0.5
    assert index.overdue(DEFAULT_LIMITS.open_s_max + 0.7) == [second]
    assert index.next_due() == DEFAULT_LIMITS.open_s_max + 0.5, "it is told again as long as nothing is done about it"
    second.closes("late")
    assert index.next_due() == DEFAULT_LIMITS.open_s_max + 1.0
    first.closes("late")
    assert index.next_due() == NEVER
    index.check()


def test_open_sources_have_all_the_time_before_the_read_begins() -> None:
    one = source(1)
    index = index_of(one)
    one.opens(0.0)
    one.asked(1, ((0, 1),), 10, 0.0)
    assert index.next_due() == NEVER
    index.begins()
    assert index.next_due() == STALL_S


def test_the_idle_and_those_who_have_pieces_are_known_by_layout() -> None:
    sources = [source(1, "a"), source(2, "a"), source(3, "b")]
    index = index_of(*sources)
    for each in sources:
        each.opens(0.0)
    sources[0].give([(0, 2)])
    index.check()
    assert by_number(index.idle_of("a")) == [sources[1]]
    assert list(index.idle_kinds()) == ["a", "b"]
    assert by_number(index.of_layout(GIVING, "a")) == [sources[0]]
    assert not index.of_layout(GIVING, "b")
    assert by_number(index.of_layout(GIVING, None)) == [sources[0]]
    sources[1].closes()
    index.check()
    assert list(index.idle_kinds()) == ["b"]


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
            each.take_all_back()
        case SourcePhase.CLOSING:
            each.ends(now)
            each.give_up()
        case _:
            pass


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_everybody_is_counted_as_what_it_is(seed: int) -> None:
    rng = Random(seed)
    sources = [source(number, rng.choice(("", "a", "b"))) for number in range(8)]
    index = index_of(*sources)
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
                index.begins()
        if rng.random() < 0.5:
            index.check()
    index.check()
    assert not set(index.of(IDLE)) & set(index.of(IN_FLIGHT))


def test_who_waits_for_folds_takes_no_place() -> None:
    """All places might be taken by such, and the parts that they wait for be with those who wait for a place."""
    one = source(1, "a")
    index = index_of(one)
    one.request_lease(0.0, inside=True)
    one.opens(0.0)
    index.settle()
    assert index.count(INSIDE) == 1
    one.unknown = bytearray(b"\x01" * 8)
    one.by_amax = bytearray(b"\x01" * 8)
    one.give([(0, 1)])
    index.settle()
    assert (list(one.queue), one.awaiting_fold, index.count(INSIDE)) == ([], [(0, 1)], 0)
    one.unknown[0] = 0
    one.freed()
    index.check()
    assert (list(one.queue), index.count(INSIDE)) == ([(0, 1)], 1)
