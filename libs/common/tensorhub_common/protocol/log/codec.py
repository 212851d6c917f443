"""Encodes and decodes the entries of a log: JSON.

The meaning of a command depends on the level of its job (`levels.py`), so that every release that
folds this level reads the same. An event has been decided already: of it, a field that this release does not know is
passed over.
"""

from functools import cache
from typing import Final, get_args

import msgspec

from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.log.commands import OUTSIDE_VERBS, VERSION_MAX, AnyCommand, Command, Unreadable
from tensorhub_common.protocol.log.events import AnyEvent, Event
from tensorhub_common.protocol.log.levels import COMMAND_FIELDS_SINCE, NEWEST_LEVEL, VERBS_SINCE, Level

COMMAND_BYTES_MAX: Final = 256 * 1024
"""A command is small; what is larger is not even parsed."""


class _Outline(msgspec.Struct, frozen=True):
    """What every event has, of whatever version, and no answer of JetStream's own."""

    kind: str
    cmd: int
    i: int
    k: int


_outline: Final[msgspec.json.Decoder[_Outline]] = msgspec.json.Decoder(_Outline)
_commands: Final[msgspec.json.Decoder[AnyCommand]] = msgspec.json.Decoder(AnyCommand)
_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_events: Final[msgspec.json.Decoder[AnyEvent]] = msgspec.json.Decoder(AnyEvent)
_encoder: Final = msgspec.json.Encoder()


def encode(message: Command | Event) -> bytes:
    """Return the JSON form."""
    return _encoder.encode(message)


def decode_event(data: bytes) -> AnyEvent:
    """Read an event. Raises one of `MALFORMED` on anything else."""
    return _events.decode(data)


def read_event(data: bytes) -> AnyEvent | None:
    """Read the body of an entry on an event's subject: None for what was never meant to be an event.

    Raises one of `MALFORMED` for an event that this version does not know.
    """
    try:
        _outline.decode(data)
    except MALFORMED:
        return None
    return _events.decode(data)


def decode_command(verb: str, process: str | None, data: bytes, level: int) -> AnyCommand | Unreadable:
    """Read what came on `cmd.<verb>[.<process>]`, in the log of a job at this level.

    What is no command becomes `Unreadable` with the reason. Only the process of a subject's process token may publish
    on it (NATS permissions see to it), so a body that names another sender is refused here, and so is a hub verb
    on a subject without one.
    """
    if len(data) > COMMAND_BYTES_MAX:
        return Unreadable(verb, f"the body has {len(data)} bytes; a command has at most {COMMAND_BYTES_MAX}")
    try:
        command = _read_command(process, data, level)
    except MALFORMED as why:
        return Unreadable(verb, f"the body is no command: {why}"[:500])
    said = str(command.__struct_config__.tag)
    if said != verb:
        return Unreadable(verb, f"the subject says {verb!r} and the body says {said!r}; they must agree")
    if process is None:
        if verb not in OUTSIDE_VERBS:
            return Unreadable(verb, f"{verb!r} is the hub's own; from outside only {sorted(OUTSIDE_VERBS)} are taken")
        if command.by is not None:
            return Unreadable(verb, "a command that names its sender belongs on that sender's own subject")
    elif command.by is None or command.by.process != process:
        return Unreadable(verb, f"the body must name a sender of {process!r}, as the subject does")
    elif level >= Level.TOLERANT and not (_is_counted(command.by.incarnation) and _is_counted(command.by.n)):
        return Unreadable(verb, f"the sender's numbers are out of range: take 0 to {VERSION_MAX}")
    return command


def _is_counted(number: int) -> bool:
    """Tell whether the number is valid in an event and in a snapshot, which repeat the sender."""
    return 0 <= number <= VERSION_MAX


def _read_command(process: str | None, data: bytes, level: int) -> AnyCommand:
    """Read what this level knows of a command. Raises one of `MALFORMED`."""
    if level >= NEWEST_LEVEL:
        try:
            return _commands.decode(data)
        except msgspec.ValidationError:
            if process is None:
                raise
    members = _members.decode(data)
    verb = msgspec.json.decode(members.get("verb", msgspec.Raw(b"null")), type=str)
    known = _fields_at(level).get(verb)
    if known is None:
        raise msgspec.ValidationError(f"there is no verb {verb!r:.80} at level {level}")
    unknown = sorted(members.keys() - known)
    if not unknown:
        return _commands.decode(data)
    if process is None or level < Level.TOLERANT:
        raise msgspec.ValidationError(f"{verb!r} has no field {unknown[0]!r:.80} at level {level}")
    return _commands.decode(msgspec.json.encode({name: members[name] for name in members if name in known}))


@cache
def _fields_at(level: int) -> dict[str, frozenset[str]]:
    """Return the verbs that there are at a level, and the fields of each."""
    verbs = {str(kind.__struct_config__.tag): kind for kind in get_args(AnyCommand)}
    return {
        verb: frozenset(
            name
            for name in ("verb", *kind.__struct_encode_fields__)
            if COMMAND_FIELDS_SINCE.get((verb, name), 0) <= level
        )
        for verb, kind in verbs.items()
        if VERBS_SINCE.get(verb, 0) <= level
    }
