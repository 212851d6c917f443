"""Whom to ask for more: those that an event concerned, and those that something else has stopped meanwhile."""

from tensorhub_agent.transfer.flow_control import RefillQueue
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS
from tensorhub_agent.transfer.role_index import RoleIndex
from tensorhub_agent.transfer.source import Source, SourcePhase
from tensorhub_common.protocol.plans import Share, SourceId

PART_BYTES = 1000


def source(number: int, *, in_flight_bytes: int) -> Source:
    who = SourceId(f"agent-{number}", 1, "trainer", 0)
    share = Share(source=who, transport="ucxx", pieces=(), nbytes=0, why="")
    reading = Source(number, share, SourcePhase.OPEN, 0.0, covered=None)
    reading.give([(number, 1)])
    reading.in_flight_bytes = in_flight_bytes
    return reading


def numbers(found: list[Source]) -> list[int]:
    return [each.number for each in found]


def index_of(*sources: Source) -> RoleIndex:
    index = RoleIndex(DEFAULT_LIMITS)
    for each in sources:
        index.add(each)
    index.settle()
    return index


def test_those_that_an_event_concerned_are_asked_in_their_order() -> None:
    sources = [source(number, in_flight_bytes=0) for number in (3, 1, 2)]
    assert numbers(RefillQueue().affected(index_of(*sources), PART_BYTES)) == [1, 2, 3]


def test_whose_part_was_full_is_asked_once_it_has_grown() -> None:
    hungry, index = RefillQueue(), index_of()
    full = source(7, in_flight_bytes=PART_BYTES)
    assert hungry.affected(index, PART_BYTES) == []
    hungry.stopped(full, PART_BYTES)
    assert hungry.affected(index, PART_BYTES) == [], "its part is as it was"
    assert hungry.affected(index, PART_BYTES // 2) == [], "or smaller"
    assert numbers(hungry.affected(index, PART_BYTES // 2 + 1)) == [7]
    assert hungry.affected(index, 2 * PART_BYTES) == [], "it was asked, and says itself what stops it now"


def test_who_waits_for_room_in_the_window_waits_until_it_is_taken() -> None:
    hungry = RefillQueue()
    poor = [source(number, in_flight_bytes=0) for number in (5, 4)]
    for each in poor:
        # It has brought something, so it may have more under way than it has.
        each.asked(100, ((8, 1),), 10**6, 0.0)
        each.answered(100, 1.0)
        assert each.in_flight_bytes < each.pace.in_flight_limit(PART_BYTES)
        hungry.stopped(each, PART_BYTES)
    first = hungry.waiting()
    assert next(first).number == 5, "who has waited longest"
    assert numbers(list(hungry.waiting())) == [4]
    assert numbers(list(hungry.waiting())) == []


def test_who_has_nothing_more_to_be_asked_for_waits_for_nothing() -> None:
    hungry, done = RefillQueue(), source(1, in_flight_bytes=PART_BYTES)
    done.queue.clear()
    hungry.stopped(done, PART_BYTES)
    assert numbers(list(hungry.waiting())) == []
    assert hungry.affected(index_of(), 2 * PART_BYTES) == []
