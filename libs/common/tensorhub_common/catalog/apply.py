"""The fold: one command and JetStream's time of it in, one group of events out.

The same on every machine. Exactly one group per command: a repeat (same lane, incarnation and n) is answered with what
it was answered before, an older one is refused, and a refused command changes nothing but the memory of its refusal.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from tensorhub_common.catalog import reconcile
from tensorhub_common.catalog.handlers import admin, holding, membership, publishing, rounds
from tensorhub_common.catalog.state import HUB_LANES_MAX, Catalog, Remembered
from tensorhub_common.catalog.validation import CommandRefused, check_sender, is_registry_sender, is_sender
from tensorhub_common.errors import BadCommand, JobGone, StaleSender, gone
from tensorhub_common.protocol.log.commands import (
    AnyCommand,
    Sender,
    Unreadable,
)
from tensorhub_common.protocol.log.events import HUB_MODEL, CommandRejected, CommandRepeated, Event, kind_of
from tensorhub_common.protocol.log.levels import VERBS_SINCE
from tensorhub_common.protocol.subjects import is_name

_HANDLERS: Final[Mapping[type, Callable[[Catalog, Any, list[Event]], None]]] = {
    **publishing.HANDLERS,
    **rounds.HANDLERS,
    **membership.HANDLERS,
    **admin.HANDLERS,
    **holding.HANDLERS,
}

MESSAGE_CHARS_MAX: Final = 2000
"""A refusal's sentence is cut here, so that no command can make an event larger than a NATS message."""


def apply(catalog: Catalog, seq: int, time: float, command: AnyCommand | Unreadable) -> tuple[Event, ...]:
    """Fold the command stored as entry `seq` at `time` (seconds) and return its numbered events, at least one."""
    if seq <= catalog.seq:
        raise ValueError(f"command {seq} was folded before: the catalog is at {catalog.seq}")
    catalog.seq, catalog.time = seq, time
    command = _known_at(catalog.level, command)
    by = None if isinstance(command, Unreadable) else command.by
    try:
        out = _decide(catalog, command)
    except CommandRefused as no:
        out = [_rejection(command, no)]
    events = _numbered(out, seq, time, by)
    if by is not None:
        _remember(catalog, by, events[0])
    return events


def _known_at(level: int, command: AnyCommand | Unreadable) -> AnyCommand | Unreadable:
    """Return the command as folders of this level take it: one that came with a later level is none."""
    if isinstance(command, Unreadable):
        return command
    verb = str(command.__struct_config__.tag)
    if VERBS_SINCE.get(verb, 0) <= level:
        return command
    return Unreadable(verb, f"the body is no command: there is no verb {verb!r} at level {level}")


def _decide(catalog: Catalog, command: AnyCommand | Unreadable) -> list[Event]:
    """Answer what is no command or no news, and hand everything else to its handler."""
    if isinstance(command, Unreadable):
        raise CommandRefused(BadCommand, command.reason)
    if command.by is not None:
        check_sender(command.by)
        known = _repeated(catalog, command.by, command)
        if known is not None:
            return [known]
    if catalog.deleted:
        raise CommandRefused(JobGone, str(gone(catalog.job)))
    out: list[Event] = []
    _HANDLERS[type(command)](catalog, command, out)
    reconcile.reconcile(catalog, command, out)
    rounds.note_turns(catalog, out)
    return out


def _repeated(catalog: Catalog, by: Sender, command: AnyCommand) -> CommandRepeated | None:
    """Return the answer to a repeat, or None for a new command. Refuses one that is older than the lane's last."""
    last = catalog.lanes.get(by.lane)
    if last is None or (by.incarnation, by.n) > (last.incarnation, last.n):
        return None
    if (by.incarnation, by.n) < (last.incarnation, last.n):
        said = f"({last.incarnation}, {last.n})"
        raise CommandRefused(
            StaleSender if by.incarnation < last.incarnation else BadCommand,
            f"lane {by.lane!r} has said {said} already, so ({by.incarnation}, {by.n}) comes too late",
        )
    return CommandRepeated(
        of=last.seq, outcome=last.outcome, error=last.error, message=last.message, model=_model_token(command)
    )


def _remember(catalog: Catalog, by: Sender, outcome: Event) -> None:
    """Keep the lane's last outcome. An older word or a repeat never takes its place."""
    last = catalog.lanes.get(by.lane)
    if not is_sender(by) or not _has_room(catalog, by):
        return
    if last is not None and (by.incarnation, by.n) <= (last.incarnation, last.n):
        return
    error = outcome.error if isinstance(outcome, CommandRejected) else None
    message = outcome.message if isinstance(outcome, CommandRejected) else None
    catalog.lanes[by.lane] = Remembered(by.incarnation, by.n, outcome.cmd, kind_of(outcome), error, message)


def _has_room(catalog: Catalog, by: Sender) -> bool:
    """Keep the table bounded: lanes of live incarnations, and a few of the hub's own."""
    if is_registry_sender(by):
        return by.lane in catalog.lanes or sum(lane.startswith("_") for lane in catalog.lanes) < HUB_LANES_MAX
    agent = catalog.agents.get(by.process)
    return agent is not None and agent.incarnation == by.incarnation


def _rejection(command: AnyCommand | Unreadable, no: CommandRefused) -> CommandRejected:
    verb = command.verb if isinstance(command, Unreadable) else str(command.__struct_config__.tag)
    return CommandRejected(
        verb=verb[:64],
        error=no.error,
        message=no.message[:MESSAGE_CHARS_MAX],
        model=HUB_MODEL if isinstance(command, Unreadable) else _model_token(command),
    )


def _model_token(command: AnyCommand) -> str:
    """Return the model for the event's subject; a name that is not valid in a subject is the hub's matter."""
    model = getattr(command, "model", None)
    return model if isinstance(model, str) and is_name(model) and not model.startswith("_") else HUB_MODEL


def _numbered(events: list[Event], seq: int, time: float, by: Sender | None) -> tuple[Event, ...]:
    return tuple(
        msgspec.structs.replace(event, cmd=seq, i=number, k=len(events), time=time, by=by)
        for number, event in enumerate(events, start=1)
    )
