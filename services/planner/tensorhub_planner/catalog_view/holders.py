"""Which shards of the catalog can serve a request, and what the reader's own shard is. Pure.

A holder is a shard of a live agent that is ready at the version. `planning.plan` decides whether its *layout* suits the
reader: shards with equal `key` have equal bytes at equal versions (`catalog.state.root_key`).

A shard whose round was decided for the version is a half-filled holder. It has a `turn`, and gives what it has to
readers of later turns. It will have everything, since it reads from ready shards and from earlier turns alone.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from tensorhub_common.catalog.state import AgentRecord, Catalog, Model, Replica, Shard, Version, root_key
from tensorhub_common.catalog.transitions import AgentState, RoundState, ShardState
from tensorhub_common.errors import BadCommand, ReplicaConflict, VersionUnavailable
from tensorhub_common.protocol.log.commands import NO_ROOT
from tensorhub_common.protocol.plans import PlanRequest, ReadPriority, Refusal, SourceId
from tensorhub_common.protocol.queries import VersionState
from tensorhub_common.protocol.ranges import Ranges
from tensorhub_planner.primitives.source_set import LayoutSet
from tensorhub_planner.primitives.topology import AgentPlace, Distance, Topology, between

ROLLS_MAX: Final = 32
"""Limit of lookups kept of an unchanged catalog: replicas that read by programs at once."""
ABSENT_MAX: Final = 8
"""Limit of shards that can't serve named in a refusal; the rest are counted."""


