"""Which registry speaks, and from when on it may expire agents."""

import pytest

from tensorhub_common.machine import Tick
from tensorhub_registry.core.election import (
    LEADER_TRANSITIONS,
    Connected,
    Disconnected,
    Election,
    Input,
    LeaderState,
    LeaderTransition,
    LeaseLost,
    LeaseWon,
    Output,
    Resigned,
    StartLeading,
    StopLeading,
)
from tensorhub_registry.core.liveness import MonitoringStarted, MonitoringStopped


def after(*events: Input) -> tuple[Election, list[Output]]:
    """Return a leader after these events, and what it said to the last one."""
    leader = Election()
    said: list[Output] = []
    for event in events:
        said = leader.handle(event, 0.0)
        leader.check()
    return leader, said


def test_every_move_of_every_state_is_in_the_table() -> None:
    """A lease tells when it likes, so no state may be surprised."""
    assert set(LEADER_TRANSITIONS) == {(state, move) for state in LeaderState for move in LeaderTransition}


def test_resigned_is_for_ever() -> None:
    assert {after for (state, _), after in LEADER_TRANSITIONS.items() if state is LeaderState.RESIGNED} == {
        LeaderState.RESIGNED
    }
    leader, said = after(Connected(), Resigned(), LeaseWon(4))
    assert (leader.leads, said) == (False, [])


def test_who_wins_leads_and_listens() -> None:
    assert after(Connected(), LeaseWon(3))[1] == [StartLeading(3), MonitoringStarted(3)]


def test_who_wins_without_a_connection_leads_and_does_not_listen() -> None:
    """The lease may still be ours when the connection breaks, but the beats don't come in."""
    assert after(LeaseWon(3))[1] == [StartLeading(3)]
    assert after(LeaseWon(3), Connected())[1] == [MonitoringStarted(3)]
    assert after(Connected(), LeaseWon(3), Disconnected())[1] == [MonitoringStopped()]


def test_a_reconnection_begins_to_listen_anew() -> None:
    assert after(Connected(), LeaseWon(3), Disconnected(), Connected())[1] == [MonitoringStarted(3)]


def test_who_loses_stands_down_first() -> None:
    assert after(Connected(), LeaseWon(3), LeaseLost())[1] == [StopLeading(3), MonitoringStopped()]
    assert after(Connected(), LeaseWon(3), Resigned())[1] == [StopLeading(3), MonitoringStopped()]


def test_a_new_term_without_a_loss_seen_ends_the_old_one() -> None:
    assert after(Connected(), LeaseWon(3), LeaseWon(5))[1] == [
        StopLeading(3),
        MonitoringStopped(),
        StartLeading(5),
        MonitoringStarted(5),
    ]


@pytest.mark.parametrize("event", [LeaseWon(3), Connected(), Tick()])
def test_what_is_so_already_is_no_news(event: Input) -> None:
    assert after(Connected(), LeaseWon(3), event)[1] == []


@pytest.mark.parametrize("event", [LeaseLost(), Connected(), Tick(), Resigned()])
def test_a_standby_says_nothing(event: Input) -> None:
    assert after(event)[1] == []


def test_a_term_that_is_led_again_is_led_again() -> None:
    """The lease ran out for us and nobody else took it: its term goes on."""
    assert after(Connected(), LeaseWon(3), LeaseLost(), LeaseWon(3))[1] == [StartLeading(3), MonitoringStarted(3)]
    assert Election().deadline() is None
