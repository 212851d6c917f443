"""Which registry leads, and from when on it may expire agents."""

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

UP, DOWN, WON, LOST, RESIGNED = Connected(), Disconnected(), LeaseWon(3), LeaseLost(), Resigned()
LEAD, STOP, LISTEN, DEAF = StartLeading(3), StopLeading(3), MonitoringStarted(3), MonitoringStopped()


def test_every_transition_of_every_state_is_in_the_table() -> None:
    """A lease reports when it likes, so each is possible in each state."""
    assert set(LEADER_TRANSITIONS) == {(state, move) for state in LeaderState for move in LeaderTransition}


@pytest.mark.parametrize(
    ("events", "last"),
    [
        ([UP, WON], [LEAD, LISTEN]),
        ([WON], [LEAD]),
        ([WON, UP], [LISTEN]),
        ([UP, WON, DOWN], [DEAF]),
        ([UP, WON, DOWN, UP], [LISTEN]),
        ([UP, WON, LOST], [STOP, DEAF]),
        ([UP, WON, RESIGNED], [STOP, DEAF]),
        ([UP, WON, DOWN, LOST], [STOP]),
        ([UP, WON, LeaseWon(5)], [STOP, DEAF, StartLeading(5), MonitoringStarted(5)]),
        ([UP, WON, LOST, WON], [LEAD, LISTEN]),
        ([UP, RESIGNED, WON], []),
        ([UP, WON, WON], []),
        ([UP, WON, UP], []),
        ([UP, WON, Tick()], []),
        ([LOST], []),
        ([UP], []),
        ([Tick()], []),
        ([RESIGNED], []),
    ],
)
def test_what_follows_from_the_last_event(events: list[Input], last: list[Output]) -> None:
    """A leader without a connection receives no beats; a term that is won again without a loss ends the old one."""
    election, effects = Election(), list[Output]()
    for event in events:
        effects = election.handle(event, 0.0)
        election.check()
    assert effects == last
    assert election.deadline() is None
