"""Who is there: agents that join and are lost, shards that are registered and released.

An agent speaks for the shards in its memory. What an older incarnation says is refused, and a shard moves to another
agent only once its own is lost or has released it.
"""

from collections.abc import Callable
from typing import Final

from tensorhub_common.catalog import cache_replicas
from tensorhub_common.catalog.availability import Out, common_version, move_shard, refresh_availability
from tensorhub_common.catalog.handlers import rounds
from tensorhub_common.catalog.state import (
    AGENTS_MAX,
    LANES_MAX,
    LOST_KEPT_S,
    MODELS_MAX,
    REPLICAS_MAX,
    SPOT_KEPT_S,
    AgentRecord,
    Catalog,
    Model,
    Replica,
    Shard,
    is_retired,
    known_root,
)
from tensorhub_common.catalog.transitions import (
    AGENT_TRANSITIONS,
    AgentState,
    AgentTransition,
    RoundState,
    ShardState,
    ShardTransition,
    transition,
)
from tensorhub_common.catalog.validation import (
    CommandRefused,
    checked_digest,
    checked_name,
    checked_number,
    is_registry_sender,
    live_agent,
    owned_shard,
)
from tensorhub_common.errors import (
    AgentUnavailable,
    BadCommand,
    LayoutMismatch,
    MemoryExhausted,
    ReplicaConflict,
    StaleSender,
)
from tensorhub_common.protocol.log.commands import (
    SHARDS_MAX,
    Expire,
    ForgetAgent,
    HeldShard,
    Join,
    Lead,
    Register,
    Release,
)
from tensorhub_common.protocol.log.events import (
    AgentForgotten,
    AgentJoined,
    AgentLost,
    RegistryLeads,
    ReplicaLost,
    ReplicaReady,
    ShardRegistered,
    ShardReleased,
    Sibling,
)
from tensorhub_common.protocol.log.levels import Level, check_level

NEIGHBOURS_MAX: Final = 32
"""A shard is compared with this many before it and this many after it, and with few farther ones."""


def join(catalog: Catalog, command: Join, out: Out) -> None:
    """Let an agent's new incarnation speak, and believe what the log can vouch for of what it says it holds."""
    by = command.by
    if by is None or is_registry_sender(by):
        raise CommandRefused(BadCommand, "an agent must join under its own name, which can't begin with '_'")
    checked_name("host", command.host)
    checked_name("site", command.site)
    if command.rack:
        checked_name("rack", command.rack)
    checked_number("cache", command.cache_bytes)
    agent = catalog.agents.get(by.process)
    if agent is None:
        if len(catalog.agents) >= AGENTS_MAX:
            raise CommandRefused(BadCommand, f"the job knows {AGENTS_MAX} agents already, which is the limit")
        agent = catalog.agents[by.process] = AgentRecord(by.process, by.incarnation, command.host, command.site)
    elif by.incarnation <= agent.incarnation:
        raise CommandRefused(
            StaleSender, f"agent {agent.name!r} joined with incarnation {agent.incarnation} before: use a higher one"
        )
    else:
        _forget_lanes(catalog, agent.name, by.incarnation)
    before = dict(agent.shards)
    agent.state = transition(AGENT_TRANSITIONS, agent.state, AgentTransition.JOINED)
    agent.lost_at = 0.0
    agent.incarnation, agent.host, agent.site = by.incarnation, command.host, command.site
    agent.rack, agent.cache_bytes = command.rack, command.cache_bytes
    stated = {(holding.model, holding.replica, holding.shard): holding for holding in command.holds}
    dropped = tuple(h for h in command.holds if (h.model, h.replica, h.shard) not in agent.shards)
    _restate(catalog, agent, before, stated, out)
    joined = AgentJoined(
        agent=agent.name,
        incarnation=agent.incarnation,
        host=agent.host,
        site=agent.site,
        rack=agent.rack,
        kept=tuple(_believed(catalog, key) for key in agent.shards),
        dropped=dropped,
    )
    out.insert(0, joined)


