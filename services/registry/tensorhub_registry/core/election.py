"""Which registry speaks: whoever holds the lease, and from when on its word may cost an agent its place.

Every change of state stands in `LEADER_MOVES`. Being the leader is not enough to expire agents: the leader must also be
connected, since without a connection it hears no beats. `Listening` and `Deaf` tell the liveness core when that begins
and ends; `Lead` and `StandDown` tell the jobs when to publish.

Terms rise from leader to leader as long as the store of the lease is not lost. Always true: a term that is led again
was nobody else's in between; `Listening` is said only while leading and connected.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from tensorhub_common.catalog.transitions import move
from tensorhub_common.machine import Tick


class LeaderState(StrEnum):
    """What this registry is."""

    STANDBY = "standby"
    LEADING = "leading"
    RESIGNED = "resigned"


class LeaderMove(StrEnum):
    """What happens to a registry."""

    WON = "won"
    LOST = "lost"
    RESIGNED = "resigned"


LEADER_MOVES: Final = {
    (LeaderState.STANDBY, LeaderMove.WON): LeaderState.LEADING,
    (LeaderState.STANDBY, LeaderMove.LOST): LeaderState.STANDBY,
    (LeaderState.STANDBY, LeaderMove.RESIGNED): LeaderState.RESIGNED,
    (LeaderState.LEADING, LeaderMove.WON): LeaderState.LEADING,
    (LeaderState.LEADING, LeaderMove.LOST): LeaderState.STANDBY,
    (LeaderState.LEADING, LeaderMove.RESIGNED): LeaderState.RESIGNED,
    (LeaderState.RESIGNED, LeaderMove.WON): LeaderState.RESIGNED,
    (LeaderState.RESIGNED, LeaderMove.LOST): LeaderState.RESIGNED,
    (LeaderState.RESIGNED, LeaderMove.RESIGNED): LeaderState.RESIGNED,
}


class Won(msgspec.Struct, frozen=True):
    """The lease is ours, for this term; or it was taken anew before its loss was noticed."""

    term: int


class Lost(msgspec.Struct, frozen=True):
    """The lease is not ours, or not for certain."""


class Resigned(msgspec.Struct, frozen=True):
    """The process ends."""


class Connected(msgspec.Struct, frozen=True):
    """The connection to NATS stands."""


class Disconnected(msgspec.Struct, frozen=True):
    """The connection to NATS is gone."""


class Lead(msgspec.Struct, frozen=True):
    """Publish outcomes and answer questions."""

    term: int


class StandDown(msgspec.Struct, frozen=True):
    """Publish nothing more and keep silent."""

    term: int


class Listening(msgspec.Struct, frozen=True):
    """From now on, agents that stay silent for a whole window are lost."""

    term: int


class Deaf(msgspec.Struct, frozen=True):
    """Agents may beat unheard: expire none."""


Input = Won | Lost | Resigned | Connected | Disconnected | Tick
Output = Lead | StandDown | Listening | Deaf


@dataclass(slots=True)
class Leader:
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
            case Won(term):
                self._won(term, effects)
            case Lost():
                self._leave(LeaderMove.LOST, effects)
            case Resigned():
                self._leave(LeaderMove.RESIGNED, effects)
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
            self._leave(LeaderMove.LOST, effects)
            self._listen(effects)
        self.state = move(LEADER_MOVES, self.state, LeaderMove.WON)
        if self.leads:
            self.term = term
            effects.append(Lead(term))

    def _leave(self, how: LeaderMove, effects: list[Output]) -> None:
        led = self.leads
        self.state = move(LEADER_MOVES, self.state, how)
        if led:
            effects.append(StandDown(self.term))

    def _listen(self, effects: list[Output]) -> None:
        hears = self.connected and self.leads
        if hears and not self.listening:
            effects.append(Listening(self.term))
        elif self.listening and not hears:
            effects.append(Deaf())
        self.listening = hears
