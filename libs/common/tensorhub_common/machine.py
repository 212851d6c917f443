"""The shape of every decision core: events and time in, effects out, no I/O.

Production and the simulator are two drivers of the same machines. A driver's duties: give time that never goes back;
carry out the effects of one call in their order, and before the next call's; call `handle` with a `Tick` at
`deadline()`.
"""

from typing import Protocol, TypeVar

import msgspec

Event = TypeVar("Event", contravariant=True)
Effect = TypeVar("Effect")


class Tick(msgspec.Struct, frozen=True):
    """Nothing happened but time."""


class Machine(Protocol[Event, Effect]):
    """A sans-I/O state machine."""

    def handle(self, event: Event | Tick, now: float) -> list[Effect]:
        """Take one event at time `now` (seconds, monotonic) and say what to do."""
        ...

    def deadline(self) -> float | None:
        """Say when `handle(Tick())` is wanted next, or None."""
        ...

    def check(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        ...
