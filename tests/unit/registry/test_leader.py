"""Which registry speaks, and from when on it may expire agents."""

import pytest

from tensorhub_common.machine import Tick
from tensorhub_registry.core.election import (
    LEADER_MOVES,
    Connected,
    Deaf,
    Disconnected,
    Input,
    Lead,
    Leader,
    LeaderMove,
    LeaderState,
    Listening,
    Lost,
    Output,
    Resigned,
    StandDown,
    Won,
)


def after(*events: Input) -> tuple[Leader, list[Output]]:
    """Return a leader after these events, and what it said to the last one."""
    leader = Leader()
    said: list[Output] = []
    for event in events:
        said = leader.handle(event, 0.0)
        leader.check()
    return leader, said


def test_every_move_of_every_state_is_in_the_table() -> None:
    """A lease tells when it likes, so no state may be surprised."""
    assert set(LEADER_MOVES) == {(state, move) for state in LeaderState for move in LeaderMove}


def test_resigned_is_for_ever() -> None:
    assert {after for (state, _), after in LEADER_MOVES.items() if state is LeaderState.RESIGNED} == {
        LeaderState.RESIGNED
    }
    leader, said = after(Connected(), Resigned(), Won(4))
    assert (leader.leads, said) == (False, [])


def test_who_wins_leads_and_listens() -> None:
    assert after(Connected(), Won(3))[1] == [Lead(3), Listening(3)]


def test_who_wins_without_a_connection_leads_and_does_not_listen() -> None:
    """The lease may still be ours when the connection breaks, but the beats don't come in."""
    assert after(Won(3))[1] == [Lead(3)]
    assert after(Won(3), Connected())[1] == [Listening(3)]
    assert after(Connected(), Won(3), Disconnected())[1] == [Deaf()]


def test_a_reconnection_begins_to_listen_anew() -> None:
    assert after(Connected(), Won(3), Disconnected(), Connected())[1] == [Listening(3)]


def test_who_loses_stands_down_first() -> None:
    assert after(Connected(), Won(3), Lost())[1] == [StandDown(3), Deaf()]
    assert after(Connected(), Won(3), Resigned())[1] == [StandDown(3), Deaf()]


def test_a_new_term_without_a_loss_seen_ends_the_old_one() -> None:
    assert after(Connected(), Won(3), Won(5))[1] == [StandDown(3), Deaf(), Lead(5), Listening(5)]


@pytest.mark.parametrize("event", [Won(3), Connected(), Tick()])
def test_what_is_so_already_is_no_news(event: Input) -> None:
    assert after(Connected(), Won(3), event)[1] == []


@pytest.mark.parametrize("event", [Lost(), Connected(), Tick(), Resigned()])
def test_a_standby_says_nothing(event: Input) -> None:
    assert after(event)[1] == []


def test_a_term_that_is_led_again_is_led_again() -> None:
    """The lease ran out for us and nobody else took it: its term goes on."""
    assert after(Connected(), Won(3), Lost(), Won(3))[1] == [Lead(3), Listening(3)]
    assert Leader().deadline() is None