def _believed(catalog: Catalog, key: tuple[str, str, int]) -> HeldShard:
    """Say what the log takes the shard to hold: its root, and its version if all of its replica has it."""
    model_name, replica_name, index = key
    replica = catalog.models[model_name].replicas[replica_name]
    root = replica.members[index].root
    return HeldShard(model=model_name, replica=replica_name, shard=index, version=replica.version, root=root)


def _forget_lanes(catalog: Catalog, agent: str, incarnation: int) -> None:
    """Drop what older incarnations' lanes said: `live_agent` refuses them from now on."""
    # By name: to look through all lanes of thousands of agents, whenever one of them joins, would take seconds.
    for lane in (agent, *(f"{agent}/{number}" for number in range(LANES_MAX))):
        last = catalog.lanes.get(lane)
        if last is not None and last.incarnation < incarnation:
            del catalog.lanes[lane]


def _restate(
    catalog: Catalog,
    agent: AgentRecord,
    before: dict[tuple[str, str, int], None],
    stated: dict[tuple[str, str, int], HeldShard],
    out: Out,
) -> None:
    """Empty all of the agent's shards, then believe again those whose root the log knows."""
    touched: dict[tuple[str, str], None] = {}
    for model_name, replica_name, index in before:
        model = catalog.models[model_name]
        replica = model.replicas[replica_name]
        shard = replica.members[index]
        touched[model_name, replica_name] = None
        _take_out(model, replica, shard, f"agent {agent.name!r}, which owns shard {index}, began anew", out)
        holding = stated.get((model_name, replica_name, index))
        shard.aside = catalog.level >= Level.LEAVING_COPIES and _is_aside(holding)
        if holding is None:
            _remove(catalog, model, replica, shard)
        elif _is_vouched_for(model, replica, shard, holding):
            move_shard(shard, ShardTransition.RESTATED, holding.version, holding.root)
    for model_name, replica_name in touched:
        model = catalog.models[model_name]
        _tell_change(model, model.replicas[replica_name], agent.name, out)
        _settle(catalog, model, replica_name, "lost", out)


def _tell_change(model: Model, replica: Replica, agent: str, out: Out) -> None:
    """Say which replicas an agent's return has ended or made whole, so that events alone tell what is ready."""
    before, after = replica.version, common_version(replica)
    if before is not None and after != before:
        out.append(ReplicaLost(model=model.name, replica=replica.name, agent=agent, version=before))
    refresh_availability(model, replica, "lost", out)
    if after is not None and after != before:
        out.append(ReplicaReady(model=model.name, replica=replica.name, version=after))


def _is_vouched_for(model: Model, replica: Replica, shard: Shard, holding: HeldShard) -> bool:
    """Tell whether the log keeps this root for the shard at this version, so that what is stated can be believed."""
    if holding.version is None or holding.root is None:
        return False
    if replica.cache not in (None, holding.version):
        return False
    known = known_root(model, replica, shard, holding.version)
    return known == holding.root and not is_retired(model, holding.version)


def _is_aside(holding: HeldShard | None) -> bool:
    """Tell whether the agent says that it can't take back its part of a copy: it names the version, and no root.

    Whatever else an agent states has both or neither.
    """
    return holding is not None and holding.version is not None and holding.root is None


def _settle(catalog: Catalog, model: Model, replica_name: str, reason: str, out: Out) -> None:
    """After shards went: bring the replica's version up to date, and drop the replica when none is left."""
    replica = model.replicas[replica_name]
    refresh_availability(model, replica, reason, out)
    if not replica.members:
        del model.replicas[replica_name]
    rounds.decide_waiting_rounds(catalog, model, out)


