"""A newer version comes while a replica reads an older one: its shards judge, and one of them may turn the round."""

from tensorhub_common.catalog.availability import Out
from tensorhub_common.catalog.handlers import rounds
from tensorhub_common.catalog.lookup import open_round, owned_shard
from tensorhub_common.catalog.refusal import Refused
from tensorhub_common.catalog.state import Catalog, Model
from tensorhub_common.catalog.transitions import RoundState
from tensorhub_common.catalog.version_selection import is_overtaken
from tensorhub_common.errors import BadCommand
from tensorhub_common.protocol.log.commands import Drop
from tensorhub_common.protocol.log.rounds import RoundOvertaken


def overtake(model: Model, version: int, out: Out) -> None:
    """A newer version was published: tell those that are reading an older one, so that they judge whether to go on."""
    for replica in model.replicas.values():
        current = replica.round
        if current is None or current.state is not RoundState.STARTED or not is_overtaken(model, current):
            continue
        out.append(
            RoundOvertaken(
                model=model.name,
                replica=replica.name,
                round=current.number,
                attempt=current.attempt,
                version=version,
            )
        )


def drop(catalog: Catalog, command: Drop, out: Out) -> None:
    """Read the newer version instead of the one that is being read, on one shard's judgement."""
    model, replica, shard = owned_shard(catalog, command)
    current = open_round(replica, command.round, shard)
    if current.state is not RoundState.STARTED or current.attempt != command.attempt:
        raise Refused(BadCommand, f"attempt {command.attempt} of round {current.number} is over")
    if not is_overtaken(model, current):
        raise Refused(BadCommand, f"round {current.number} reads to its end: nothing newer may be taken up instead")
    current.superseded += 1
    rounds.again(catalog, model, replica, current, out)
