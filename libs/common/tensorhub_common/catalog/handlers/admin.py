"""What users rule about a model, an agent or the job: what is retained and pinned, where it is rewound to, what goes.

These commands come from outside and name no sender, so each is one that may be said twice: the second changes nothing.
Only `rewind` retires what was published since; JetStream's window and the message's id keep a repeat of it out.
"""

from collections.abc import Callable
from typing import Final

from tensorhub_common.catalog import cache_replicas, retention
from tensorhub_common.catalog.availability import Out
from tensorhub_common.catalog.handlers import rounds
from tensorhub_common.catalog.handlers.publishing import fail
from tensorhub_common.catalog.state import ATTEMPTS_MAX, Catalog, Model, Replica, Round
from tensorhub_common.catalog.transitions import (
    VERSION_TRANSITIONS,
    AgentState,
    RoundState,
    RoundTransition,
    VersionTransition,
    transition,
)
from tensorhub_common.catalog.validation import CommandRefused, checked_number, the_model
from tensorhub_common.errors import (
    AgentUnavailable,
    BadCommand,
    ReplicaConflict,
    RetentionFull,
    VersionConflict,
    VersionUnavailable,
)
from tensorhub_common.protocol.log.commands import (
    RETAINED_MAX,
    Delete,
    DeleteJob,
    DrainAgent,
    Pin,
    Quota,
    Retain,
    Rewind,
    Unpin,
)
from tensorhub_common.protocol.log.events import (
    AgentDraining,
    JobDeleted,
    JobQuota,
    ModelDeleted,
    ModelRetention,
    ModelRewound,
    ShardReleased,
    VersionPinned,
    VersionRetired,
    VersionUnpinned,
)
from tensorhub_common.protocol.queries import VersionState

NAMED_MAX = 8
"""A refusal names at most this many replicas."""


def retain(catalog: Catalog, command: Retain, out: Out) -> None:
    """Keep the last versions of a model from now on."""
    model = the_model(catalog, command.model)
    model.retain = retention.checked_count(command.last)
    catalog.tended[model.name] = None
    out.append(ModelRetention(model=model.name, last=model.retain))


def pin(catalog: Catalog, command: Pin, out: Out) -> None:
    """Keep one version that can be read now."""
    model = the_model(catalog, command.model)
    version = model.versions.get(command.version)
    if version is None or version.state is not VersionState.AVAILABLE:
        able = sorted(n for n, v in model.versions.items() if v.state is VersionState.AVAILABLE)
        raise CommandRefused(
            VersionUnavailable,
            f"version {command.version} of model {model.name!r} has no live holder, so it can't be pinned; available "
            f"now: {able or 'none'}",
        )
    if command.version not in model.pins and len(model.pins) >= RETAINED_MAX:
        raise CommandRefused(
            RetentionFull, f"model {model.name!r} has {RETAINED_MAX} pinned versions already: unpin one"
        )
    model.pins[command.version] = None
    catalog.tended[model.name] = None
    out.append(VersionPinned(model=model.name, version=command.version))


def unpin(catalog: Catalog, command: Unpin, out: Out) -> None:
    """Keep a version no longer than `retain` says."""
    model = the_model(catalog, command.model)
    number = checked_number("version", command.version)
    model.pins.pop(number, None)
    out.append(VersionUnpinned(model=model.name, version=number))


def rewind(catalog: Catalog, command: Rewind, out: Out) -> None:
    """Retire every version above `to`: no read takes it any more, and its number is not used again."""
    model = the_model(catalog, command.model)
    if model.last is None or not 0 <= command.to <= model.last:
        raise CommandRefused(
            VersionUnavailable,
            f"model {model.name!r} can't be rewound to version {command.to}: the last published one is {model.last}",
        )
    pinned = sorted(number for number in model.pins if number > command.to)
    if pinned:
        raise CommandRefused(
            VersionConflict,
            f"versions {pinned} of model {model.name!r} are pinned, so it can't be rewound to {command.to}: unpin "
            "them first",
        )
    out.append(ModelRewound(model=model.name, to=command.to, last=model.last))
    why = f"rewound to {command.to}"
    retired = sorted(
        n for n, version in model.versions.items() if n > command.to and version.state is not VersionState.RETIRED
    )
    for number in retired:
        version = model.versions[number]
        version.state = transition(VERSION_TRANSITIONS, version.state, VersionTransition.REWOUND)
        out.append(VersionRetired(model=model.name, version=number, reason=why))
    catalog.tended[model.name] = None
    if retired:
        _turn_back(catalog, model, command.to, out)


