"""Which shards of the catalog can serve a demand, and what the reader's own shard is.

A holder is a shard of a live agent that stands ready at the version. Whether its *layout* suits the reader is not
decided here but in `plan`: `key` is the log's own word for "equal bytes at equal versions" (`catalog.state.root_key`).

A holder may have a part only (`pieces`), and may still be reading some of it from others (`feeds`): a half-filled
replica that serves downstream. The catalog knows no such holders yet; plan and proof treat them all the same.
"""

from typing import Final

import msgspec

from tensorhub_common.catalog.state import Catalog, Model, Replica, Shard, root_key
from tensorhub_common.catalog.table import AgentState, ShardState
from tensorhub_common.errors import BadCommand, ReplicaConflict, VersionUnavailable
from tensorhub_common.wire.transfer import Demand, Refusal, SourceId
from tensorhub_planner.ranges import Ranges
from tensorhub_planner.topology import Place, Topology

ABSENT_MAX: Final = 8
"""So many shards that can't serve are named in a refusal; the rest are counted."""


class Feed(msgspec.Struct, frozen=True):
    """Pieces that a holder does not have yet, and whom it reads them from. Numbers as in the holder's layout."""

    source: SourceId
    pieces: Ranges


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A shard that has the version, or a part of it, or will have."""

    source: SourceId
    key: str
    layout: str
    shards: int
    root: str | None
    pieces: Ranges | None = None
    """What it has or will have, in numbers of its own layout's pieces; None means all."""
    feeds: tuple[Feed, ...] = ()


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """The reader's own shard, as the log knows it."""

    me: SourceId
    key: str
    layout: str
    shards: int


class Holders(msgspec.Struct, frozen=True):
    """Who has the version, and in words who could have it and can't serve; of these, `absent_more` are not named."""

    able: tuple[Holder, ...]
    absent: tuple[str, ...] = ()
    absent_more: int = 0


class Found(msgspec.Struct, frozen=True):
    """All that the catalog says about a demand."""

    seat: Seat
    holders: Holders
    topology: Topology


def named(source: SourceId) -> str:
    """Name a source in a sentence."""
    return f"{source.replica}/{source.shard} on {source.agent}"


def find(catalog: Catalog, demand: Demand) -> Found | Refusal:
    """Look up who can serve the demand; refuse one whose reader or version the log doesn't know."""
    model = catalog.models.get(demand.model)
    if model is None:
        return _refusal(VersionUnavailable, f"model {demand.model!r} is unknown in job {catalog.job!r}")
    seat = _seat(catalog, model, demand)
    if isinstance(seat, Refusal):
        return seat
    if demand.version not in model.versions:
        return _refusal(VersionUnavailable, f"the log knows no version {demand.version} of model {demand.model!r}")
    return _found(catalog, model, demand, seat)


def _seat(catalog: Catalog, model: Model, demand: Demand) -> Seat | Refusal:
    where = f"shard {demand.shard} of {demand.model}/{demand.replica}"
    replica = model.replicas.get(demand.replica)
    shard = replica.members.get(demand.shard) if replica is not None else None
    if replica is None or shard is None:
        return _refusal(BadCommand, f"{where} is not registered: register it before it reads")
    if shard.agent != demand.agent:
        return _refusal(ReplicaConflict, f"{where} stands on agent {shard.agent!r}, not {demand.agent!r}")
    return Seat(
        me=SourceId(shard.agent, catalog.agents[shard.agent].incarnation, replica.name, shard.index),
        key=root_key(replica.shards, shard.index, shard.layout),
        layout=shard.layout,
        shards=replica.shards,
    )


def _found(catalog: Catalog, model: Model, demand: Demand, seat: Seat) -> Found:
    agents = catalog.agents
    mine = agents[demand.agent]
    places = {mine.name: Place(mine.host, mine.site)}
    holders: list[Holder] = []
    absent: list[str] = []
    absent_count = 0
    for replica in model.replicas.values():
        # The reader's own replica is what the round fills: whatever its shards hold is about to be overwritten.
        if replica.name == demand.replica:
            continue
        shard = _candidate(replica, seat)
        if shard is None:
            continue
        agent = agents[shard.agent]
        if shard.state is ShardState.READY and shard.version == demand.version and agent.state is AgentState.LIVE:
            holders.append(
                Holder(
                    source=SourceId(agent.name, agent.incarnation, replica.name, shard.index),
                    key=root_key(replica.shards, shard.index, shard.layout),
                    layout=shard.layout,
                    shards=replica.shards,
                    root=shard.root,
                )
            )
            places[agent.name] = Place(agent.host, agent.site)
            continue
        absent_count += 1
        if len(absent) < ABSENT_MAX:
            absent.append(f"{replica.name}/{shard.index} on {agent.name} {_state(shard, agent.state)}")
    return Found(seat, Holders(tuple(holders), tuple(absent), absent_count - len(absent)), Topology(places))


def _candidate(replica: Replica, seat: Seat) -> Shard | None:
    """Return the shard at the reader's seat; of a replica cut otherwise, any, to compare layouts with."""
    if replica.shards == seat.shards:
        return replica.members.get(seat.me.shard)
    return next(iter(replica.members.values()), None)


def _state(shard: Shard, agent: AgentState) -> str:
    if agent is not AgentState.LIVE:
        return "is lost"
    if shard.state is ShardState.READY:
        return f"holds version {shard.version}"
    if shard.state is ShardState.DRAINING:
        return f"is draining version {shard.version}"
    return f"is {shard.state}"


def _refusal(error: type[Exception], reason: str) -> Refusal:
    return Refusal(error=error.__name__, reason=reason)
