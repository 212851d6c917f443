"""The catalog as users see it: pure functions from a catalog to what `ask.versions`, `replicas` and `status` answer.

A model that is not registered yet has no versions and no replicas. That is no error: a client that waits for it asks
again.
"""

from tensorhub_common.catalog.retention import retained
from tensorhub_common.catalog.state import Catalog, Model, Replica, Shard, Version
from tensorhub_common.catalog.transitions import AgentState
from tensorhub_common.protocol.queries import (
    AgentInfo,
    ModelInfo,
    ReplicaInfo,
    Replicas,
    ShardInfo,
    Status,
    VersionInfo,
    Versions,
    VersionState,
)


def versions(catalog: Catalog, model_name: str) -> Versions:
    """Return the versions of a model that the catalog remembers, oldest first."""
    model = catalog.models.get(model_name)
    if model is None:
        return Versions(versions=())
    holders: dict[int, list[str]] = {}
    for replica in model.replicas.values():
        if replica.version is not None and not replica.mapped:
            holders.setdefault(replica.version, []).append(replica.name)
    keep = retained(model)
    return Versions(
        versions=tuple(
            _version(model, model.versions[number], tuple(holders.get(number, ())), keep)
            for number in sorted(model.versions)
        )
    )


def _version(model: Model, version: Version, holders: tuple[str, ...], keep: set[int]) -> VersionInfo:
    return VersionInfo(
        model=model.name,
        version=version.number,
        state=str(version.state),
        publisher=version.publisher,
        published_at=version.time,
        holders=holders,
        retained=version.number in keep,
        gone=version.gone if version.state is VersionState.UNAVAILABLE else "",
    )


def replicas(catalog: Catalog, model_name: str) -> Replicas:
    """Return the replicas of a model, in the order of their registration."""
    model = catalog.models.get(model_name)
    if model is None:
        return Replicas(replicas=())
    return Replicas(replicas=tuple(_replica(catalog, model, replica) for replica in model.replicas.values()))


def _replica(catalog: Catalog, model: Model, replica: Replica) -> ReplicaInfo:
    return ReplicaInfo(
        model=model.name,
        replica=replica.name,
        version=replica.version,
        shards=replica.shards,
        spot=replica.spot,
        mapped=replica.mapped,
        round=None if replica.round is None else replica.round.number,
        members=tuple(_shard(catalog, replica.members[index]) for index in sorted(replica.members)),
    )


def _shard(catalog: Catalog, shard: Shard) -> ShardInfo:
    agent = catalog.agents[shard.agent]
    return ShardInfo(
        shard=shard.index,
        state=str(shard.state),
        version=shard.version,
        agent=agent.name,
        host=agent.host,
        live=agent.state is AgentState.LIVE,
        nbytes=shard.nbytes,
        layout=shard.layout,
        lost_at=agent.lost_at if agent.state is AgentState.LOST else 0.0,
    )


def status(catalog: Catalog, seq: int, registry: str, term: int) -> Status:
    """Return the job in short, as this registry has folded it up to the entry `seq`, in its term as the leader."""
    return Status(
        job=catalog.job,
        seq=seq,
        registry=registry,
        term=term,
        level=catalog.level,
        models=tuple(
            ModelInfo(
                model=model.name,
                last=model.last,
                replicas=len(model.replicas),
                retain=model.retain,
                pins=tuple(sorted(model.pins)),
            )
            for model in catalog.models.values()
        ),
        agents=tuple(
            AgentInfo(
                agent=agent.name,
                host=agent.host,
                site=agent.site,
                rack=agent.rack,
                live=agent.state is AgentState.LIVE,
                incarnation=agent.incarnation,
                shards=len(agent.shards),
                draining=agent.draining,
                may_stop=agent.drained,
            )
            for agent in catalog.agents.values()
        ),
    )
