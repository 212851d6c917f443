"""Rounds of replicas, from the shards' joining to a replica that holds the version.

A round gives one answer for all shards of a replica (TensorHub paper, model-parallel consistency). Every shard joins
with the version that it wants. The fold decides once for all shards when the last one has joined. A round prevents the
bug in which each shard asks for "latest" by itself.

After the decision each shard reports its leases (`granted`). The round starts when the leases of all shards are
granted (`start_round`). Each shard then reports that it is filled (`filled`).

A newer version may be published while a replica reads an older one (`report_overtaken`). The replica's shards then
judge whether to go on, and one of them may turn the round to the newer version (`drop`).

Invariants:
- No memory is drained or overwritten before every lease of every shard is granted.
- No round starts that would take away the last counting copy of a retained version.
- A replica holds a version with all of its shards.
"""

from collections.abc import Callable, Container
from typing import Final

from tensorhub_common.catalog import cache_replicas, retention
from tensorhub_common.catalog.availability import IN_ORDER, Out, empty_for_refill, move_shard, refresh_availability
from tensorhub_common.catalog.state import (
    ATTEMPTS_MAX,
    Catalog,
    Model,
    Replica,
    Round,
    Shard,
    holds,
    is_retired,
    known_root,
    newest,
    root_key,
)
from tensorhub_common.catalog.transitions import (
    ROUND_TRANSITIONS,
    RoundState,
    RoundTransition,
    ShardState,
    ShardTransition,
    transition,
)
from tensorhub_common.catalog.validation import CommandRefused, checked_digest, open_round, owned_shard
from tensorhub_common.catalog.version_selection import (
    CannotDecide,
    NothingNewer,
    WaitForVersion,
    is_overtaken,
    select_version,
)
from tensorhub_common.errors import (
    BadCommand,
    IntegrityError,
    ReplicaConflict,
    RetentionFull,
    RoundTimeout,
    VersionConflict,
    VersionUnavailable,
)
from tensorhub_common.protocol.log.commands import VERSION_MAX, Drop, Filled, GiveUp, Granted, Replan, Settle, Want
from tensorhub_common.protocol.log.events import (
    ReplicaReady,
    RoundDecided,
    RoundFailed,
    RoundHeld,
    RoundJoined,
    RoundOvertaken,
    RoundReopened,
    RoundSettled,
    RoundStarted,
    RoundWithdrawn,
    ShardFilled,
)
from tensorhub_common.protocol.log.levels import Level, known_error
from tensorhub_common.protocol.queries import VersionState


def want(catalog: Catalog, command: Want, out: Out) -> None:
    """Let a shard join its replica's round, and decide when it was the last."""
    model, replica, shard = owned_shard(catalog, command)
    where = f"shard {shard.index} of {model.name}/{replica.name}"
    if isinstance(command.want, int) and not 0 <= command.want <= VERSION_MAX:
        raise CommandRefused(VersionUnavailable, f"version {command.want} can't exist: versions are 0 to {VERSION_MAX}")
    if shard.index in replica.offers:
        raise CommandRefused(ReplicaConflict, f"{where} is being published: wait until that call has ended")
    if shard.state not in (ShardState.EMPTY, ShardState.READY):
        raise CommandRefused(ReplicaConflict, f"{where} is {shard.state}: wait until that has ended")
    current = replica.round
    if current is not None and (current.state is not RoundState.JOINING or shard.index in current.wants):
        raise CommandRefused(ReplicaConflict, f"{where} is in round {current.number} already: wait for its end")
    if replica.cache not in (None, command.want):
        raise CommandRefused(BadCommand, f"{where} is a copy of version {replica.cache}, and takes no other")
    if shard.leaving:
        raise CommandRefused(ReplicaConflict, f"{where} is being unpublished: wait until that call has ended")
    if current is None:
        keeps = catalog.level >= Level.NEVER_OLDER
        current = replica.round = Round(
            number=catalog.seq, supersede=command.supersede, began_with=replica.version if keeps else None
        )
        model.waiting[replica.name] = None
    current.state = transition(ROUND_TRANSITIONS, current.state, RoundTransition.JOINED)
    current.supersede = current.supersede and command.supersede
    current.wants[shard.index] = command.want
    current.patient[shard.index] = command.patient
    if command.staged:
        current.staged[shard.index] = None
    out.append(joined(model, replica, shard.index, current.wants))
    if _try_decide(model, replica, current, out):
        decide_waiting_rounds(catalog, model, out)


