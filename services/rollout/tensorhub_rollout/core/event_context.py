"""The event that a leader takes in: when it came, and what is to be done for it. The parts of a leader share it."""

from dataclasses import dataclass, field

from tensorhub_rollout.core.leader_events import LeaderEffect


@dataclass(slots=True)
class EventContext:
    """The event of now."""

    now: float
    """In seconds."""
    effects: list[LeaderEffect] = field(default_factory=list)
    """In the order in which they are to be done."""

    def taken(self) -> list[LeaderEffect]:
        """Return what is to be done for this event; the next one begins with nothing."""
        effects, self.effects = self.effects, []
        return effects
