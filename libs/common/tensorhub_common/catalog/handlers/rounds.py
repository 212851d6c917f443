"""Rounds: one answer for all shards of a replica (TensorHub paper, model-parallel consistency).

Every shard joins with what it wants; when the last has joined the fold decides once for all of them. Each shard asking
for "latest" by itself is the bug that this prevents. What the replica does about the decision is in `filling.py`.
"""

from collections.abc import Container

from tensorhub_common.catalog.availability import IN_ORDER, Out, refresh, shift
from tensorhub_common.catalog.lookup import open_round, owned_shard
from tensorhub_common.catalog.refusal import Refused
from tensorhub_common.catalog.state import (
    ATTEMPTS_MAX,
    Catalog,
    Model,
    Replica,
    Round,
    holds,
    is_retired,
    known_root,
    newest,
)
from tensorhub_common.catalog.transitions import (
    ROUND_MOVES,
    RoundMove,
    RoundState,
    ShardMove,
    ShardState,
    VersionState,
    move,
)
from tensorhub_common.catalog.version_selection import Fail, Settled, Wait, decide
from tensorhub_common.errors import (
    BadCommand,
    ReplicaConflict,
    RetentionFull,
    RoundTimeout,
    VersionConflict,
    VersionUnavailable,
    from_code,
)
from tensorhub_common.protocol.log.commands import VERSION_MAX, GiveUp, Replan, Settle, Want
from tensorhub_common.protocol.log.levels import Level
from tensorhub_common.protocol.log.replicas import ReplicaReady
from tensorhub_common.protocol.log.rounds import (
    RoundDecided,
    RoundFailed,
    RoundJoined,
    RoundReopened,
    RoundSettled,
    RoundWithdrawn,
)


def want(catalog: Catalog, command: Want, out: Out) -> None:
    """Let a shard join its replica's round, and decide when it was the last."""
    model, replica, shard = owned_shard(catalog, command)
    where = f"shard {shard.index} of {model.name}/{replica.name}"
    if isinstance(command.want, int) and not 0 <= command.want <= VERSION_MAX:
        raise Refused(VersionUnavailable, f"version {command.want} can't exist: versions are 0 to {VERSION_MAX}")
    if shard.index in replica.offers:
        raise Refused(ReplicaConflict, f"{where} is being published: wait until that call has ended")
    if shard.state not in (ShardState.EMPTY, ShardState.READY):
        raise Refused(ReplicaConflict, f"{where} is {shard.state}: wait until that has ended")
    current = replica.round
    if current is not None and (current.state is not RoundState.JOINING or shard.index in current.wants):
        raise Refused(ReplicaConflict, f"{where} is in round {current.number} already: wait for its end")
    if replica.cache not in (None, command.want):
        raise Refused(BadCommand, f"{where} is a copy of version {replica.cache}, and takes no other")
    if shard.leaving:
        raise Refused(ReplicaConflict, f"{where} is being unpublished: wait until that call has ended")
    if current is None:
        keeps = catalog.level >= Level.NEVER_OLDER
        current = replica.round = Round(
            number=catalog.seq, supersede=command.supersede, began_with=replica.version if keeps else None
        )
        model.waiting[replica.name] = None
    current.state = move(ROUND_MOVES, current.state, RoundMove.JOINED)
    current.supersede = current.supersede and command.supersede
    current.wants[shard.index] = command.want
    current.patient[shard.index] = command.patient
    if command.staged:
        current.staged[shard.index] = None
    out.append(joined(model, replica, shard.index, current.wants))
    if _try_decide(model, replica, current, out):
        wake(catalog, model, out)


def _held(model: Model, replica: Replica, current: Round) -> int | None:
    """Return than what anything must be newer: what the replica holds.

    One that was overwritten may have again what it held when the round began, and nothing older. What was retired does
    not count: from there `newer` leads back.
    """
    began_with = current.began_with
    if replica.version is None and began_with is not None:
        return None if is_retired(model, began_with) else began_with - 1
    return None if is_retired(model, replica.version) else replica.version


def wake(catalog: Catalog, model: Model, out: Out) -> None:
    """Decide every round that waits for a version, in the order in which they began to wait.

    A replica that holds the version already is ready at once, and may make available what another one waits for: so
    all that still wait are looked at once more, until none of them gets any further.
    """
    if catalog.level < Level.WAKING_ONCE:
        _wake_again(model, out)
        return
    is_looking = True
    while is_looking:
        is_looking = False
        for name in list(model.waiting):
            is_looking = _is_ready_at_once(model, name, out) or is_looking