def _held(model: Model, replica: Replica, current: Round) -> int | None:
    """Return than what anything must be newer: what the replica holds.

    One that was overwritten may have again what it held when the round began, and nothing older. What was retired does
    not count: from there `newer` leads back.
    """
    began_with = current.began_with
    if replica.version is None and began_with is not None:
        return None if is_retired(model, began_with) else began_with - 1
    return None if is_retired(model, replica.version) else replica.version


def decide_waiting_rounds(catalog: Catalog, model: Model, out: Out) -> None:
    """Decide every round that waits for a version, in the order in which they began to wait.

    Each is looked at once: no decision makes a version available. A replica that holds the decided version is ready at
    once, and it counted as a holder before.
    """
    if catalog.level < Level.WAKING_ONCE:
        _wake_again(model, out)
        return
    for name in list(model.waiting):
        _decide_round_of(model, name, out)


def _decide_round_of(model: Model, name: str, out: Out) -> bool:
    """Decide the round of a replica if it has one that can be decided. True: the replica is ready at once."""
    replica = model.replicas[name]
    return replica.round is not None and _try_decide(model, replica, replica.round, out)


def _wake_again(model: Model, out: Out) -> None:
    """Wake as it was done below `Level.WAKING_ONCE`: behind each replica that is ready at once the walk begins anew.

    Then each walk that was left goes on, and decides a round anew that a later one has decided. The walks are a list,
    and no call in a call: a model has more replicas than Python has stack.
    """
    walks = [iter(list(model.waiting))]
    while walks:
        if any(_decide_round_of(model, name, out) for name in walks[-1]):
            walks.append(iter(list(model.waiting)))
        else:
            walks.pop()


def _try_decide(model: Model, replica: Replica, current: Round, out: Out) -> bool:
    """Decide the round if it can be decided. True: the replica is ready, and `decide_waiting_rounds` is due."""
    complete = len(current.wants) == replica.shards
    patient = current.started or all(current.patient.values())
    decision = select_version(model, current.wants, patient, _held(model, replica, current))
    if isinstance(decision, CannotDecide):
        # Two clashing numbers fail at once; a number that is gone fails once all have joined.
        if complete or decision.error is VersionConflict:
            end(model, replica, RoundTransition.FAILED, out, decision.error.__name__, decision.message)
    elif not complete or isinstance(decision, WaitForVersion):
        pass
    elif isinstance(decision, NothingNewer):
        end(model, replica, RoundTransition.SETTLED, out)
    else:
        return _decided(model, replica, current, decision, out)
    return False


def _decided(model: Model, replica: Replica, current: Round, version: int, out: Out) -> bool:
    """Decide the round. True: all shards hold the version, so the replica is ready: `decide_waiting_rounds` is due."""
    current.state = transition(ROUND_TRANSITIONS, current.state, RoundTransition.DECIDED)
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
    """Keep which command has decided a round, as its event says it: the agents' turns come from that."""
    for event in out:
        if isinstance(event, RoundDecided):
            current = catalog.models[event.model].replicas[event.replica].round
            if current is not None and current.number == event.round:
                current.decided = catalog.seq


def complete(catalog: Catalog, model: Model, replica: Replica, current: Round, version: int, out: Out) -> None:
    """End the round well, and let those go on who waited for that."""
    _end_well(model, replica, current, version, out)
    decide_waiting_rounds(catalog, model, out)


def _end_well(model: Model, replica: Replica, current: Round, version: int, out: Out) -> None:
    """The whole replica holds the version."""
    number = current.number
    current.state = transition(ROUND_TRANSITIONS, current.state, RoundTransition.COMPLETED)
    replica.round = None
    for index, root in current.staged.items():
        # All shards swap in this one command, so the replica goes from one whole version to the other.
        if root is not None:
            move_shard(replica.members[index], ShardTransition.SWAPPED, version, root)
    refresh_availability(model, replica, "replaced", out)
    out.append(ReplicaReady(model=model.name, replica=replica.name, version=version, round=number))


