"""What a log entry is, by its subject and bytes: a command, an event, or a command that can't be read. Pure.

Every user with the job's credentials may write on the command subjects, so every entry there becomes something that the
fold can answer. Only registries write on event subjects. An event there that this release would not write means that
another fold has published.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from tensorhub_common.errors import TensorHubError
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.log.codec import read_event
from tensorhub_common.protocol.log.commands import AnyCommand, Unreadable
from tensorhub_common.protocol.log.entries import LogEntry, command_in
from tensorhub_common.protocol.log.events import HUB_MODEL, AnyEvent, Event, kind_of, model_of

TRACE_HEADERS: Final = frozenset({"traceparent", "tracestate"})
"""W3C trace context, which goes from a command over to its events."""
REPLY_TO_HEADER: Final = "tensorhub-reply-to"
"""Names the inbox that wants the outcome; header names are compared in lower case."""
HEADER_CHARS_MAX: Final = 512
"""A longer value of these headers counts as absent."""


class FoldMismatch(TensorHubError):
    """The log has an event that this fold did not decide: another fold, or another version of it, has published."""


class CommandOrigin(msgspec.Struct, frozen=True):
    """What a command's headers ask of its outcome: the trace that it belongs to, and an inbox that wants it.

    `foreign_reply_to` is no inbox, so nothing is sent there.
    """

    trace: Mapping[str, str]
    reply_to: str | None = None
    foreign_reply_to: str | None = None


def origin_of(headers: Mapping[str, str]) -> CommandOrigin | None:
    """Return what the headers ask, or None where they ask nothing."""
    trace: dict[str, str] = {}
    reply_to = foreign_reply_to = None
    for name, value in headers.items():
        lower = name.lower()
        if lower in TRACE_HEADERS:
            if len(value) <= HEADER_CHARS_MAX and value.isascii() and value.isprintable():
                trace[lower] = value
        elif lower == REPLY_TO_HEADER and subjects.is_inbox(value):
            reply_to = value
        elif lower == REPLY_TO_HEADER:
            foreign_reply_to = value[:HEADER_CHARS_MAX]
    if not trace and reply_to is None and foreign_reply_to is None:
        return None
    return CommandOrigin(trace, reply_to, foreign_reply_to)


def read_entry(job: str, entry: LogEntry, level: int) -> AnyCommand | Unreadable | AnyEvent | None:
    """Read an entry of this job's log, which is folded up to it at this level.

    None: it is on an event's subject, and no event.

    Raises `FoldMismatch` for an event that can't be one of this job's.
    """
    command = command_in(entry, level)
    return _read_event(job, entry) if command is None else command


def _read_event(job: str, entry: LogEntry) -> AnyEvent | None:
    try:
        event = read_event(entry.data)
    except MALFORMED as why:
        raise FoldMismatch(f"{_where(job, entry)} is no event that this version knows: {why}"[:500]) from None
    if event is not None and subject_of(job, event) != entry.subject:
        raise FoldMismatch(f"{_where(job, entry)} is on {entry.subject}, where {kind_of(event)} does not belong")
    return event


def _where(job: str, entry: LogEntry) -> str:
    return f"entry {entry.seq} of job {job!r}"


def subject_of(job: str, event: Event) -> str:
    """Return the subject of an event. A rejection may name a model that can't be part of one: it goes to the hub's."""
    model = model_of(event)
    token = subjects.HUB if model == HUB_MODEL or model.startswith("_") else model
    return f"{subjects.PREFIX}.{job}.event.{token}.{kind_of(event)}"