def _is_ready_at_once(model: Model, name: str, out: Out) -> bool:
    replica = model.replicas[name]
    return replica.round is not None and _try_decide(model, replica, replica.round, out)


def _wake_again(model: Model, out: Out) -> None:
    """Wake as it was done below `Level.WAKING_ONCE`: behind each replica that is ready at once the walk begins anew.

    Then each walk that was left goes on, and decides a round anew that a later one has decided. The walks are a list,
    and no call in a call: a model has more replicas than Python has stack.
    """
    walks = [iter(list(model.waiting))]
    while walks:
        if any(_is_ready_at_once(model, name, out) for name in walks[-1]):
            walks.append(iter(list(model.waiting)))
        else:
            walks.pop()


def _try_decide(model: Model, replica: Replica, current: Round, out: Out) -> bool:
    """Decide the round if it can be decided. True: the replica is ready with that, and others may go on: `wake`."""
    complete = len(current.wants) == replica.shards
    patient = current.started or all(current.patient.values())
    decision = decide(model, current.wants, patient, _held(model, replica, current))
    if isinstance(decision, Fail):
        # Two clashing numbers fail at once; a number that is gone fails once all have joined.
        if complete or decision.error is VersionConflict:
            end(model, replica, RoundMove.FAILED, out, decision.error.__name__, decision.message)
    elif not complete or isinstance(decision, Wait):
        pass
    elif isinstance(decision, Settled):
        end(model, replica, RoundMove.SETTLED, out)
    else:
        return _decided(model, replica, current, decision, out)
    return False


def _decided(model: Model, replica: Replica, current: Round, version: int, out: Out) -> bool:
    """Decide the round. True: the replica holds the version with all its shards, so it is ready, and `wake` is due."""
    current.state = move(ROUND_MOVES, current.state, RoundMove.DECIDED)
    current.attempt += 1
    current.version = version
    current.held = False
    current.granted.clear()
    current.staged = dict.fromkeys(current.staged)
    current.filled = {index for index in range(replica.shards) if holds(model, replica, index, version)}
    model.waiting.pop(replica.name, None)
    if len(current.filled) == replica.shards:
        _end_well(model, replica, current, version, out)
        return True
    out.append(
        RoundDecided(
            model=model.name,
            replica=replica.name,
            round=current.number,
            attempt=current.attempt,
            version=version,
            roots=tuple(known_root(model, replica, replica.members[index], version) for index in range(replica.shards)),
            held=tuple(sorted(current.filled)),
        )
    )
    return False


def note_turns(catalog: Catalog, out: Out) -> None:
    """Keep which command has decided a round, as its agents hear it: their turns come from that."""
    for event in out:
        if isinstance(event, RoundDecided):
            current = catalog.models[event.model].replicas[event.replica].round
            if current is not None and current.number == event.round:
                current.decided = catalog.seq


def complete(catalog: Catalog, model: Model, replica: Replica, current: Round, version: int, out: Out) -> None:
    """End the round well, and let those go on who waited for that."""
    _end_well(model, replica, current, version, out)
    wake(catalog, model, out)


def _end_well(model: Model, replica: Replica, current: Round, version: int, out: Out) -> None:
    """The whole replica holds the version."""
    number = current.number
    current.state = move(ROUND_MOVES, current.state, RoundMove.COMPLETED)
    replica.round = None
    for index, root in current.staged.items():
        # All shards swap in this one command, so the replica goes from one whole version to the other.
        if root is not None:
            shift(replica.members[index], ShardMove.SWAPPED, version, root)
    refresh(model, replica, "replaced", out)
    out.append(ReplicaReady(model=model.name, replica=replica.name, version=version, round=number))


def end(model: Model, replica: Replica, how: RoundMove, out: Out, error: str = "", message: str = "") -> None:
    """End the replica's round for all its shards; what was being filled goes back to empty."""
    current = replica.round
    if current is None:
        return
    current.state = move(ROUND_MOVES, current.state, how)
    replica.round = None
    model.waiting.pop(replica.name, None)
    _give_up_filling(replica)
    if how is RoundMove.SETTLED:
        out.append(RoundSettled(model=model.name, replica=replica.name, round=current.number))
    elif how is RoundMove.FAILED:
        out.append(
            RoundFailed(model=model.name, replica=replica.name, round=current.number, error=error, message=message)
        )


def _give_up_filling(replica: Replica) -> None:
    for shard in replica.members.values():
        if shard.state is ShardState.FILLING:
            shift(shard, ShardMove.GIVEN_UP)