def end(model: Model, replica: Replica, how: RoundTransition, out: Out, error: str = "", message: str = "") -> None:
    """End the replica's round for all its shards; what was being filled goes back to empty."""
    current = replica.round
    if current is None:
        return
    current.state = transition(ROUND_TRANSITIONS, current.state, how)
    replica.round = None
    model.waiting.pop(replica.name, None)
    _give_up_filling(replica)
    if how is RoundTransition.SETTLED:
        out.append(RoundSettled(model=model.name, replica=replica.name, round=current.number))
    elif how is RoundTransition.FAILED:
        out.append(
            RoundFailed(model=model.name, replica=replica.name, round=current.number, error=error, message=message)
        )


def _give_up_filling(replica: Replica) -> None:
    for shard in replica.members.values():
        if shard.state is ShardState.FILLING:
            move_shard(shard, ShardTransition.GIVEN_UP)


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
        raise CommandRefused(BadCommand, f"attempt {command.attempt} of round {current.number} is over")
    if current.attempt >= ATTEMPTS_MAX:
        message = f"no leases on version {current.version} could be had in {ATTEMPTS_MAX} attempts: try again"
        end(model, replica, RoundTransition.FAILED, out, VersionUnavailable.__name__, message)
        return
    redecide(catalog, model, replica, current, out)


def redecide(catalog: Catalog, model: Model, replica: Replica, current: Round, out: Out) -> None:
    """Take a decision back and decide again; the round waits when there is nothing to read now."""
    version = current.version
    assert version is not None
    current.held = False
    verdict = select_version(model, current.wants, patient=True, held=_held(model, replica, current))
    if isinstance(verdict, CannotDecide):
        end(model, replica, RoundTransition.FAILED, out, verdict.error.__name__, verdict.message)
    elif isinstance(verdict, int):
        if _decided(model, replica, current, verdict, out):
            decide_waiting_rounds(catalog, model, out)
    else:
        current.state = transition(ROUND_TRANSITIONS, current.state, RoundTransition.REOPENED)
        current.version = None
        current.granted.clear()
        current.filled.clear()
        current.staged = dict.fromkeys(current.staged)
        _give_up_filling(replica)
        model.waiting[replica.name] = None
        out.append(RoundReopened(model=model.name, replica=replica.name, round=current.number, version=version))
        if _try_decide(model, replica, current, out):
            decide_waiting_rounds(catalog, model, out)


def give_up(catalog: Catalog, command: GiveUp, out: Out) -> None:
    """Let a shard leave: alone while nothing is decided, else the round fails for all."""
    model, replica, shard = owned_shard(catalog, command)
    current = open_round(replica, command.round, shard)
    waits = current.state is RoundState.JOINING
    if command.attempt is not None and (waits or command.attempt != current.attempt):
        raise CommandRefused(BadCommand, f"attempt {command.attempt} of round {current.number} is over")
    if waits:
        missing = replica.missing(current.wants)
        current.leave(shard.index)
        out.append(
            RoundWithdrawn(
                model=model.name, replica=replica.name, round=current.number, shard=shard.index, missing=missing
            )
        )
        if not current.wants:
            end(model, replica, RoundTransition.EMPTIED, out)
        return
    if command.error == VersionUnavailable.__name__ and _went_in_good_order(model, current):
        redecide(catalog, model, replica, current, out)
        return
    if current.held and command.error == RoundTimeout.__name__ and replica.version is not None:
        why = f"no other copy of the retained version {replica.version} stood within the bound"
        end(model, replica, RoundTransition.FAILED, out, RetentionFull.__name__, f"{why}: allow more time")
        return
    error = known_error(catalog.level, command.error)
    end(model, replica, RoundTransition.FAILED, out, error, f"shard {shard.index}: {command.message}"[:1000])


def _went_in_good_order(model: Model, current: Round) -> bool:
    """Tell whether the version was given up, not lost, or a newer one is available: "latest" can go on with another."""
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
        end(model, replica, RoundTransition.FAILED, out, RoundTimeout.__name__, why)


def granted(catalog: Catalog, command: Granted, out: Out) -> None:
    """Count one shard's leases; when all shards have theirs, let them drain and write."""
    model, replica, shard = owned_shard(catalog, command)
    current = open_round(replica, command.round, shard)
    if current.state is not RoundState.DECIDED or current.attempt != command.attempt or current.version is None:
        raise CommandRefused(BadCommand, f"attempt {command.attempt} of round {current.number} is over")
    current.granted.add(shard.index)
    if len(current.granted | current.filled) < replica.shards:
        out.append(joined(model, replica, shard.index, current.granted | current.filled))
        return
    start_round(catalog, model, replica, current, out)