class Holder(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A shard that has the version, or a part of it, or will have."""

    source: SourceId
    key: str
    layout: str
    shards: int
    root: str | None
    pieces: Ranges | None = None
    """What it has or will have, in numbers of its own layout's pieces; None means all."""
    turn: ReadPriority | None = None
    """Of a half-filled one, when its round was decided; a ready one has none."""
    depth: int = 1
    """How many half-filled replicas the bytes of a half-filled one come through, itself included, as far as known."""
    asked: bool = False
    """Its round has begun: it has its plan and leases, from whichever planner, and its sources report that."""


class ReaderShard(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The reader's own shard, as the log knows it."""

    me: SourceId
    key: str
    layout: str
    shards: int
    root: str | None = None
    """The root that it must have at the version by the log; None: no shard of its layout has had the version."""


class HolderSet(msgspec.Struct, frozen=True):
    """The holders of a version, and in words the shards that can't serve it; `absent_more` of those are not named."""

    able: tuple[Holder, ...]
    absent: tuple[str, ...] = ()
    absent_more: int = 0
    draining: bool = False
    """A shard that had the version is draining: half-filled ones that read from it go on."""
    draining_on: tuple[str, ...] = ()
    """The agents of such shards."""
    made: Ranges = ()
    """Units that no shard has, and that follow from units of ready shards: scales by partial amax values."""


@dataclass(frozen=True)
class ReplicaHolders:
    """A lookup for all shards of a replica, where holders of any layout count."""

    holders: HolderSet
    topology: Topology
    originals: tuple[str, ...]

    @cached_property
    def is_ready(self) -> bool:
        """No holder is half-filled or draining."""
        return not self.holders.draining and all(holder.turn is None for holder in self.holders.able)

    @cached_property
    def agents(self) -> frozenset[str]:
        """The agents of all holders."""
        return frozenset(holder.source.agent for holder in self.holders.able)

    @cached_property
    def by_layout(self) -> Mapping[str, Sequence[Holder]]:
        """The holders of each layout."""
        found: dict[str, list[Holder]] = {}
        for holder in self.holders.able:
            found.setdefault(holder.layout, []).append(holder)
        return found

    @cached_property
    def original_layouts(self) -> frozenset[str]:
        """The layouts in which the version was published."""
        return frozenset(self.originals)

    @cached_property
    def source_set(self) -> LayoutSet:
        """The layouts of all holders, each once: of ready ones first, in the order of replicas and shards."""
        in_order = sorted(
            self.holders.able, key=lambda each: (each.turn is not None, each.source.replica, each.source.shard)
        )
        layouts = dict.fromkeys(holder.layout for holder in in_order)
        return LayoutSet(tuple(layouts), tuple(each for each in self.originals if each in layouts))

    @cached_property
    def original_set(self) -> LayoutSet | None:
        """The layouts in which the version was published, if each of them has a ready holder."""
        originals, ready = self.originals, {holder.layout for holder in self.holders.able if holder.turn is None}
        return LayoutSet(originals, originals) if originals and ready.issuperset(originals) else None

    @cached_property
    def places(self) -> Mapping[SourceId, int]:
        """The index of each holder."""
        return {holder.source: place for place, holder in enumerate(self.holders.able)}

    @cached_property
    def standing(self) -> bytes:
        """A digest of the holders, their places and their layouts: all that does not depend on the version."""
        places = self.topology.places
        rows = [(each.source, each.layout, each.turn, places[each.source.agent]) for each in self.holders.able]
        return hashlib.blake2b(msgspec.msgpack.encode(rows), digest_size=32).digest()


class Candidates(msgspec.Struct, frozen=True):
    """The lookup in the catalog for one request."""

    seat: ReaderShard
    holders: HolderSet
    topology: Topology
    roll: ReplicaHolders | None = None
    """The lookup for all shards of the reader's replica, where holders of any layout count."""

    @property
    def of_replica(self) -> ReplicaHolders:
        """That lookup, which every reader by a program has."""
        assert self.roll is not None
        return self.roll


class RollKey(NamedTuple):
    """The key of a lookup."""

    model: str
    replica: str
    version: int


HoldersCache = dict[RollKey, ReplicaHolders]
"""The lookups in an unchanged catalog."""


def named(source: SourceId) -> str:
    """Name a source in a sentence."""
    return f"{source.replica}/{source.shard} on {source.agent}"


def find_candidates(
    catalog: Catalog,
    demand: PlanRequest,
    *,
    pipelining: bool,
    any_layout: bool = False,
    rolls: HoldersCache | None = None,
) -> Candidates | Refusal:
    """Look up which shards can serve the request; refuse one whose reader or version the log doesn't know.

    Without `pipelining` a half-filled shard is no holder. With `any_layout` every shard of every replica counts that
    has the version; otherwise only the shard at the reader's own index of each replica. `rolls` are earlier lookups.
    """
    model = catalog.models.get(demand.model)
    if model is None:
        return _refusal(VersionUnavailable, f"model {demand.model!r} is unknown in job {catalog.job!r}")
    seat = _seat(catalog, model, demand)
    if isinstance(seat, Refusal):
        return seat
    if not any_layout:
        roll = _roll(catalog, model, demand, seat, pipelining=pipelining)
        return Candidates(seat, roll.holders, roll.topology)
    rolls = {} if rolls is None else rolls
    key = RollKey(demand.model, demand.replica, demand.version)
    known = rolls.get(key)
    if known is None:
        if len(rolls) >= ROLLS_MAX:
            rolls.clear()
        known = rolls[key] = _roll(catalog, model, demand, None, pipelining=pipelining)
    return Candidates(seat, known.holders, known.topology, known)


def is_held(catalog: Catalog, demand: PlanRequest) -> bool:
    """Tell whether the log counts a holder of the version; for a reader that maps, one that it could map."""
    model = catalog.models.get(demand.model)
    version = None if model is None else model.versions.get(demand.version)
    if model is None or version is None or version.state is not VersionState.AVAILABLE:
        return False
    seat = _seat(catalog, model, demand)
    if isinstance(seat, Refusal) or not demand.mapped:
        return not isinstance(seat, Refusal)
    roll = _roll(catalog, model, demand, seat, pipelining=False)
    places = roll.topology.places
    here = places[demand.agent]
    suitable = (each.source.agent for each in roll.holders.able if each.key == seat.key)
    return any(between(here, places[agent]) <= Distance.HOST for agent in suitable)


def registered_layouts(catalog: Catalog, demand: PlanRequest) -> frozenset[str]:
    """Return the layouts of all shards of other replicas of the model, whatever they hold."""
    replicas = catalog.models[demand.model].replicas.values()
    others = (replica for replica in replicas if replica.name != demand.replica and not replica.mapped)
    return frozenset(shard.layout for replica in others for shard in replica.members.values())


def replica_layouts(catalog: Catalog, demand: PlanRequest) -> tuple[str, ...]:
    """Return the layouts of the reader's own replica, each once, to one of its shards; to the others none.

    It is the first shard that no root is known for, and which therefore reads by a program. A replica that is not whole
    has no such shard, nor has one that is gone since the lookup of its request.
    """
    model = catalog.models.get(demand.model)
    replica = None if model is None else model.replicas.get(demand.replica)
    version = None if model is None else model.versions.get(demand.version)
    if replica is None or version is None or not demand.shard < replica.shards == len(replica.members):
        return ()
    members, count = replica.members, replica.shards
    # Thousands of shards ask this, and the first condition answers nearly all of them.
    if any(root_key(count, index, members[index].layout) not in version.roots for index in range(demand.shard)):
        return ()
    return tuple(dict.fromkeys(members[index].layout for index in range(count)))


def _seat(catalog: Catalog, model: Model, demand: PlanRequest) -> ReaderShard | Refusal:
    replica = model.replicas.get(demand.replica)
    shard = replica.members.get(demand.shard) if replica is not None else None
    if replica is None or shard is None or shard.agent != demand.agent:
        where = f"shard {demand.shard} of {demand.model}/{demand.replica}"
        if shard is None or replica is None:
            return _refusal(BadCommand, f"{where} is not registered: register it before it reads")
        return _refusal(ReplicaConflict, f"{where} is on agent {shard.agent!r}, not {demand.agent!r}")
    if demand.version not in model.versions:
        return _refusal(VersionUnavailable, f"the log knows no version {demand.version} of model {demand.model!r}")
    key = root_key(replica.shards, shard.index, shard.layout)
    return ReaderShard(
        me=SourceId(shard.agent, catalog.agents[shard.agent].incarnation, replica.name, shard.index),
        key=key,
        layout=shard.layout,
        shards=replica.shards,
        root=model.versions[demand.version].roots.get(key),
    )


def _roll(
    catalog: Catalog, model: Model, demand: PlanRequest, seat: ReaderShard | None, *, pipelining: bool
) -> ReplicaHolders:
    """Go through the replicas: for one reader, or for all shards of its replica and any layout."""
    agents = catalog.agents
    mine = (
        [shard.agent for shard in model.replicas[demand.replica].members.values()] if seat is None else [demand.agent]
    )
    places = {name: AgentPlace(agents[name].host, agents[name].site, agents[name].rack) for name in mine}
    holders: list[Holder] = []
    absent: list[str] = []
    absent_count = 0
    draining_on: list[str] = []
    for replica in model.replicas.values():
        # The reader's own replica is what the round fills: whatever its shards hold is about to be overwritten.
        if replica.name == demand.replica:
            continue
        # A mapped replica has no memory of its own, and is no source.
        for shard in () if replica.mapped else _candidates(replica, seat):
            agent = agents[shard.agent]
            holder = _holder(model, replica, shard, agent, demand.version, pipelining, seat is None)
            if holder is not None:
                holders.append(holder)
                places[agent.name] = AgentPlace(agent.host, agent.site, agent.rack)
                continue
            if shard.state is ShardState.DRAINING and shard.version == demand.version:
                draining_on.append(agent.name)
                places[agent.name] = AgentPlace(agent.host, agent.site, agent.rack)
            absent_count += 1
            if len(absent) < ABSENT_MAX:
                absent.append(f"{replica.name}/{shard.index} on {agent.name} {_state(shard, agent.state)}")
    found = HolderSet(
        tuple(holders),
        tuple(absent),
        absent_count - len(absent),
        draining=bool(draining_on),
        draining_on=tuple(draining_on),
    )
    # A reader of its own layout does not need the published layouts, and for thousands of shards they take long.
    return ReplicaHolders(found, Topology(places), _originals(model.versions[demand.version]) if seat is None else ())


def _originals(version: Version) -> tuple[str, ...]:
    """Return the layouts in which a version was published: the publisher's roots are the first that the log kept."""
    shards = int(next(iter(version.roots), "0").partition(".")[0])
    return tuple(sorted({key.rpartition(".")[2] for key in islice(version.roots, shards)}))


def _holder(
    model: Model,
    replica: Replica,
    shard: Shard,
    agent: AgentRecord,
    version: int,
    pipelining: bool,  # noqa: FBT001 (as `find_candidates` has them)
    any_layout: bool,  # noqa: FBT001
) -> Holder | None:
    """Return a shard as a holder of a version, or None."""
    if agent.state is not AgentState.LIVE:
        return None
    key = root_key(replica.shards, shard.index, shard.layout)
    turn = None
    root = shard.root
    if shard.state is not ShardState.READY or shard.version != version:
        turn = _turn(replica, shard, version) if pipelining else None
        root = model.versions[version].roots.get(key)
        # Without a root no piece can be verified before all are there; a reader by a program trusts the source instead.
        if turn is None or (root in (None, NO_ROOT) and not any_layout):
            return None
    return Holder(
        source=SourceId(agent.name, agent.incarnation, replica.name, shard.index),
        key=key,
        layout=shard.layout,
        shards=replica.shards,
        root=root,
        turn=turn,
        asked=turn is not None and replica.round is not None and replica.round.state is RoundState.STARTED,
    )


def _turn(replica: Replica, shard: Shard, version: int) -> ReadPriority | None:
    """Return the turn of a replica that is to be filled with the version, as its agents read it in the log.

    The catalog keeps it, so a planner that has begun with a snapshot knows it too. A staged shard goes on serving its
    present version until all swap, so it serves nothing of its spare memory.
    """
    current = replica.round
    if current is None or not current.decided or current.version != version or shard.index in current.staged:
        return None
    decided = current.state in (RoundState.DECIDED, RoundState.STARTED)
    return ReadPriority(current.decided, current.number) if decided else None


def _candidates(replica: Replica, seat: ReaderShard | None) -> Iterable[Shard]:
    """Return the shard at the reader's index, any shard of a replica with another number, or all without a reader."""
    if seat is None:
        return replica.members.values()
    if replica.shards == seat.shards:
        at_seat = replica.members.get(seat.me.shard)
        return () if at_seat is None else (at_seat,)
    return islice(replica.members.values(), 1)


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