def joined(model: Model, replica: Replica, shard: int, there: Container[int]) -> RoundJoined:
    """Say that a shard waits in the open round for those that are not there yet."""
    assert replica.round is not None
    return RoundJoined(
        model=model.name, replica=replica.name, round=replica.round.number, shard=shard, missing=replica.missing(there)
    )


def settle(catalog: Catalog, command: Settle, out: Out) -> None:
    """End a shard's patience; if all have joined and nothing is decided, the answer is None for all."""
    model, replica, shard = owned_shard(catalog, command)
    current = open_round(replica, command.round, shard)
    current.patient[shard.index] = False
    out.append(joined(model, replica, shard.index, current.wants))
    if current.state is RoundState.JOINING:
        _try_decide(model, replica, current, out)


def replan(catalog: Catalog, command: Replan, out: Out) -> None:
    """Decide again, because one shard's leases can't be had."""
    model, replica, shard = owned_shard(catalog, command)
    current = open_round(replica, command.round, shard)
    if current.state is not RoundState.DECIDED or current.attempt != command.attempt:
        raise Refused(BadCommand, f"attempt {command.attempt} of round {current.number} is over")
    if current.attempt >= ATTEMPTS_MAX:
        message = f"no leases on version {current.version} could be had in {ATTEMPTS_MAX} attempts: try again"
        end(model, replica, RoundMove.FAILED, out, VersionUnavailable.__name__, message)
        return
    again(catalog, model, replica, current, out)


def again(catalog: Catalog, model: Model, replica: Replica, current: Round, out: Out) -> None:
    """Take a decision back and decide again; the round waits when there is nothing to read now."""
    version = current.version
    assert version is not None
    current.held = False
    verdict = decide(model, current.wants, patient=True, held=_held(model, replica, current))
    if isinstance(verdict, Fail):
        end(model, replica, RoundMove.FAILED, out, verdict.error.__name__, verdict.message)
    elif isinstance(verdict, int):
        if _decided(model, replica, current, verdict, out):
            wake(catalog, model, out)
    else:
        current.state = move(ROUND_MOVES, current.state, RoundMove.REOPENED)
        current.version = None
        current.granted.clear()
        current.filled.clear()
        current.staged = dict.fromkeys(current.staged)
        _give_up_filling(replica)
        model.waiting[replica.name] = None
        out.append(RoundReopened(model=model.name, replica=replica.name, round=current.number, version=version))
        if _try_decide(model, replica, current, out):
            wake(catalog, model, out)


def give_up(catalog: Catalog, command: GiveUp, out: Out) -> None:
    """Let a shard leave: alone while nothing is decided, else the round fails for all."""
    model, replica, shard = owned_shard(catalog, command)
    current = open_round(replica, command.round, shard)
    waits = current.state is RoundState.JOINING
    if command.attempt is not None and (waits or command.attempt != current.attempt):
        raise Refused(BadCommand, f"attempt {command.attempt} of round {current.number} is over")
    if waits:
        missing = replica.missing(current.wants)
        current.leave(shard.index)
        out.append(
            RoundWithdrawn(
                model=model.name, replica=replica.name, round=current.number, shard=shard.index, missing=missing
            )
        )
        if not current.wants:
            end(model, replica, RoundMove.EMPTIED, out)
        return
    if command.error == VersionUnavailable.__name__ and _went_in_good_order(model, current):
        again(catalog, model, replica, current, out)
        return
    if current.held and command.error == RoundTimeout.__name__ and replica.version is not None:
        why = f"no other copy of the retained version {replica.version} stood within the bound"
        end(model, replica, RoundMove.FAILED, out, RetentionFull.__name__, f"{why}: allow more time")
        return
    error = from_code(command.error, command.message)
    end(model, replica, RoundMove.FAILED, out, error.code, f"shard {shard.index}: {command.message}"[:1000])


def _went_in_good_order(model: Model, current: Round) -> bool:
    """Tell whether the version was given up, not lost, or a newer one stands: "latest" can go on with another."""
    if any(isinstance(wish, int) for wish in current.wants.values()) or current.attempt >= ATTEMPTS_MAX:
        return False
    assert current.version is not None
    version = model.versions.get(current.version)
    best = newest(model)
    if version is None or version.state is VersionState.RETIRED or (best is not None and best > version.number):
        return True
    return version.state is VersionState.UNAVAILABLE and version.gone in IN_ORDER


def interrupt(model: Model, replica: Replica, why: str, out: Out) -> None:
    """Fail the replica's round because one of its shards went."""
    if replica.round is not None:
        end(model, replica, RoundMove.FAILED, out, RoundTimeout.__name__, why)