def start_round(catalog: Catalog, model: Model, replica: Replica, current: Round, out: Out) -> None:
    """All leases are granted: start, unless a newer version is available or this is the last copy of a retained one.

    Or all is filled beside the present memory, and the swap was held back: nothing holds it any more.
    """
    if current.state is RoundState.STARTED:
        assert current.version is not None
        complete(catalog, model, replica, current, current.version, out)
    elif is_overtaken(model, current):
        current.superseded += 1
        redecide(catalog, model, replica, current, out)
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
    if not coming and not cache_replicas.place_copy(catalog, model, model.versions[version], placed):
        why = retention.no_room(model, replica, version)
        end(model, replica, RoundTransition.FAILED, out, RetentionFull.__name__, why)
        return
    current.held = True
    out.append(RoundHeld(model=model.name, replica=replica.name, round=current.number, version=version))
    out.extend(placed)


def _start(model: Model, replica: Replica, current: Round, out: Out) -> None:
    """Let all shards drain and write."""
    assert current.version is not None
    current.held = False
    current.state = transition(ROUND_TRANSITIONS, current.state, RoundTransition.STARTED)
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
        empty_for_refill(member)
        if member.state is ShardState.EMPTY:
            move_shard(member, ShardTransition.STARTED)
    refresh_availability(model, replica, "replaced", out)


def filled(catalog: Catalog, command: Filled, out: Out) -> None:
    """Count one shard as ready; when all are, the replica holds the version."""
    model, replica, shard = owned_shard(catalog, command)
    current = open_round(replica, command.round, shard)
    at_once = _completes_mapped_round(replica, current, shard, command)
    if (current.state is not RoundState.STARTED and not at_once) or command.version != current.version:
        raise CommandRefused(BadCommand, f"round {current.number} is not filling version {command.version}")
    staged = shard.index in current.staged and shard.index not in current.filled
    if shard.state is not ShardState.FILLING and not staged:
        raise CommandRefused(BadCommand, f"shard {shard.index} of round {current.number} is {shard.state}, not filling")
    record = model.versions.get(command.version)
    checked_digest("root", command.root)
    known = known_root(model, replica, shard, command.version)
    if record is None or (known is not None and known != command.root):
        raise CommandRefused(
            IntegrityError,
            f"shard {shard.index} of {model.name}/{replica.name} has root {command.root}, and the log keeps {known}",
        )
    if at_once:
        current.state = transition(ROUND_TRANSITIONS, current.state, RoundTransition.STARTED)
    record.roots.setdefault(root_key(replica.shards, shard.index, shard.layout), command.root)
    if staged:
        current.staged[shard.index] = command.root
    else:
        move_shard(shard, ShardTransition.FILLED, command.version, command.root)
    current.filled.add(shard.index)
    if at_once:
        # The round ends here, so that the replica is ready says all of it.
        complete(catalog, model, replica, current, command.version, out)
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
        complete(catalog, model, replica, current, command.version, out)


def _completes_mapped_round(replica: Replica, current: Round, shard: Shard, command: Filled) -> bool:
    """Tell whether the round begins and ends with this command: nothing was to be overwritten for it."""
    if command.attempt is None or current.state is not RoundState.DECIDED or command.attempt != current.attempt:
        return False
    others = set(range(replica.shards)) - {shard.index}
    return replica.mapped and shard.index in current.staged and current.filled == others


def report_overtaken(model: Model, version: int, out: Out) -> None:
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
        raise CommandRefused(BadCommand, f"attempt {command.attempt} of round {current.number} is over")
    if not is_overtaken(model, current):
        raise CommandRefused(
            BadCommand, f"round {current.number} reads to its end: nothing newer may be taken up instead"
        )
    current.superseded += 1
    redecide(catalog, model, replica, current, out)


HANDLERS: Final[dict[type, Callable[..., None]]] = {
    Want: want,
    Settle: settle,
    GiveUp: give_up,
    Granted: granted,
    Replan: replan,
    Drop: drop,
    Filled: filled,
}
"""What carries out which command; `apply` looks here."""