def _turn_back(catalog: Catalog, model: Model, to: int, out: Out) -> None:
    """End what was under way with retired versions: offers of that line fail, rounds are decided anew."""
    for replica in model.replicas.values():
        if replica.offers:
            fail(model, replica, f"the model was rewound to {to} while this was being published: publish again", out)
    for replica in list(model.replicas.values()):
        current = replica.round
        if current is None or current.state is RoundState.JOINING or current.version is None:
            continue
        if current.version > to:
            _turn(catalog, model, replica, current, out)
    rounds.decide_waiting_rounds(catalog, model, out)


def _turn(catalog: Catalog, model: Model, replica: Replica, current: Round, out: Out) -> None:
    """What the round was decided for can't be read any more: decide again, as often as that may be."""
    if current.attempt >= ATTEMPTS_MAX:
        message = f"version {current.version} was retired, after {ATTEMPTS_MAX} attempts: try again"
        rounds.end(model, replica, RoundTransition.FAILED, out, VersionUnavailable.__name__, message)
        return
    rounds.redecide(catalog, model, replica, current, out)


def delete(catalog: Catalog, command: Delete, out: Out) -> None:
    """Forget a model without replicas."""
    model = the_model(catalog, command.model)
    standing = [
        replica.name
        for replica in model.replicas.values()
        if replica.cache is None
        and any(catalog.agents[shard.agent].state is AgentState.LIVE for shard in replica.members.values())
    ]
    if standing:
        more = f" and {len(standing) - NAMED_MAX} more" if len(standing) > NAMED_MAX else ""
        raise CommandRefused(
            ReplicaConflict,
            f"model {model.name!r} has replicas {standing[:NAMED_MAX]}{more} on live agents: release them first",
        )
    out.append(ModelDeleted(model=model.name))
    for replica in model.replicas.values():
        for shard in replica.members.values():
            cache_replicas.forget_shard(catalog, model, replica, shard)
            out.append(ShardReleased(model=model.name, replica=replica.name, shard=shard.index))
    catalog.tended.pop(model.name, None)
    del catalog.models[model.name]


def delete_job(catalog: Catalog, command: DeleteJob, out: Out) -> None:
    """Close the job: everything in it is dropped, and no later command counts.

    What is left has no size: it is the job's tombstone.
    """
    if command.by is not None:
        raise CommandRefused(BadCommand, "a job is deleted by those who use it, not by an agent")
    catalog.deleted, catalog.deleted_at = catalog.seq, catalog.time
    for each in (catalog.models, catalog.agents, catalog.lanes, catalog.tended, catalog.leaving):
        each.clear()
    out.append(JobDeleted(job=catalog.job))


def drain_agent(catalog: Catalog, command: DrainAgent, out: Out) -> None:
    """Take an agent out for maintenance, or let it take part again."""
    agent = catalog.agents.get(command.agent)
    if agent is None:
        raise CommandRefused(AgentUnavailable, f"agent {command.agent!r:.80} has not joined job {catalog.job!r}")
    agent.draining, agent.drained = command.on, False
    if command.on:
        catalog.leaving[agent.name] = None
    else:
        catalog.leaving.pop(agent.name, None)
    out.append(AgentDraining(agent=agent.name, on=command.on))


def quota(catalog: Catalog, command: Quota, out: Out) -> None:
    """Bound the bytes of all of the job's shards. What is registered already stays."""
    catalog.quota_bytes = checked_number("quota", command.nbytes)
    out.append(JobQuota(nbytes=command.nbytes))


HANDLERS: Final[dict[type, Callable[..., None]]] = {
    Retain: retain,
    Pin: pin,
    Unpin: unpin,
    Rewind: rewind,
    Delete: delete,
    DeleteJob: delete_job,
    DrainAgent: drain_agent,
    Quota: quota,
}
"""What carries out which command; `apply` looks here."""
