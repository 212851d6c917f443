"""A job's whole state as bytes and back: what a fold begins with that does not begin at the log's first entry.

A snapshot at `seq` follows from the entries up to `seq` alone, on every host. It holds the catalog, with the lanes'
table by which repeats are recognised, and how far the log has the commands' outcomes: so a command may be trimmed
before its outcome is appended, and none is appended twice.

It is generic: what the state grows comes along, by the annotations of its dataclasses. Always true: `decode(encode(x))`
equals `x`; a field that an older release did not write has its default; a snapshot that names a field which this
release does not know is refused, since to leave it out would be to fold differently. It names the fields that count at
the job's level: those of a higher one have their defaults, so a release that does not know them goes on from it.
"""

import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Final, get_args, get_origin, get_type_hints

import msgspec

from tensorhub_common.catalog.state import Catalog
from tensorhub_common.errors import TensorHubError
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.log.events import AnyEvent
from tensorhub_common.protocol.log.levels import STATE_FIELDS_SINCE, LevelUnknown, check_level

FORMAT: Final = 1
"""Raised when the value of a field means something else than before."""

Fields = dict[str, tuple[str, ...]]


class SnapshotUnreadable(TensorHubError):
    """These bytes are no snapshot that this release can go on from."""


class SnapshotNewer(SnapshotUnreadable):
    """A newer release wrote this snapshot, and of what it says this one does not know all."""


@dataclass(frozen=True, slots=True)
class Due:
    """An event that was decided and not in the log yet, and what its command's headers asked of it."""

    event: AnyEvent
    trace: Mapping[str, str] = field(default_factory=dict)
    reply_to: str | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """How far the log had the outcomes."""

    last_event_seq: int = 0
    """The sequence of the last event, 0: there was none."""
    last_event: tuple[int, int, int] | None = None
    """Its command, and which of how many it was."""
    begun: tuple[AnyEvent, ...] = ()
    """The events of the last group in the log, if the group was not whole."""
    due: tuple[Due, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A job after every entry of its log up to number `seq`, which JetStream stored at `time`."""

    seq: int
    time: float
    catalog: Catalog
    told: Told = Told()


class _Envelope(msgspec.Struct, frozen=True):
    format: int
    fields: Fields
    state: msgspec.Raw


def encode(snapshot: Snapshot) -> bytes:
    """Return the snapshot as bytes."""
    state = msgspec.Raw(msgspec.msgpack.encode(snapshot))
    return msgspec.msgpack.encode(_Envelope(FORMAT, fields_at(snapshot.catalog.level), state))


def decode(job: str, body: bytes) -> Snapshot:
    """Read a snapshot of this job. Raises `SnapshotUnreadable`."""
    try:
        envelope = msgspec.msgpack.decode(body, type=_Envelope)
        _check_known(job, envelope)
        snapshot = msgspec.msgpack.decode(envelope.state, type=Snapshot)
    except MALFORMED as why:
        raise SnapshotUnreadable(f"a snapshot of job {job!r} can't be read: {why}"[:500]) from None
    if snapshot.catalog.job != job:
        raise SnapshotUnreadable(
            f"a snapshot of job {snapshot.catalog.job!r:.80} is stored where job {job!r} keeps its own"
        )
    _check_level(job, snapshot.catalog.level)
    return snapshot


def fields_at(level: int) -> Fields:
    """Return what counts of a job's state at a level."""
    return {
        kind: tuple(name for name in names if STATE_FIELDS_SINCE.get((kind, name), 0) <= level)
        for kind, names in FIELDS.items()
    }


def _check_known(job: str, envelope: _Envelope) -> None:
    unknown = [
        f"{name}.{each}"
        for name, written in envelope.fields.items()
        for each in written
        if each not in FIELDS.get(name, ())
    ]
    if envelope.format > FORMAT or unknown:
        what = f"format {envelope.format}" if envelope.format > FORMAT else ", ".join(unknown)[:300]
        raise SnapshotNewer(
            f"a snapshot of job {job!r} was written by a newer release (this one does not know {what}): run that one"
        )


def _check_level(job: str, level: int) -> None:
    try:
        check_level(job, level)
    except LevelUnknown as why:
        raise SnapshotNewer(str(why)) from None


def fields_of(root: type) -> Fields:
    """Return the fields of a dataclass and of all dataclasses in it, by the classes' names."""
    found: Fields = {}
    waiting: list[Any] = [root]
    while waiting:
        kind = waiting.pop()
        if is_dataclass(kind) and isinstance(kind, type):
            if kind.__name__ not in found:
                found[kind.__name__] = tuple(each.name for each in fields(kind))
                waiting += get_type_hints(kind).values()
        elif get_origin(kind) is not None or isinstance(kind, types.UnionType):
            waiting += get_args(kind)
    return found


FIELDS: Final[Fields] = fields_of(Snapshot)
"""What this release knows of a job's state."""
