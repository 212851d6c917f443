"""What one job's commands came to: plain numbers for the metrics, counted as they are folded."""

from collections import Counter

from tensorhub_common.protocol.log.any_event import AnyEvent
from tensorhub_common.protocol.log.events import kind_of
from tensorhub_common.protocol.log.hub import CommandRejected


class CommandCounts:
    """The commands of one job that came while this registry was leading: a log that is read again counts nothing."""

    def __init__(self) -> None:
        self.commands: Counter[tuple[str, str]] = Counter()
        """How many, by (outcome, error); the error is "" where the command was not refused."""
        self.events = 0
        self.passed_over = 0
        """Entries on events' subjects that are none, also of a log that is read again."""

    def add(self, events: tuple[AnyEvent, ...]) -> None:
        """Count a command by the group of events that it led to."""
        first = events[0]
        error = first.error if isinstance(first, CommandRejected) else ""
        self.commands[kind_of(first), error] += 1
        self.events += len(events)
