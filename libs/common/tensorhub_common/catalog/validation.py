"""Checks of commands before the fold applies them: values, senders, and the objects that they name.

Every value that the catalog stores or repeats in an event has passed these checks. A registry must be able to write
every event that the fold makes of a command, from any sender. Names therefore fit into subjects. Digests are short,
since one event names those of all shards. Numbers are within the range that every JSON reader keeps exact.

A handler refuses a command by raising `CommandRefused`, before it has changed anything. The lookup functions find the
object that a command names, or refuse the command.

Invariant: no function of this module changes the catalog.
"""

from typing import Final

from tensorhub_common.catalog.state import LANES_MAX, AgentRecord, Catalog, Model, Replica, Round, Shard
from tensorhub_common.catalog.transitions import AgentState
from tensorhub_common.errors import BadCommand, InvalidName, StaleSender, TensorHubError, VersionUnavailable
from tensorhub_common.protocol.log.commands import Sender, ShardCommand
from tensorhub_common.protocol.subjects import check_name, is_name


class CommandRefused(Exception):
    """The command changes nothing; its sender gets this error."""

    def __init__(self, error: type[TensorHubError], message: str) -> None:
        """Take the class that the caller shall see, and its sentence."""
        super().__init__(message)
        self.error = error.__name__
        self.message = message


NUMBER_MAX: Final = 2**53 - 1
"""The largest number that every JSON reader keeps exact."""

_LANE_CHARS_MAX: Final = len(str(LANES_MAX))


def is_registry_sender(by: Sender) -> bool:
    """Tell whether the hub itself speaks (a registry): its names begin with `_`, which no agent's may."""
    return by.lane.startswith("_")


def is_sender(by: Sender) -> bool:
    """Tell whether the sender's word can be remembered: else its commands would count, and their repeats again."""
    process, slash, lane = by.lane.partition("/")
    named = is_name(process) and (not slash or (_is_lane(lane) and not is_registry_sender(by)))
    return named and 0 <= by.incarnation <= NUMBER_MAX and 0 <= by.n <= NUMBER_MAX


def check_sender(by: Sender) -> None:
    """Refuse a sender that is none."""
    if not is_sender(by):
        raise CommandRefused(
            BadCommand,
            f"({by.lane!r:.80}, {by.incarnation}, {by.n}) is no sender: take a process's name, or with '/' its lane "
            f"0 to {LANES_MAX - 1}, and numbers from 0 to {NUMBER_MAX}",
        )


def _is_lane(text: str) -> bool:
    short = 0 < len(text) <= _LANE_CHARS_MAX and text.isascii() and text.isdecimal()
    return short and text == str(int(text)) and int(text) < LANES_MAX


def checked_digest(what: str, text: str) -> str:
    """Return a digest (or its placeholder): 1 to 64 letters, digits, `_` or `-`."""
    if not is_name(text):
        raise CommandRefused(BadCommand, f"{what} {text!r:.80} is no digest: send the hexadecimal digits of it")
    return text


def checked_number(what: str, number: int) -> int:
    """Return a number that can be counted, kept and written."""
    if not 0 <= number <= NUMBER_MAX:
        raise CommandRefused(BadCommand, f"{what} {number} is out of range: take 0 to {NUMBER_MAX}")
    return number


def checked_name(what: str, text: str) -> str:
    """Return a name that users may give; refuse any other."""
    try:
        return check_name(what, text)
    except InvalidName as why:
        raise CommandRefused(InvalidName, str(why)) from None


def live_agent(catalog: Catalog, by: Sender | None) -> AgentRecord:
    """Return the sender's agent if this incarnation of it is the live one."""
    if by is None:
        raise CommandRefused(BadCommand, "this command must name its sender")
    agent = catalog.agents.get(by.process)
    if agent is None:
        raise CommandRefused(StaleSender, f"agent {by.process!r} has not joined job {catalog.job!r}: send 'join' first")
    if agent.state is not AgentState.LIVE or agent.incarnation != by.incarnation:
        raise CommandRefused(
            StaleSender,
            f"incarnation {by.incarnation} of agent {agent.name!r} is over (the log knows {agent.incarnation}, "
            f"{agent.state}): join again with a higher one",
        )
    return agent


def the_model(catalog: Catalog, name: str) -> Model:
    """Return a model that some replica was registered for."""
    model = catalog.models.get(name)
    if model is None:
        raise CommandRefused(
            VersionUnavailable, f"model {name!r} is unknown in job {catalog.job!r}: register a replica of it first"
        )
    return model


def the_replica(catalog: Catalog, model_name: str, name: str) -> tuple[Model, Replica]:
    """Return a replica that has at least one shard."""
    model = the_model(catalog, model_name)
    replica = model.replicas.get(name)
    if replica is None:
        raise CommandRefused(
            BadCommand, f"replica {name!r} of model {model_name!r} is unknown: register its shards first"
        )
    return model, replica


def owned_shard(catalog: Catalog, command: ShardCommand) -> tuple[Model, Replica, Shard]:
    """Return the shard that the command is about, if the sender owns it."""
    agent = live_agent(catalog, command.by)
    model, replica = the_replica(catalog, command.model, command.replica)
    shard = replica.members.get(command.shard)
    if shard is None or shard.agent != agent.name:
        why = "is not registered" if shard is None else f"stands on agent {shard.agent!r}"
        raise CommandRefused(
            BadCommand,
            f"shard {command.shard} of {command.model}/{command.replica} {why}: {agent.name!r} can't speak for it",
        )
    return model, replica, shard


def open_round(replica: Replica, number: int | None, shard: Shard) -> Round:
    """Return the replica's round if it is this one (None: whichever) and the shard is in it."""
    current = replica.round
    if current is None or (number is not None and current.number != number):
        raise CommandRefused(BadCommand, f"round {number} of replica {replica.name!r} is over")
    if shard.index not in current.wants:
        raise CommandRefused(
            BadCommand, f"shard {shard.index} is not in round {current.number} of replica {replica.name!r}"
        )
    return current
