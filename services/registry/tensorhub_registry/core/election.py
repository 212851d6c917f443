"""Which registry leads: the one that holds the lease; and from when on it may expire agents. Pure.

`LEADER_TRANSITIONS` has every change of state. A leader must also be connected to expire agents, since without a
connection it receives no beats. `MonitoringStarted` and `MonitoringStopped` are inputs of the liveness core;
`StartLeading` and `StopLeading` say when the jobs publish. Terms rise from leader to leader as long as the store of the
lease is not lost.

Invariants:
- A term that a registry leads again was led by no other one in between.
- `MonitoringStarted` is returned only while leading and connected.
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
    """There is a connection to NATS."""


class Disconnected(msgspec.Struct, frozen=True):
    """The connection to NATS is gone."""


class StartLeading(msgspec.Struct, frozen=True):
    """Publish outcomes and answer questions."""

    term: int


class StopLeading(msgspec.Struct, frozen=True):
    """Publish and answer nothing more."""

    term: int


Input = LeaseWon | LeaseLost | Resigned | Connected | Disconnected | Tick
Output = StartLeading | StopLeading | MonitoringStarted | MonitoringStopped


@dataclass(slots=True)
class Election:
    """The state of this registry in the election; `tensorhub_common.jetstream.leader_lease` has the lease itself."""

    state: LeaderState = LeaderState.STANDBY
    term: int = 0
    """The term that is led, or was led last."""
    connected: bool = False
    is_monitoring: bool = False

    def handle(self, event: Input, now: float) -> list[Output]:  # noqa: ARG002 (the lease has its own clock)
        """Take one event and return what changes."""
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
        self._update_monitoring(effects)
        return effects

    def deadline(self) -> float | None:
        """Nothing here waits for time."""
        return None

    def check(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        assert self.is_monitoring == (self.connected and self.leads)
        assert not self.leads or self.term > 0

    @property
    def leads(self) -> bool:
        """Whether this registry leads."""
        return self.state is LeaderState.LEADING

    def _won(self, term: int, effects: list[Output]) -> None:
        if self.leads and term == self.term:
            return
        if self.leads:
            # The lease ran out and was won again between two looks: the old term is over.
            self._leave(LeaderTransition.LOST, effects)
            self._update_monitoring(effects)
        self.state = transition(LEADER_TRANSITIONS, self.state, LeaderTransition.WON)
        if self.leads:
            self.term = term
            effects.append(StartLeading(term))

    def _leave(self, how: LeaderTransition, effects: list[Output]) -> None:
        led = self.leads
        self.state = transition(LEADER_TRANSITIONS, self.state, how)
        if led:
            effects.append(StopLeading(self.term))

    def _update_monitoring(self, effects: list[Output]) -> None:
        monitors = self.connected and self.leads
        if monitors and not self.is_monitoring:
            effects.append(MonitoringStarted(self.term))
        elif self.is_monitoring and not monitors:
            effects.append(MonitoringStopped())
        self.is_monitoring = monitors
