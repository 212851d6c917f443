"""From a round's decision to a replica that holds the version: the leases of all shards, the start, shards filled.

Always true: nothing is drained or overwritten before every lease of every shard is granted; no round starts that
would take the last counting copy of a retained version away; and a replica holds the version with all of its shards.
"""

from tensorhub_common.catalog import cache_replicas, retention
from tensorhub_common.catalog.availability import Out, refresh, shift, vacate
from tensorhub_common.catalog.handlers import rounds
from tensorhub_common.catalog.lookup import open_round, owned_shard
from tensorhub_common.catalog.refusal import Refused
from tensorhub_common.catalog.state import Catalog, Model, Replica, Round, Shard, known_root, root_key
from tensorhub_common.catalog.transitions import ROUND_MOVES, RoundMove, RoundState, ShardMove, ShardState, move
from tensorhub_common.catalog.validation import checked_digest
from tensorhub_common.catalog.version_selection import is_overtaken
from tensorhub_common.errors import BadCommand, IntegrityError, RetentionFull
from tensorhub_common.protocol.log.commands import Filled, Granted
from tensorhub_common.protocol.log.rounds import RoundHeld, RoundStarted
from tensorhub_common.protocol.log.shards import ShardFilled


def granted(catalog: Catalog, command: Granted, out: Out) -> None:
    """Count one shard's leases; when all shards have theirs, let them drain and write."""
    model, replica, shard = owned_shard(catalog, command)
    current = open_round(replica, command.round, shard)
    if current.state is not RoundState.DECIDED or current.attempt != command.attempt or current.version is None:
        raise Refused(BadCommand, f"attempt {command.attempt} of round {current.number} is over")
    current.granted.add(shard.index)
    if len(current.granted | current.filled) < replica.shards:
        out.append(rounds.joined(model, replica, shard.index, current.granted | current.filled))
        return
    begin(catalog, model, replica, current, out)


def begin(catalog: Catalog, model: Model, replica: Replica, current: Round, out: Out) -> None:
    """All leases are granted: start, unless a newer version stands or the last copy of a retained one stands here.

    Or all is filled beside what stands here, and the swap was held back: nothing holds it any more.
    """
    if current.state is RoundState.STARTED:
        assert current.version is not None
        rounds.complete(catalog, model, replica, current, current.version, out)
    elif is_overtaken(model, current):
        current.superseded += 1
        rounds.again(catalog, model, replica, current, out)
    elif retention.must_stay(catalog, model, replica):
        _hold_back(catalog, model, replica, current, out)
    else:
        _start(model, replica, current, out)


def _hold_back(catalog: Catalog, model: Model, replica: Replica, current: Round, out: Out) -> None:
    """The round would take the last counting copy of a retained version away: it waits for another, or fails."""
    version = replica.version
    assert version is not None
    placed: Out = []
    coming = retention.is_coming(catalog, model, replica, version)
    if not coming and not cache_replicas.place(catalog, model, model.versions[version], placed):
        why = retention.no_room(model, replica, version)
        rounds.end(model, replica, RoundMove.FAILED, out, RetentionFull.__name__, why)
        return
    current.held = True
    out.append(RoundHeld(model=model.name, replica=replica.name, round=current.number, version=version))
    out.extend(placed)


def _start(model: Model, replica: Replica, current: Round, out: Out) -> None:
    """Let all shards drain and write."""
    assert current.version is not None
    current.held = False
    current.state = move(ROUND_MOVES, current.state, RoundMove.STARTED)
    overwritten = set(replica.members) - current.filled - set(current.staged)
    current.started = current.started or bool(overwritten)
    out.append(
        RoundStarted(
            model=model.name,
            replica=replica.name,
            round=current.number,
            attempt=current.attempt,
            version=current.version,
            stands=None if overwritten else True,
        )
    )
    for index in sorted(overwritten):
        member = replica.members[index]
        vacate(member)
        if member.state is ShardState.EMPTY:
            shift(member, ShardMove.STARTED)
    refresh(model, replica, "replaced", out)


def filled(catalog: Catalog, command: Filled, out: Out) -> None:
    """Count one shard as ready; when all are, the replica holds the version."""
    model, replica, shard = owned_shard(catalog, command)
    current = open_round(replica, command.round, shard)
    at_once = _is_at_once(replica, current, shard, command)
    if (current.state is not RoundState.STARTED and not at_once) or command.version != current.version:
        raise Refused(BadCommand, f"round {current.number} is not filling version {command.version}")
    staged = shard.index in current.staged and shard.index not in current.filled
    if shard.state is not ShardState.FILLING and not staged:
        raise Refused(BadCommand, f"shard {shard.index} of round {current.number} is {shard.state}, not filling")
    record = model.versions.get(command.version)
    checked_digest("root", command.root)
    known = known_root(model, replica, shard, command.version)
    if record is None or (known is not None and known != command.root):
        raise Refused(
            IntegrityError,
            f"shard {shard.index} of {model.name}/{replica.name} has root {command.root}, and the log keeps {known}",
        )
    if at_once:
        current.state = move(ROUND_MOVES, current.state, RoundMove.STARTED)
    record.roots.setdefault(root_key(replica.shards, shard.index, shard.layout), command.root)
    if staged:
        current.staged[shard.index] = command.root
    else:
        shift(shard, ShardMove.FILLED, command.version, command.root)
    current.filled.add(shard.index)
    if at_once:
        # The round ends here, so that the replica is ready says all of it.
        rounds.complete(catalog, model, replica, current, command.version, out)
        return
    out.append(
        ShardFilled(
            model=model.name,
            replica=replica.name,
            shard=shard.index,
            version=command.version,
            round=current.number,
            root=command.root,
        )
    )
    if len(current.filled) < replica.shards:
        return
    if command.waits and replica.version != command.version and retention.must_stay(catalog, model, replica):
        # When the round began another copy counted, and a crash has taken it meanwhile.
        _hold_back(catalog, model, replica, current, out)
    else:
        rounds.complete(catalog, model, replica, current, command.version, out)


def _is_at_once(replica: Replica, current: Round, shard: Shard, command: Filled) -> bool:
    """Tell whether the round begins and ends with this command: nothing was to be overwritten for it."""
    if command.attempt is None or current.state is not RoundState.DECIDED or command.attempt != current.attempt:
        return False
    others = set(range(replica.shards)) - {shard.index}
    return replica.mapped and shard.index in current.staged and current.filled == others
