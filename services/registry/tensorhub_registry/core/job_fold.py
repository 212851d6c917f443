"""The fold of one job's log, and the events that are still to be published: exactly one whole group per command.

Commands and events have one total order, and the fold decides the same events on every machine. Events are published
in the order of their commands, each against the sequence of the last event in the log. The log's last event therefore
tells every reader how far publication is, and a publisher that is not up to date is refused. A registry can be killed
between any two of its steps. The next registry folds from the beginning or from a snapshot, finds the published events
in the log, and goes on with the next event, also in the middle of a group.

The message types of this module are the inputs and outputs of `JobFold`.

Invariants:
- The events in the log are a prefix of all events that the fold has decided or will decide.
- Each event in the log is compared with the decided one, in all fields that both releases know
  (`release_agreement.py`). A difference stops the fold (`FoldMismatch`).
- At most one publication is in progress.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final, Self, cast

import msgspec

from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.snapshot import Due, Snapshot, Told
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.machine import Tick
from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.commands import AnyCommand, Unreadable
from tensorhub_common.protocol.log.entries import LogEntry
from tensorhub_common.protocol.log.events import AnyEvent, Event, kind_of
from tensorhub_registry.core.log_entries import CommandOrigin, FoldMismatch, origin_of, read_entry, subject_of
from tensorhub_registry.core.outcome_history import OutcomeHistory
from tensorhub_registry.core.release_agreement import agrees
from tensorhub_registry.core.trace_causes import TraceCause, TraceCauses


class PublicationStored(msgspec.Struct, frozen=True):
    """The first `count` events of the publication in progress are in the log; the last of them has this sequence."""

    count: int
    seq: int


class PublicationRefused(msgspec.Struct, frozen=True):
    """The publication in progress was refused: the log's last event is another one."""


class PublicationUnknown(msgspec.Struct, frozen=True):
    """It is unknown whether the publication in progress was stored."""


class LastEvent(msgspec.Struct, frozen=True):
    """The log's last event, looked up directly, although it has not been read in order yet.

    After it, up to `end`, no entry on an event's subject is an event. `entry` None: there is no event after those that
    were read in order.
    """

    entry: LogEntry | None
    end: int = 0


class CommandDecided(msgspec.Struct, frozen=True):
    """A command was folded. Its events may not be in the log yet."""

    events: tuple[AnyEvent, ...]


class OutcomeStored(msgspec.Struct, frozen=True):
    """A command's whole group is in the log."""

    events: tuple[AnyEvent, ...]
    origin: CommandOrigin | None
    causes: tuple[TraceCause, ...] = ()


class EntryIgnored(msgspec.Struct, frozen=True):
    """An entry on an event's subject is no event. Nothing was folded, and the log goes on after it."""

    seq: int
    subject: str


class OutOfOrder(msgspec.Struct, frozen=True):
    """The entry that was given is not the next one. Nothing was folded."""

    expected: int
    found: int


class Outgoing(msgspec.Struct, frozen=True):
    """One event on its way into the log."""

    event: AnyEvent
    subject: str
    body: bytes
    trace: Mapping[str, str]


class EventBatch(msgspec.Struct, frozen=True):
    """The next events, to be published in this order if the log's last event has the sequence `expected` (0: none).

    The others may be sent before the first is acknowledged. Each is stored only right after the one before it: after
    its id, and at the sequence that it has if no other process writes meanwhile, which for the first is `ahead`. The
    sequence alone would not do for a third event: with a command at `ahead`, the first event would be where the third
    one expects the second.
    """

    expected: int
    ahead: int
    events: tuple[Outgoing, ...]


Input = LogEntry | PublicationStored | PublicationRefused | PublicationUnknown | LastEvent | Tick
Output = CommandDecided | OutcomeStored | EntryIgnored | OutOfOrder


UNPUBLISHED_MAX: Final = 65_536
"""With this many events unpublished no further command is folded; at most one group comes on top."""

UNSEEN_MAX: Final = 8_192
"""Limit of events that are known to be in the log and wait to be read there and compared. Of others only the order is
checked."""

PUBLISH_BYTES_MAX: Final = 8 * 1024 * 1024
"""Limit of the bytes of one publication, unless it has a single event."""

Position = tuple[int, int]
"""(command, i): the place of an event in the order of all."""

START: Final[Position] = (0, 0)
NO_TRACE: Final[Mapping[str, str]] = {}


@dataclass(slots=True)
class _InProgress:
    """The publication that waits for its answer."""

    expected: int
    positions: tuple[Position, ...]