def _take_out(model: Model, replica: Replica, shard: Shard, why: str, out: Out) -> None:
    """Let one shard hold nothing and wait for nothing. Its siblings' round fails if it was counted on."""
    move_shard(shard, ShardTransition.LOST)
    replica.offers.pop(shard.index, None)
    current = replica.round
    if current is not None:
        if current.state is RoundState.JOINING and shard.index in current.wants and len(current.wants) > 1:
            current.leave(shard.index)
        elif current.state is not RoundState.JOINING or shard.index in current.wants:
            rounds.interrupt(model, replica, why, out)


def _remove(catalog: Catalog, model: Model, replica: Replica, shard: Shard) -> None:
    del replica.members[shard.index]
    cache_replicas.forget_shard(catalog, model, replica, shard)


def lead(catalog: Catalog, command: Lead, out: Out) -> None:
    """Let a leader's term count, before it has any agent to expire: what a lower one still says is refused."""
    if command.by is None or not is_registry_sender(command.by):
        raise CommandRefused(BadCommand, "only a registry may say that it leads")
    checked_name("registry", command.registry)
    checked_number("term", command.term)
    if command.term <= catalog.term:
        raise CommandRefused(
            BadCommand, f"term {command.term} is over: term {catalog.term} has spoken, so take a higher one"
        )
    checked_number("level", command.level)
    check_level(catalog.job, command.level)
    catalog.term = command.term
    if catalog.level < Level.FORGETTING <= command.level:
        for agent in catalog.agents.values():
            # When those were lost that are lost already was not kept: they have all of their time from here on.
            agent.lost_at = catalog.time if agent.state is AgentState.LOST else 0.0
    catalog.level = max(catalog.level, command.level)
    out.append(RegistryLeads(registry=command.registry, term=command.term, level=catalog.level))


def expire(catalog: Catalog, command: Expire, out: Out) -> None:
    """Count an agent as lost, on the word of the highest leader's term seen. No agent's word does that."""
    if command.by is None or not is_registry_sender(command.by):
        raise CommandRefused(BadCommand, "only a registry may say that an agent is lost")
    checked_number("term", command.term)
    if command.term < catalog.term:
        raise CommandRefused(BadCommand, f"term {command.term} is over: term {catalog.term} has spoken")
    agent = catalog.agents.get(command.agent)
    if agent is None or agent.incarnation != command.incarnation or agent.state is not AgentState.LIVE:
        raise CommandRefused(BadCommand, f"agent {command.agent!r} has no live incarnation {command.incarnation}")
    catalog.term = command.term
    agent.state = transition(AGENT_TRANSITIONS, agent.state, AgentTransition.EXPIRED)
    agent.lost_at = catalog.time if catalog.level >= Level.FORGETTING else 0.0
    out.append(AgentLost(agent=agent.name, incarnation=agent.incarnation, term=command.term))
    touched: dict[tuple[str, str], None] = {}
    for model_name, replica_name, index in agent.shards:
        model = catalog.models[model_name]
        replica = model.replicas[replica_name]
        if (model_name, replica_name) not in touched:
            out.append(ReplicaLost(model=model_name, replica=replica_name, agent=agent.name, version=replica.version))
        touched[model_name, replica_name] = None
        _take_out(
            model, replica, replica.members[index], f"agent {agent.name!r}, which owns shard {index}, was lost", out
        )
    for model_name, replica_name in touched:
        _settle(catalog, catalog.models[model_name], replica_name, "lost", out)


def kept_s(catalog: Catalog, agent: AgentRecord) -> float:
    """Return for how long a lost agent is remembered."""
    spots = (catalog.models[model].replicas[replica].spot for model, replica, _ in agent.shards)
    return SPOT_KEPT_S if all(spots) else LOST_KEPT_S


