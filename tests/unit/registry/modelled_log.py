"""A job's log as JetStream keeps it, in memory: what the registry's cores read and write in tests."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.protocol.log.codec import encode, read_event
from tensorhub_common.protocol.log.commands import Command, Unreadable
from tensorhub_common.protocol.log.entries import LogEntry
from tensorhub_common.protocol.log.events import AnyEvent, Event
from tensorhub_registry.core.job_fold import LastEvent, Outgoing
from tensorhub_registry.core.log_entries import read_entry

JOB = "run-7"


class Entry(msgspec.Struct, frozen=True):
    seq: int
    time: float
    subject: str
    data: bytes
    headers: Mapping[str, str] = {}


class ModelledLog:
    """One total order, and a refusal for whoever publishes an event against another last event."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.last_event_seq = 0
        self.first = 1
        self._later_s = 0.0

    def entries_later(self, seconds: float) -> None:
        """Let this time pass before the next entry."""
        self._later_s += seconds

    def trim(self, first: int) -> None:
        """Forget what stands before; `entries` keeps it for the test to compare with."""
        self.first = max(self.first, first)

    def append(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> Entry:
        seq = len(self.entries) + 1
        entry = Entry(seq, 1_000.0 + seq / 8 + self._later_s, subject, data, headers or {})
        self.entries.append(entry)
        return entry

    def say(self, command: Command, headers: Mapping[str, str] | None = None) -> Entry:
        """Append a command as its sender would."""
        verb = str(command.__struct_config__.tag)
        process = "" if command.by is None else f".{command.by.process}"
        return self.append(f"tensorhub.v1.{JOB}.cmd.{verb}{process}", encode(command), headers)

    def relay(self, data: bytes) -> Entry:
        """Store what JetStream answered, on an event's subject."""
        entry = self.append(f"tensorhub.v1.{JOB}.event.m.version.published", data)
        self.last_event_seq = entry.seq
        return entry

    def publish(self, expected: int, events: Sequence[Outgoing], behind: bytes | None = None) -> int | None:
        """Store all of the events and return the last one's sequence, or None: the last event is another one.

        `behind`: the log's last entry must be this one.
        """
        if behind is not None and (not self.entries or self.entries[-1].data != behind):
            return None
        # The server compares with what it still has.
        if expected != (self.last_event_seq if self.last_event_seq >= self.first else 0):
            return None
        for outgoing in events:
            self.last_event_seq = self.append(outgoing.subject, outgoing.body, outgoing.trace).seq
        return self.last_event_seq

    def after(self, seq: int) -> Iterator[Entry]:
        assert seq + 1 >= self.first, f"entry {seq + 1} is gone: the log begins at {self.first}"
        return iter(self.entries[seq:])

    def events(self) -> list[AnyEvent]:
        """Return the events that stand in it."""
        found = [read_event(entry.data) for entry in self.entries if ".event." in entry.subject]
        return [event for event in found if event is not None]

    def last_event(self, folded: int) -> LastEvent | None:
        """Look up the last event, as a registry does that has folded so far."""
        if not self.last_event_seq:
            return None
        behind = self.entries[folded : self.last_event_seq]
        events = [entry for entry in behind if ".event." in entry.subject and read_event(entry.data) is not None]
        last = self.entries[self.last_event_seq - 1]
        if read_event(last.data) is not None:
            return LastEvent(last)
        return LastEvent(events[-1] if events else None, self.last_event_seq)


def decided(entries: Sequence[LogEntry], job: str = JOB) -> list[Event]:
    """Return all the events that the commands among these entries must have, by a fold of nothing but commands."""
    catalog = Catalog(job)
    events: list[Event] = []
    for entry in entries:
        said = read_entry(job, entry, catalog.level)
        if isinstance(said, Command | Unreadable):
            events += apply(catalog, entry.seq, entry.time, said)
    return events
