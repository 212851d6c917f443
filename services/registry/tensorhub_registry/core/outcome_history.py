"""The outcomes of the last commands, so that `ask.outcome` and `ask.story` are answered without reading the log. Pure.

It has only whole groups that are in the log, and a bounded number; the log itself has those of older commands.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import lt
from typing import Final

from tensorhub_common.protocol.log.events import AnyEvent
from tensorhub_common.protocol.queries import OUTCOMES_KEPT_MAX

STORY_EVENTS_MAX: Final = 20_000
"""Limit of the job's last events that a story is made of; to go through them takes some ten milliseconds."""


@dataclass(slots=True)
class OutcomeHistory:
    """The last outcomes by the sequence of their command, and the last events in their order."""

    outcomes_max: int = OUTCOMES_KEPT_MAX
    forgotten: int = 0
    """The outcomes of commands up to this sequence are no longer here."""
    _outcomes: dict[int, tuple[AnyEvent, ...]] = field(default_factory=dict)
    _order: deque[int] = field(default_factory=deque)
    _events: deque[AnyEvent] = field(default_factory=lambda: deque(maxlen=STORY_EVENTS_MAX))
    _recalled: list[AnyEvent] = field(default_factory=list)
    """A group from before the snapshot, as far as it was read again."""

    def add(self, group: tuple[AnyEvent, ...]) -> None:
        """Keep the outcome of the next command."""
        if len(self._order) >= self.outcomes_max:
            self.forgotten = self._order.popleft()
            del self._outcomes[self.forgotten]
        seq = group[0].cmd
        self._outcomes[seq] = group
        self._order.append(seq)
        self._events.extend(group)

    def recall(self, event: AnyEvent) -> None:
        """Take an event from before the first `add`, in the log's order; the first group may lack its beginning."""
        if event.i == 1:
            self._recalled.clear()
        self._recalled.append(event)
        if len(self._recalled) == event.i == event.k:
            if not self._order:
                self.forgotten = event.cmd - 1
            self.add(tuple(self._recalled))

    def outcome(self, seq: int) -> tuple[AnyEvent, ...] | None:
        """Return the group of the command at `seq`, if it is here."""
        return self._outcomes.get(seq)

    def events(self) -> Iterator[AnyEvent]:
        """Yield the last events, oldest first. Nothing may be added meanwhile."""
        return iter(self._events)

    def check(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        order = list(self._order)
        assert list(self._outcomes) == order
        assert len(order) <= self.outcomes_max
        assert all(map(lt, order, order[1:]))