@dataclass(slots=True)
class JobFold:
    """One job: its catalog, and the events between the catalog and the log."""

    job: str
    unpublished_max: int = UNPUBLISHED_MAX
    unseen_max: int = UNSEEN_MAX
    catalog: Catalog = field(init=False)
    history: OutcomeHistory = field(init=False, default_factory=OutcomeHistory)
    seq: int = field(init=False, default=0)
    """The last entry that was folded."""
    time: float = field(init=False, default=0.0)
    """JetStream's time of that entry."""
    last_event_seq: int = field(init=False, default=0)
    """The last entry on an event's subject, as far as all of them are known."""
    _known: Position = field(init=False, default=START)
    """The position of that event."""
    _read: tuple[int, int, int] | None = field(init=False, default=None)
    """The last event that was read in the log's order, as (command, i, k); it may lie before `_known`."""
    _read_seq: int = field(init=False, default=0)
    """Its entry."""
    _unpublished: deque[AnyEvent] = field(init=False, default_factory=deque)
    """Decided, and not known to be in the log."""
    _unseen: deque[AnyEvent] = field(init=False)
    """Known to be in the log, and not yet read there."""
    _forgotten: Position = field(init=False, default=START)
    """The last event that is no longer among them and may still be unread."""
    _stored_part: list[AnyEvent] = field(init=False, default_factory=list)
    """The part of the first unfinished group that is in the log."""
    _origins: dict[int, CommandOrigin] = field(init=False, default_factory=dict)
    _causes: TraceCauses = field(init=False, default_factory=TraceCauses)
    _caused: dict[int, dict[int, TraceCause]] = field(init=False, default_factory=dict)
    """By command and number, of the events that are not known to be in the log."""
    _in_progress: _InProgress | None = field(init=False, default=None)
    _refused_at: int = field(init=False, default=-1)
    """Publication waits until the log's last event is known to lie behind this sequence."""

    def __post_init__(self) -> None:
        """Begin with an empty catalog."""
        self.catalog = Catalog(self.job)
        self._unseen = deque(maxlen=self.unseen_max)

    # ------------------------------------------------------------------------------------------- machine

    def handle(self, event: Input, now: float) -> list[Output]:  # noqa: ARG002 (the fold's time is JetStream's)
        """Take the log's next entry, or the result of a publication. Raises `FoldMismatch`."""
        if isinstance(event, PublicationStored):
            return self._acknowledged(event)
        if isinstance(event, PublicationRefused):
            return self._refused()
        if isinstance(event, PublicationUnknown):
            self._in_progress = None
            return []
        if isinstance(event, LastEvent):
            return self._take_last_event(event)
        if isinstance(event, Tick):
            return []
        return self._entry(event)

    def deadline(self) -> float | None:
        """Nothing here waits for time."""
        return None

    # ------------------------------------------------------------------------------------------- questions

    @property
    def is_full(self) -> bool:
        """Whether no command may be folded before more events are in the log."""
        return len(self._unpublished) >= self.unpublished_max

    @property
    def unpublished(self) -> int:
        """How many decided events are not known to be in the log."""
        return len(self._unpublished)

    @property
    def can_publish(self) -> bool:
        """Whether `to_publish` would return something."""
        return bool(self._unpublished) and self._in_progress is None and self.last_event_seq > self._refused_at

    def is_pending(self, seq: int) -> bool:
        """Tell whether the command at `seq` has no whole group in the log yet, or is not folded yet."""
        if seq > self.seq:
            return True
        return bool(self._unpublished) and self._unpublished[0].cmd <= seq <= self._unpublished[-1].cmd

    def to_publish(self, count_max: int) -> EventBatch | None:
        """Return the next events to publish, from now on in progress; None where there are none or one must wait."""
        if not self.can_publish:
            return None
        outgoing: list[Outgoing] = []
        size = 0
        for event in islice(self._unpublished, count_max):
            body = encode(event)
            size += len(body)
            if outgoing and size > PUBLISH_BYTES_MAX:
                break
            outgoing.append(Outgoing(event, subject_of(self.job, event), body, self._trace_of(event)))
        self._in_progress = _InProgress(self.last_event_seq, tuple(_at(each.event) for each in outgoing))
        ahead = max(self.seq, self.last_event_seq) + 1
        return EventBatch(self.last_event_seq, ahead, tuple(outgoing))

    def _trace_of(self, event: AnyEvent) -> Mapping[str, str]:
        cause = self._caused.get(event.cmd, {}).get(event.i)
        if cause is not None:
            return cause.headers
        origin = self._origins.get(event.cmd)
        return NO_TRACE if origin is None else origin.trace

    # ------------------------------------------------------------------------------------------- publication

    def _acknowledged(self, answer: PublicationStored) -> list[Output]:
        in_progress, self._in_progress = self._in_progress, None
        if in_progress is None or not 1 <= answer.count <= len(in_progress.positions):
            raise ValueError(f"{answer} answers nothing that was in progress")
        return self._learn(in_progress.positions[answer.count - 1], answer.seq)

    def _refused(self) -> list[Output]:
        in_progress, self._in_progress = self._in_progress, None
        if in_progress is None:
            raise ValueError("a publication was refused, and none was in progress")
        self._refused_at = in_progress.expected
        return []

    def _take_last_event(self, last: LastEvent) -> list[Output]:
        effects: list[Output] = []
        if last.entry is not None:
            event = read_entry(self.job, last.entry, self.catalog.level)
            if not isinstance(event, Event):
                raise FoldMismatch(f"entry {last.entry.seq} of job {self.job!r} was to be an event and is none")
            effects = self._learn(_at(event), last.entry.seq)
        self.last_event_seq = max(self.last_event_seq, last.end)
        return effects

    def _learn(self, position: Position, seq: int) -> list[Output]:
        """Note that the event at `position` is in the log, as entry `seq`, and so are all before it."""
        if position <= self._known:
            return []
        self._known, self.last_event_seq = position, max(self.last_event_seq, seq)
        return self._pass_known()

    def _pass_known(self) -> list[Output]:
        """Move the events that are known to be in the log over to those that are still to be read."""
        effects: list[Output] = []
        while self._unpublished and _at(self._unpublished[0]) <= self._known:
            event = self._unpublished.popleft()
            if len(self._unseen) == self._unseen.maxlen:
                self._forgotten = _at(self._unseen[0])
            self._unseen.append(event)
            self._add_stored(event, effects)
        return effects

    def _add_stored(self, event: AnyEvent, effects: list[Output]) -> None:
        self._stored_part.append(event)
        if event.i == event.k:
            group = tuple(self._stored_part)
            self._stored_part.clear()
            self.history.add(group)
            causes = tuple(self._caused.pop(event.cmd, {}).values())
            effects.append(OutcomeStored(group, self._origins.pop(event.cmd, None), causes))

    # ------------------------------------------------------------------------------------------- reading

    def _entry(self, entry: LogEntry) -> list[Output]:
        if entry.seq != self.seq + 1:
            return [OutOfOrder(self.seq + 1, entry.seq)]
        said = read_entry(self.job, entry, self.catalog.level)
        if said is None:
            effects = self._pass_over(entry)
        else:
            effects = self._event(entry, said) if isinstance(said, Event) else self._command(entry, said)
        self.seq, self.time = entry.seq, entry.time
        return effects

    def _pass_over(self, entry: LogEntry) -> list[Output]:
        """Go on after an entry that is no event. JetStream compares the next event's expectation with it.

        That is safe here alone, where all entries before it were read.
        """
        self._read_seq = entry.seq
        self.last_event_seq = max(self.last_event_seq, entry.seq)
        return [EntryIgnored(entry.seq, entry.subject)]

    def _command(self, entry: LogEntry, command: AnyCommand | Unreadable) -> list[Output]:
        if self.is_full:
            raise ValueError(f"{self.unpublished} events are unpublished: publish before folding entry {entry.seq}")
        group = cast("tuple[AnyEvent, ...]", apply(self.catalog, entry.seq, entry.time, command))
        origin = origin_of(entry.headers) if entry.headers else None
        if origin is not None:
            self._origins[entry.seq] = origin
        caused = self._causes.of(group, NO_TRACE if origin is None else origin.trace)
        if caused:
            self._caused[entry.seq] = caused
        self._unpublished.extend(group)
        effects: list[Output] = [CommandDecided(group)]
        if (entry.seq, 0) < self._known:
            effects += self._pass_known()
        return effects

    def _event(self, entry: LogEntry, event: AnyEvent) -> list[Output]:
        self._check_order(entry, event)
        effects: list[Output] = []
        at = _at(event)
        if self._unseen and _at(self._unseen[0]) <= at:
            self._compare(entry, event, self._unseen)
            self._unseen.popleft()
        elif at > self._known:
            self._compare(entry, event, self._unpublished)
            self._known, self.last_event_seq = at, max(self.last_event_seq, entry.seq)
            self._unpublished.popleft()
            self._add_stored(event, effects)
        self._read, self._read_seq = (event.cmd, event.i, event.k), entry.seq
        return effects

    def _compare(self, entry: LogEntry, event: AnyEvent, decided: deque[AnyEvent]) -> None:
        """Compare the stored event with the decided one."""
        if not decided:
            raise self._mismatch(entry, event, "nothing")
        if decided[0] != event and not agrees(decided[0], entry.data):
            raise self._mismatch(entry, event, str(decided[0]))

    def _check_order(self, entry: LogEntry, event: AnyEvent) -> None:
        """Check that the event follows the one before it, also where nothing is left to compare it with."""
        if not _follows(self._read, event) or event.cmd > self.catalog.seq or not 1 <= event.i <= event.k:
            before = "nothing" if self._read is None else "{}.{}/{}".format(*self._read)
            raise self._mismatch(entry, event, f"what follows {before}")

    def _mismatch(self, entry: LogEntry, event: AnyEvent, expected: str) -> FoldMismatch:
        said = f"{kind_of(event)} {event.cmd}.{event.i}/{event.k}"
        return FoldMismatch(
            f"entry {entry.seq} of job {self.job!r} says {said}, where this registry decided {expected:.300}: another "
            "version of the registry has published it, or another user may write events. Run one version of it, and "
            "look at NATS's permissions"
        )

    # ------------------------------------------------------------------------------------------- snapshots

    def snapshot(self) -> Snapshot | None:
        """Return the job as it is after the last entry, or None while this fold has dropped later events.

        The catalog in it is the fold's own: encode it before anything else is folded.
        """
        if self._forgotten > (START if self._read is None else self._read[:2]):
            return None
        due = tuple(self._due(event) for event in chain(self._unseen, self._unpublished))
        return Snapshot(self.seq, self.time, self.catalog, Told(self._read_seq, self._read, self._begun(), due))

    def _due(self, event: AnyEvent) -> Due:
        origin = self._origins.get(event.cmd)
        return Due(event) if origin is None else Due(event, origin.trace, origin.reply_to)

    def _begun(self) -> tuple[AnyEvent, ...]:
        """Return what was read of a group that was not read to its end."""
        if self._read is None or self._read[1] == self._read[2]:
            return ()
        cmd, i, _ = self._read
        whole = self.history.outcome(cmd)
        return tuple(self._stored_part if whole is None else whole)[:i]

    @classmethod
    def restored(cls, snapshot: Snapshot) -> Self:
        """Go on from a snapshot, with the entry after it."""
        fold, told = cls(snapshot.catalog.job), snapshot.told
        fold.catalog, fold.seq, fold.time = snapshot.catalog, snapshot.seq, snapshot.time
        fold.last_event_seq = fold._read_seq = told.last_event_seq
        fold._read = told.last_event
        fold._known = START if told.last_event is None else told.last_event[:2]
        fold._stored_part.extend(told.begun)
        for due in told.due:
            fold._unpublished.append(due.event)
            if due.trace or due.reply_to is not None:
                fold._origins[due.event.cmd] = CommandOrigin(due.trace, due.reply_to)
        fold.history.forgotten = snapshot.catalog.seq
        return fold

    def recall(self, entry: LogEntry) -> None:
        """Take an entry from before the snapshot, so that its outcome can be asked for."""
        said = read_entry(self.job, entry, self.catalog.level)
        if isinstance(said, Event):
            self.history.recall(said)

    # ------------------------------------------------------------------------------------------- invariants

    def check(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        for queue in (self._unpublished, self._unseen):
            _check_consecutive(queue)
        if self._unpublished:
            assert _at(self._unpublished[0]) > self._known, "an event that is in the log would be published again"
            assert self._unpublished[-1].cmd <= self.catalog.seq
        if self._unseen:
            assert _at(self._unseen[-1]) <= self._known
            assert self._read is None or self._read[:2] < _at(self._unseen[0])
        assert self.catalog.seq <= self.seq
        if self._stored_part:
            assert self._unpublished, "a group that is half in the log has lost its other half"
            assert self._unpublished[0].cmd == self._stored_part[0].cmd
        assert self._in_progress is None or self._in_progress.expected <= self.last_event_seq
        self.history.check()


def _follows(last: tuple[int, int, int] | None, event: AnyEvent) -> bool:
    """Tell whether the event may come right after the one at (command, i, k)."""
    if last is not None and last[1] < last[2]:
        return (event.cmd, event.i, event.k) == (last[0], last[1] + 1, last[2])
    return event.i == 1 and event.cmd > (0 if last is None else last[0])


def _at(event: Event) -> Position:
    return (event.cmd, event.i)


def _check_consecutive(events: Iterable[AnyEvent]) -> None:
    last: AnyEvent | None = None
    for event in events:
        if last is not None and last.i < last.k:
            assert (event.cmd, event.i, event.k) == (last.cmd, last.i + 1, last.k)
        elif last is not None:
            assert event.i == 1
            assert event.cmd > last.cmd
        last = event
