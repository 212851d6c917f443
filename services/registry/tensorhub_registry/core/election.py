"""Which registry speaks: whoever holds the lease, and from when on its word may cost an agent its place.

Every change of state stands in `LEADER_TRANSITIONS`. Being the leader is not enough to expire agents: the leader must
also be connected, since without a connection it hears no beats. `MonitoringStarted` and `MonitoringStopped` tell the
liveness core when that begins and ends; `StartLeading` and `StopLeading` tell the jobs when to publish.

Terms rise from leader to leader as long as the store of the lease is not lost. Always true: a term that is led again
was nobody else's in between; `MonitoringStarted` is said only while leading and connected.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from tensorhub_common.catalog.transitions import transition
from tensorhub_common.machine import Tick
from tensorhub_registry.core.liveness import MonitoringStarted, MonitoringStopped


class LeaderState(StrEnum):
    """What this registry is."""

    STANDBY = "standby"
    LEADING = "leading"
    RESIGNED = "resigned"


class LeaderTransition(StrEnum):
    """What happens to a registry."""

    WON = "won"
    LOST = "lost"
    RESIGNED = "resigned"


LEADER_TRANSITIONS: Final = {
    (LeaderState.STANDBY, LeaderTransition.WON): LeaderState.LEADING,
    (LeaderState.STANDBY, LeaderTransition.LOST): LeaderState.STANDBY,
    (LeaderState.STANDBY, LeaderTransition.RESIGNED): LeaderState.RESIGNED,
    (LeaderState.LEADING, LeaderTransition.WON): LeaderState.LEADING,
    (LeaderState.LEADING, LeaderTransition.LOST): LeaderState.STANDBY,
    (LeaderState.LEADING, LeaderTransition.RESIGNED): LeaderState.RESIGNED,
    (LeaderState.RESIGNED, LeaderTransition.WON): LeaderState.RESIGNED,
    (LeaderState.RESIGNED, LeaderTransition.LOST): LeaderState.RESIGNED,
    (LeaderState.RESIGNED, LeaderTransition.RESIGNED): LeaderState.RESIGNED,
}


class LeaseWon(msgspec.Struct, frozen=True):
    """The lease is ours, for this term; or it was taken anew before its loss was noticed."""

    term: int


class LeaseLost(msgspec.Struct, frozen=True):
    """The lease is not ours, or not for certain."""


class Resigned(msgspec.Struct, frozen=True):
    """The process ends."""


class Connected(msgspec.Struct, frozen=True):
    """The connection to NATS stands."""


class Disconnected(msgspec.Struct, frozen=True):
    """The connection to NATS is gone."""


class StartLeading(msgspec.Struct, frozen=True):
    """Publish outcomes and answer questions."""

    term: int


class StopLeading(msgspec.Struct, frozen=True):
    """Publish nothing more and keep silent."""

    term: int


Input = LeaseWon | LeaseLost | Resigned | Connected | Disconnected | Tick
Output = StartLeading | StopLeading | MonitoringStarted | MonitoringStopped


@dataclass(slots=True)
class Election:
    """What this registry is in the election; the lease itself is kept elsewhere."""

    state: LeaderState = LeaderState.STANDBY
    term: int = 0
    """The term that is led, or was led last."""
    connected: bool = False
    listening: bool = False

    def handle(self, event: Input, now: float) -> list[Output]:  # noqa: ARG002 (the lease has its own clock)
        """Take one event and say what changes."""
        effects: list[Output] = []
        match event:
            case LeaseWon(term):
                self._won(term, effects)
            case LeaseLost():
                self._leave(LeaderTransition.LOST, effects)
            case Resigned():
                self._leave(LeaderTransition.RESIGNED, effects)
            case Connected():
                self.connected = True
            case Disconnected():
                self.connected = False
            case Tick():
                pass
        self._listen(effects)
        return effects

    def deadline(self) -> float | None:
        """Nothing here waits for time."""
        return None

    def check(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        assert self.listening == (self.connected and self.leads)
        assert not self.leads or self.term > 0

    @property
    def leads(self) -> bool:
        """Whether this registry speaks."""
        return self.state is LeaderState.LEADING

    def _won(self, term: int, effects: list[Output]) -> None:
        if self.leads and term == self.term:
            return
        if self.leads:
            # The lease ran out and was won again between two looks: what was said under the old term is over.
            self._leave(LeaderTransition.LOST, effects)
            self._listen(effects)
        self.state = transition(LEADER_TRANSITIONS, self.state, LeaderTransition.WON)
        if self.leads:
            self.term = term
            effects.append(StartLeading(term))

    def _leave(self, how: LeaderTransition, effects: list[Output]) -> None:
        led = self.leads
        self.state = transition(LEADER_TRANSITIONS, self.state, how)
        if led:
            effects.append(StopLeading(self.term))

    def _listen(self, effects: list[Output]) -> None:
        hears = self.connected and self.leads
        if hears and not self.listening:
            effects.append(MonitoringStarted(self.term))
        elif self.listening and not hears:
            effects.append(MonitoringStopped())
        self.listening = hears
