"""One job's catalog as this planner has it: the log's commands folded, entry by entry, up to `position`.

Commands alone decide what the catalog is; events stand in the same log, are what every fold says anyway, and count here
for their numbers only. What is no command is folded as `Unreadable`, exactly as the registry does, so that both have
folded the same commands at the same number.
"""

from dataclasses import dataclass, field
from typing import Final, Protocol

from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.wire.codec import decode_command
from tensorhub_common.wire.commands import AnyCommand, Unreadable
from tensorhub_common.wire.events import Event

_KIND: Final = 3
"""Which token of a subject says "cmd" or "event": tensorhub, v1 and the job stand before it."""


class LogEntry(Protocol):
    """One entry as it is read from a job's log. `time` is JetStream's, in seconds since the epoch."""

    @property
    def seq(self) -> int:
        """Its number in the log."""
        ...

    @property
    def time(self) -> float:
        """When JetStream stored it."""
        ...

    @property
    def subject(self) -> str:
        """What it was published on."""
        ...

    @property
    def data(self) -> bytes:
        """Its body."""
        ...


@dataclass(slots=True)
class Fold:
    """A job's catalog after every entry up to number `position`."""

    catalog: Catalog
    position: int = field(default=0)

    def take(self, entry: LogEntry) -> tuple[Event, ...]:
        """Fold the next entry; return what happened by it, nothing where it is no command."""
        if entry.seq != self.position + 1:
            raise ValueError(f"entry {entry.seq} of job {self.catalog.job!r} can't follow on {self.position}")
        command = _command(entry)
        events = () if command is None else apply(self.catalog, entry.seq, entry.time, command)
        self.position = entry.seq
        return events


def _command(entry: LogEntry) -> AnyCommand | Unreadable | None:
    tokens = entry.subject.split(".")
    if tokens[_KIND] != "cmd":
        return None
    match tokens[_KIND + 1 :]:
        case [verb]:
            return decode_command(verb, None, entry.data)
        case [verb, process]:
            return decode_command(verb, process, entry.data)
        case rest:
            return Unreadable(".".join(rest)[:64], "a verb and at most one sender may stand in the subject")
