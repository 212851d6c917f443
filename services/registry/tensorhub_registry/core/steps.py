"""What goes into a job's fold and what comes out of it: the inputs and outputs of `outcomes.JobFold`."""

from collections.abc import Mapping

import msgspec

from tensorhub_common.machine import Tick
from tensorhub_common.protocol.log.any_event import AnyEvent
from tensorhub_registry.core.log_entries import LogEntry, Origin
from tensorhub_registry.core.trace_causes import Cause


class Acknowledged(msgspec.Struct, frozen=True):
    """The first `count` events of the publication under way stand in the log; the last of them has this sequence."""

    count: int
    seq: int


class Refused(msgspec.Struct, frozen=True):
    """The publication under way was refused: the log's last event is another one."""


class Unanswered(msgspec.Struct, frozen=True):
    """Nobody knows what became of the publication under way."""


class LastEvent(msgspec.Struct, frozen=True):
    """The log's last event, asked for directly: what stands there although it has not been read in order yet.

    Behind it, up to `end`, stands nothing on events' subjects but what is none. `entry` None: there is no event behind
    what was read in order.
    """

    entry: LogEntry | None
    end: int = 0


class Decided(msgspec.Struct, frozen=True):
    """A command was folded. Its events may not stand in the log yet."""

    events: tuple[AnyEvent, ...]


class Stands(msgspec.Struct, frozen=True):
    """A command's whole group stands in the log."""

    events: tuple[AnyEvent, ...]
    origin: Origin | None
    causes: tuple[Cause, ...] = ()


class PassedOver(msgspec.Struct, frozen=True):
    """What stands on an event's subject is none; nothing was folded, and the log goes on behind it."""

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


class Publication(msgspec.Struct, frozen=True):
    """The next events, to be published in this order if the log's last event has the sequence `expected` (0: none).

    The others may be sent before the first is acknowledged, each to be stored right behind the one before it and
    nowhere else: behind its id, and at the sequence that it has if nobody else writes meanwhile, which for the first is
    `ahead`. The sequence alone would not do for a third one: with a command at `ahead`, the first event would stand
    where the third one expects the second.
    """

    expected: int
    ahead: int
    events: tuple[Outgoing, ...]


Input = LogEntry | Acknowledged | Refused | Unanswered | LastEvent | Tick
Output = Decided | Stands | PassedOver | OutOfOrder
