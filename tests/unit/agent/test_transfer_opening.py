"""A read from many sources opens some at a time, so that the last of them is not late for the sake of the first."""

import pytest
from tests.unit.agent.driven import PIECES, Driven

from tensorhub_agent import doors
from tensorhub_agent.patience import OPEN_S_MAX
from tensorhub_agent.transfer import Phase

AT_A_TIME = 2


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch) -> Driven:
    """Return a read that has asked for its plan."""
    monkeypatch.setattr(doors, "OPENING_MAX", AT_A_TIME)
    made = Driven()
    made.tick()
    return made


def planned(driven: Driven) -> list[int]:
    """Plan one source for each piece; return the numbers of those that are to be opened."""
    return driven.planned(*((f"s{piece}", ((piece, 1),)) for piece in range(PIECES)))


def test_as_many_are_being_opened_at_a_time(driven: Driven) -> None:
    under_way, seen = planned(driven), 0
    while under_way:
        assert len(under_way) <= AT_A_TIME
        assert driven.phase() is Phase.LEASING
        # Each comes just in time; the wait of those behind it is not theirs.
        driven.now += 0.9 * OPEN_S_MAX / AT_A_TIME
        driven.transfer.tick(driven.now)
        seen += 1
        under_way = [*under_way[1:], *(number for number, _ in driven.opened(under_way[0]).open)]
    assert seen == PIECES
    assert driven.phase() is Phase.LEASED
    assert not any(source.lost for source in driven.transfer.sources.values())


def test_whoever_does_not_open_in_its_time_gives_its_turn_to_the_next(driven: Driven) -> None:
    first, second = planned(driven)
    assert sorted(driven.wait()) == [first, second]
    assert driven.now == OPEN_S_MAX
    driven.closed(first)
    assert len(driven.todo.open) + len(driven.closed(second).open) <= AT_A_TIME
    waiting = [source for source in driven.transfer.sources.values() if not source.is_asked]
    assert len(waiting) == PIECES - 2 * AT_A_TIME


def test_what_was_never_opened_has_nothing_to_close(driven: Driven) -> None:
    """Nobody would tell of its end, for nobody knows it."""
    under_way = planned(driven)
    driven.transfer.stop()
    assert driven.take().close == under_way
    for number in under_way:
        driven.closed(number)
    assert driven.quiet()
    assert driven.take().open == []
