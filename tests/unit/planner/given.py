"""Holders, demands and places for the planner's tests: a reader `rollout/0` on agent `me`, and shards around it."""

from collections.abc import Sequence
from typing import Any

from tensorhub_common.catalog.state import root_key
from tensorhub_common.protocol.plans import Plan, PlanRequest, ReadPriority, Refusal, SourceId
from tensorhub_common.protocol.ranges import Range, Ranges
from tensorhub_planner.catalog_view.holders import Holder, HolderSet, ReaderShard
from tensorhub_planner.load.ledger import LoadView
from tensorhub_planner.planning.plan import OnlyOtherLayouts, PlanOutcome, make_plan
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_planner.primitives.piece_sizes import PieceSizes
from tensorhub_planner.primitives.topology import AgentPlace, Topology
from tensorhub_simulator.drivers.catalog import CatalogDriver

LAYOUT = "l" * 64
ROOT = "r" * 32
ME = SourceId("me", 1, "rollout", 0)
SEAT = ReaderShard(me=ME, key=root_key(1, 0, LAYOUT), layout=LAYOUT, shards=1)
MY_TURN = ReadPriority(50, 50)
MIB = 1024 * 1024
SIZES = PieceSizes([4 * MIB] * 256)
"""1 GiB in 256 pieces."""
TOPOLOGY = Topology(
    {
        "me": AgentPlace("node-1", "berlin"),
        "beside": AgentPlace("node-1", "berlin"),
        **{name: AgentPlace(f"host-of-{name}", "berlin") for name in ("a", "b", "c", "d", "e")},
        "far": AgentPlace("node-1", "paris"),
    }
)
"""`beside` on the reader's host, `a` to `e` each on a host of its own, `far` on a host of another site."""

GIVEN_LINKS = Topology({**TOPOLOGY.places, "farther": AgentPlace("node-1", "oslo")})
"""The same with a third site."""


def source(agent: str, replica: str | None = None, shard: int = 0, incarnation: int = 1) -> SourceId:
    return SourceId(agent, incarnation, replica or f"on-{agent}", shard)


def holder(
    agent: str,
    *,
    layout: str = LAYOUT,
    shards: int = 1,
    shard: int = 0,
    root: str | None = ROOT,
    pieces: Ranges | None = None,
    turn: int | None = None,
    depth: int = 1,
) -> Holder:
    """Return a holder; one with a turn is half-filled. The reader's own turn is `MY_TURN`."""
    return Holder(
        source=source(agent, shard=shard),
        key=root_key(shards, shard, layout),
        layout=layout,
        shards=shards,
        root=root,
        pieces=pieces,
        turn=None if turn is None else ReadPriority(turn, turn),
        depth=depth,
    )


def demand(pieces: tuple[Range, ...] | None = None, avoid: Sequence[str] = (), root: str | None = ROOT) -> PlanRequest:
    return PlanRequest(
        model="policy",
        version=12,
        replica="rollout",
        shard=0,
        agent="me",
        root=root,
        at_seq=1,
        pieces=pieces,
        avoid=tuple(source(agent) for agent in avoid),
        turn=MY_TURN,
    )


def answer(
    *holders: Holder,
    wants: PlanRequest | None = None,
    sizes: PieceSizes = SIZES,
    load: LoadView | None = None,
    limits: PlanLimits | None = None,
    topology: Topology = TOPOLOGY,
    absent: tuple[str, ...] = (),
) -> PlanOutcome:
    return make_plan(
        wants or demand(), SEAT, sizes, HolderSet(holders, absent), topology, load or {}, limits or PlanLimits()
    )


def planned(*holders: Holder, **more: Any) -> Plan:
    """Return the plan; the arguments are those of `answer`."""
    found = answer(*holders, **more)
    assert isinstance(found, Plan), found
    return found


def refused(found: PlanOutcome) -> Refusal:
    assert isinstance(found, Refusal), found
    return found


def differs(found: PlanOutcome) -> OnlyOtherLayouts:
    assert isinstance(found, OnlyOtherLayouts), found
    return found


def agents(found: Plan) -> list[str]:
    """Name the agents that are read from, in the plan's order."""
    return [share.source.agent for share in found.shares]


def pieces_of(ranges: Ranges) -> set[int]:
    return {piece for first, count in ranges for piece in range(first, first + count)}


def register_replica(world: CatalogDriver, name: str, *layouts: str, spot: bool = False) -> None:
    """Register a replica, each shard on an agent of its own."""
    for index, layout in enumerate(layouts):
        world.join(f"{name}-{index}")
        world.register(f"{name}-{index}", name, index, len(layouts), layout=layout, spot=spot)


def wait_for_latest(world: CatalogDriver, name: str, shards: int) -> None:
    """Let all shards of a replica wait for the latest version."""
    for index in range(shards):
        world.want(name, "latest", index)
