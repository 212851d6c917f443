"""What an entry of a job's log says, by its subject and bytes: a command, an unreadable command, or an event. Pure.

Invariant: all processes that fold a log read the same commands in it, so each has folded the same at the same number.
"""

from collections.abc import Mapping
from typing import Final, Protocol

from tensorhub_common.protocol.log.codec import decode_command
from tensorhub_common.protocol.log.commands import AnyCommand, Unreadable

_TOKENS_BEFORE: Final = 4
"""tensorhub, v1, the job, and "cmd" or "event"."""


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
        """The subject on which it was published."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Its headers."""
        ...

    @property
    def data(self) -> bytes:
        """Its body."""
        ...


def command_in(entry: LogEntry, level: int) -> AnyCommand | Unreadable | None:
    """Read the command of an entry in the log of a job at this level. None: the entry is on an event's subject."""
    tokens = entry.subject.split(".")
    if tokens[_TOKENS_BEFORE - 1] == "event" and len(tokens) > _TOKENS_BEFORE:
        return None
    match tokens[_TOKENS_BEFORE:]:
        case [verb]:
            return decode_command(verb, None, entry.data, level)
        case [verb, process]:
            return decode_command(verb, process, entry.data, level)
        case rest:
            verb = ".".join(rest)
            why = f"the subject ends in {verb!r:.200}: it may have a verb and at most one sender there"
            return Unreadable(verb[:64], why)