def forget_agent(catalog: Catalog, command: ForgetAgent, out: Out) -> None:
    """Know no more of an agent that was lost long ago: what it had is released, and its name begins anew."""
    if command.by is None or not is_registry_sender(command.by):
        raise CommandRefused(BadCommand, "only a registry may say that an agent is forgotten")
    checked_number("term", command.term)
    if command.term < catalog.term:
        raise CommandRefused(BadCommand, f"term {command.term} is over: term {catalog.term} has spoken")
    agent = catalog.agents.get(command.agent)
    if agent is None or agent.incarnation != command.incarnation or agent.state is not AgentState.LOST:
        raise CommandRefused(BadCommand, f"agent {command.agent!r:.80} has no lost incarnation {command.incarnation}")
    kept, lost = kept_s(catalog, agent), catalog.time - agent.lost_at
    if lost < kept:
        raise CommandRefused(
            BadCommand, f"agent {agent.name!r} was lost {lost:.0f} s ago, and is remembered for {kept:.0f} s: wait"
        )
    catalog.term = command.term
    out.append(AgentForgotten(agent=agent.name, incarnation=agent.incarnation, term=command.term))
    touched: dict[tuple[str, str], None] = {}
    for model_name, replica_name, index in list(agent.shards):
        model = catalog.models[model_name]
        replica = model.replicas[replica_name]
        touched[model_name, replica_name] = None
        shard = replica.members[index]
        _take_out(model, replica, shard, f"agent {agent.name!r}, which owned shard {index}, is forgotten", out)
        _remove(catalog, model, replica, shard)
        out.append(ShardReleased(model=model_name, replica=replica_name, shard=index))
    for model_name, replica_name in touched:
        _settle(catalog, catalog.models[model_name], replica_name, "released", out)
    _forget_lanes(catalog, agent.name, agent.incarnation + 1)
    catalog.leaving.pop(agent.name, None)
    del catalog.agents[agent.name]


def register(catalog: Catalog, command: Register, out: Out) -> None:
    """Take a new shard, or one that comes back to the agent that has it, or one whose agent is lost."""
    agent = live_agent(catalog, command.by)
    checked_name("model", command.model)
    checked_name("replica", command.replica)
    where = f"{command.model}/{command.replica}"
    if not 1 <= command.shards <= SHARDS_MAX or not 0 <= command.shard < command.shards:
        raise CommandRefused(
            LayoutMismatch,
            f"shard {command.shard} of {command.shards} of {where} is out of range: shards count from 0, at most "
            f"{SHARDS_MAX}",
        )
    checked_digest("layout", command.layout)
    checked_number("size", command.nbytes)
    known = catalog.models.get(command.model)
    replica = known.replicas.get(command.replica) if known is not None else None
    if replica is not None:
        _check_fits(catalog, agent, replica, command)
    if replica is None or command.shard not in replica.members:
        _check_room(catalog, agent, command)
    model = known or _new_model(catalog, command.model)
    replica = replica or _new_replica(model, command)
    old = replica.members.get(command.shard)
    siblings = _siblings(replica, command.shard)
    if old is not None and old.agent != agent.name:
        catalog.agents[old.agent].shards.pop((model.name, replica.name, old.index), None)
    if old is None or old.agent != agent.name:
        replica.members[command.shard] = Shard(command.shard, agent.name, command.layout, command.nbytes)
        agent.shards[model.name, replica.name, command.shard] = None
    out.append(
        ShardRegistered(
            model=model.name,
            replica=replica.name,
            shard=command.shard,
            shards=replica.shards,
            spot=replica.spot,
            agent=agent.name,
            layout=command.layout,
            siblings=siblings,
        )
    )


def _siblings(replica: Replica, index: int) -> tuple[Sibling, ...]:
    """Return shards that were registered before: neighbours, and those at distances that are powers of two.

    All of them would be two million pairs for 2,048 shards. Tensor parallel ranks are neighbours, stages and experts
    mostly lie powers of two apart, so a shard that shares tensors is compared with another that does.
    """
    distances = [*range(1, NEIGHBOURS_MAX + 1), *(1 << bit for bit in range(replica.shards.bit_length()))]
    places = sorted({place for far in distances for place in (index - far, index + far)})
    members = (replica.members.get(place) for place in places)
    return tuple(Sibling(member.index, member.layout) for member in members if member is not None)


