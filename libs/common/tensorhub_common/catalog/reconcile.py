"""What the catalog does by itself after each command: place copies, let copies go, let go on what was held back.

`reconcile` is the end of every fold, so its events follow those of the command that made them possible. Where
nothing is retained, rewound or drained it does nothing, and an old log folds as it always did.
"""

from tensorhub_common.catalog import cache_replicas, retention
from tensorhub_common.catalog.availability import Out
from tensorhub_common.catalog.handlers import rounds
from tensorhub_common.catalog.handlers.publishing import drain
from tensorhub_common.catalog.state import Catalog, Model, Replica
from tensorhub_common.catalog.transitions import RoundTransition, ShardState
from tensorhub_common.errors import RetentionFull
from tensorhub_common.protocol.log.commands import AnyCommand, Delete
from tensorhub_common.protocol.log.events import AgentDrained, ShardStays, VersionExposed, VersionKept
from tensorhub_common.protocol.queries import VersionState


def reconcile(catalog: Catalog, command: AnyCommand, out: Out) -> None:
    """Bring everything that is retained up to date with what the command has changed."""
    if not catalog.tended:
        _tell_drained(catalog, out)
        return
    concerned = _concerned(catalog, command)
    for model in concerned:
        # All of them before anything is placed: one model's copy may be where another's is to go.
        _let_go(catalog, model, out)
    for model in concerned:
        _settle(catalog, model, out)
    _tell_drained(catalog, out)


def _concerned(catalog: Catalog, command: AnyCommand) -> list[Model]:
    """Return the models about which the command may have changed anything.

    What it says of one model changes nothing about another, but for the room that it takes or leaves: in the quota, or
    where both have copies. A model that was deleted is no longer among those with copies.
    """
    about = getattr(command, "model", None)
    shared = catalog.quota_bytes > 0 or len(catalog.tended) > 1 or isinstance(command, Delete)
    return [catalog.models[name] for name in catalog.tended if shared or about is None or about == name]


def _let_go(catalog: Catalog, model: Model, out: Out) -> None:
    """Let go of the copies that have no purpose any more."""
    keep = retention.retained(model) | retention.held(model)
    for replica in list(model.replicas.values()):
        if cache_replicas.is_useless(catalog, model, replica, keep):
            cache_replicas.drop_copy(catalog, model, replica, out)


def _settle(catalog: Catalog, model: Model, out: Out) -> None:
    keep = retention.retained(model)
    for number in sorted(keep, reverse=True):
        if _lacks_copy(catalog, model, number) and not cache_replicas.place_copy(
            catalog, model, model.versions[number], out
        ):
            # No trainer waits, or fails, because of what is only held.
            cache_replicas.make_room(catalog, model, model.versions[number], out)
    for number in sorted(retention.held(model) - keep):
        if _lacks_copy(catalog, model, number):
            cache_replicas.place_copy(catalog, model, model.versions[number], out)
    events_before = -1
    while events_before != len(out):
        # A replica that goes on, or fails, may be what another one was waiting for.
        events_before = len(out)
        for replica in list(model.replicas.values()):
            _release_held(catalog, model, replica, out)
    _report_retained(model, keep, out)
    _forget_retired(model)
    retired = any(version.state is VersionState.RETIRED for version in model.versions.values())
    if not model.retain and not model.pins and not model.holds and not retired:
        # So nothing is kept: all copies were let go above, and the replicas that were held back went on.
        del catalog.tended[model.name]


def _lacks_copy(catalog: Catalog, model: Model, version: int) -> bool:
    """Tell whether a version that can be copied has no copy, and none is being made."""
    return model.versions[version].state is VersionState.AVAILABLE and not _is_cached(catalog, model, version)


def _is_cached(catalog: Catalog, model: Model, version: int) -> bool:
    """Tell whether a copy exists or is being made where it can stay."""
    return any(each.cache == version and retention.is_whole(catalog, each) for each in model.replicas.values())


def _release_held(catalog: Catalog, model: Model, replica: Replica, out: Out) -> None:
    """Let go on who waited for another copy, or tell it that none will come."""
    leaving = [shard for shard in replica.members.values() if shard.leaving]
    current = replica.round if replica.round is not None and replica.round.held else None
    if not leaving and current is None:
        return
    version = replica.version
    if version is not None and retention.must_stay(catalog, model, replica):
        if retention.is_coming(catalog, model, replica, version):
            return
        why = retention.no_room(model, replica, version)
        for shard in leaving:
            shard.leaving = False
            out.append(_stays(model, replica, shard.index, version, why))
        if current is not None:
            rounds.end(model, replica, RoundTransition.FAILED, out, RetentionFull.__name__, why)
        return
    for shard in leaving:
        drain(model, replica, shard, out)
    if current is not None:
        rounds.start_round(catalog, model, replica, current, out)


def _stays(model: Model, replica: Replica, shard: int, version: int, why: str) -> ShardStays:
    return ShardStays(
        model=model.name,
        replica=replica.name,
        shard=shard,
        version=version,
        error=RetentionFull.__name__,
        message=why,
    )


def _report_retained(model: Model, keep: set[int], out: Out) -> None:
    """Say which retained versions have come to have a copy, or have lost the last one."""
    for number in sorted(model.versions):
        version = model.versions[number]
        holder = next((r.name for r in model.replicas.values() if retention.is_durable_copy(r, number)), None)
        if number not in keep:
            version.kept = False
        elif holder is not None and not version.kept:
            version.kept = True
            out.append(VersionKept(model=model.name, version=number, replica=holder))
        elif holder is None and version.kept:
            version.kept = False
            out.append(VersionExposed(model=model.name, version=number, reason=version.gone or "lost"))


def _forget_retired(model: Model) -> None:
    """Forget what was rewound once no shard holds a part of it."""
    held = {shard.version for replica in model.replicas.values() for shard in replica.members.values()}
    for number, version in list(model.versions.items()):
        if version.state is VersionState.RETIRED and number not in held:
            del model.versions[number]


def _tell_drained(catalog: Catalog, out: Out) -> None:
    """Say which of the agents that are drained may stop."""
    for name in catalog.leaving:
        agent = catalog.agents[name]
        may_stop = not any(
            retention.must_stay(catalog, catalog.models[model], catalog.models[model].replicas[replica])
            for model, replica, index in agent.shards
            if catalog.models[model].replicas[replica].members[index].state is ShardState.READY
        )
        if may_stop and not agent.drained:
            out.append(AgentDrained(agent=name))
        agent.drained = may_stop
