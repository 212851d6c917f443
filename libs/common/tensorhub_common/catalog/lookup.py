"""Finding what a command is about, or refusing it: nothing here changes the catalog."""

from tensorhub_common.catalog.refusal import Refused
from tensorhub_common.catalog.state import AgentRecord, Catalog, Model, Replica, Round, Shard
from tensorhub_common.catalog.transitions import AgentState
from tensorhub_common.errors import BadCommand, InvalidName, StaleSender, VersionUnavailable
from tensorhub_common.protocol.log.commands import Sender, ShardCommand
from tensorhub_common.protocol.names import check_name


def checked_name(what: str, text: str) -> str:
    """Return a name that users may give; refuse any other."""
    try:
        return check_name(what, text)
    except InvalidName as why:
        raise Refused(InvalidName, str(why)) from None


def live_agent(catalog: Catalog, by: Sender | None) -> AgentRecord:
    """Return the sender's agent if this incarnation of it is the live one."""
    if by is None:
        raise Refused(BadCommand, "this command must name its sender")
    agent = catalog.agents.get(by.process)
    if agent is None:
        raise Refused(StaleSender, f"agent {by.process!r} has not joined job {catalog.job!r}: send 'join' first")
    if agent.state is not AgentState.LIVE or agent.incarnation != by.incarnation:
        raise Refused(
            StaleSender,
            f"incarnation {by.incarnation} of agent {agent.name!r} is over (the log knows {agent.incarnation}, "
            f"{agent.state}): join again with a higher one",
        )
    return agent


def the_model(catalog: Catalog, name: str) -> Model:
    """Return a model that some replica was registered for."""
    model = catalog.models.get(name)
    if model is None:
        raise Refused(
            VersionUnavailable, f"model {name!r} is unknown in job {catalog.job!r}: register a replica of it first"
        )
    return model


def the_replica(catalog: Catalog, model_name: str, name: str) -> tuple[Model, Replica]:
    """Return a replica that has at least one shard."""
    model = the_model(catalog, model_name)
    replica = model.replicas.get(name)
    if replica is None:
        raise Refused(BadCommand, f"replica {name!r} of model {model_name!r} is unknown: register its shards first")
    return model, replica


def owned_shard(catalog: Catalog, command: ShardCommand) -> tuple[Model, Replica, Shard]:
    """Return the shard that the command is about, if the sender owns it."""
    agent = live_agent(catalog, command.by)
    model, replica = the_replica(catalog, command.model, command.replica)
    shard = replica.members.get(command.shard)
    if shard is None or shard.agent != agent.name:
        why = "is not registered" if shard is None else f"stands on agent {shard.agent!r}"
        raise Refused(
            BadCommand,
            f"shard {command.shard} of {command.model}/{command.replica} {why}: {agent.name!r} can't speak for it",
        )
    return model, replica, shard


def open_round(replica: Replica, number: int | None, shard: Shard) -> Round:
    """Return the replica's round if it is this one (None: whichever) and the shard is in it."""
    current = replica.round
    if current is None or (number is not None and current.number != number):
        raise Refused(BadCommand, f"round {number} of replica {replica.name!r} is over")
    if shard.index not in current.wants:
        raise Refused(BadCommand, f"shard {shard.index} is not in round {current.number} of replica {replica.name!r}")
    return current