def _check_room(catalog: Catalog, agent: AgentRecord, command: Register) -> None:
    """Refuse a new shard on an agent that leaves, or over the job's quota."""
    if agent.draining:
        raise CommandRefused(
            AgentUnavailable,
            f"agent {agent.name!r} is being drained and takes no new shard: connect to another one, or end it with "
            f"'tensorhub drain {agent.name} --end'",
        )
    why = cache_replicas.over_quota(catalog, command.nbytes)
    if why is not None:
        raise CommandRefused(MemoryExhausted, why)


def _check_fits(catalog: Catalog, agent: AgentRecord, replica: Replica, command: Register) -> None:
    where = f"{command.model}/{command.replica}"
    if replica.mapped != command.mapped:
        raise CommandRefused(
            LayoutMismatch,
            f"{where} was registered {'with' if replica.mapped else 'without'} install='mapped': use the same for all "
            "its shards, or release them first",
        )
    if replica.shards != command.shards or replica.spot != command.spot:
        raise CommandRefused(
            LayoutMismatch,
            f"{where} was registered with shards={replica.shards}, spot={replica.spot}, not shards={command.shards}, "
            f"spot={command.spot}: use the same for all its shards, or release them first",
        )
    old = replica.members.get(command.shard)
    if old is None:
        return
    if old.agent == agent.name:
        if old.layout != command.layout:
            raise CommandRefused(
                LayoutMismatch,
                f"shard {command.shard} of {where} stands with another layout ({old.layout[:12]}, not "
                f"{command.layout[:12]}): release it first, or use another replica name",
            )
    elif catalog.agents[old.agent].state is AgentState.LIVE:
        raise CommandRefused(
            ReplicaConflict,
            f"shard {command.shard} of {where} stands on agent {old.agent!r}: release it there, or use another "
            "replica name",
        )


def _new_model(catalog: Catalog, name: str) -> Model:
    if len(catalog.models) >= MODELS_MAX:
        raise CommandRefused(BadCommand, f"the job has {MODELS_MAX} models already, which is the limit")
    model = catalog.models[name] = Model(name)
    return model


def _new_replica(model: Model, command: Register) -> Replica:
    if len(model.replicas) >= REPLICAS_MAX:
        raise CommandRefused(
            BadCommand, f"model {model.name!r} has {REPLICAS_MAX} replicas already, which is the limit"
        )
    replica = model.replicas[command.replica] = Replica(
        command.replica, command.shards, command.spot, mapped=command.mapped
    )
    return replica


def release(catalog: Catalog, command: Release, out: Out) -> None:
    """Let a shard go. A published one must have been drained first, which is the agent's to do."""
    model, replica, shard = owned_shard(catalog, command)
    if shard.state is ShardState.READY:
        raise CommandRefused(
            ReplicaConflict,
            f"shard {shard.index} of {model.name}/{replica.name} still has version {shard.version} published: "
            "unpublish it first",
        )
    if replica.cache is not None and replica.cache in model.versions:
        # Its agent has no worker to please: it says so because it can't hold the copy.
        model.versions[replica.cache].shunned[shard.agent] = catalog.time
    _take_out(model, replica, shard, f"shard {shard.index} was released", out)
    _remove(catalog, model, replica, shard)
    out.insert(0, ShardReleased(model=model.name, replica=replica.name, shard=shard.index))
    _settle(catalog, model, replica.name, "released", out)


HANDLERS: Final[dict[type, Callable[..., None]]] = {
    Join: join,
    Register: register,
    Release: release,
    Lead: lead,
    Expire: expire,
    ForgetAgent: forget_agent,
}
"""What carries out which command; `apply` looks here."""
