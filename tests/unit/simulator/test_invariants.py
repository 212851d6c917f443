"""What the fault simulator holds against a run: each invariant is broken once here, by words of the log or a state."""

import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.core.shard_state import MemoryState, ShardContents
from tensorhub_common.catalog.state import Offer, Round
from tensorhub_common.catalog.transitions import ShardState
from tensorhub_common.protocol.log.commands import AnyCommand, Drained, Expire, Granted, Join, Sender, Want
from tensorhub_common.protocol.log.events import (
    AgentJoined,
    AgentLost,
    AnyEvent,
    CommandRejected,
    Event,
    ModelRewound,
    ReplicaReady,
    RoundDecided,
    RoundJoined,
    RoundStarted,
    ShardDrained,
    ShardDraining,
    ShardFilled,
    ShardRegistered,
    VersionPublished,
)
from tensorhub_common.protocol.log.levels import Level
from tensorhub_common.protocol.plans import ReadPriority
from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.drawing import draw_config
from tensorhub_simulator.faultsim.invariants.log_agreement import check_going, check_standing
from tensorhub_simulator.faultsim.invariants.log_rules import LogRules, UpdateFloors
from tensorhub_simulator.faultsim.invariants.wait_graph import Fill, check_no_cycle
from tensorhub_simulator.faultsim.nodes.agent import AgentNode
from tensorhub_simulator.faultsim.runner.run import scaled_down
from tensorhub_simulator.faultsim.world import World


def broken_by(check: Callable[[], object]) -> str | None:
    """Say which invariant breaks, if any."""
    try:
        check()
    except Violation as broken:
        return broken.invariant
    return None


# ----------------------------------------------------------------------------------------------------- the log's rules

PLACE: dict[str, Any] = {"model": "m", "replica": "r"}


def joined(incarnation: int) -> tuple[AnyCommand, list[AnyEvent]]:
    command = Join(by=Sender("a", incarnation, 1), host="h", site="s")
    return command, [AgentJoined(agent="a", incarnation=incarnation, host="h", site="s")]


def drained(incarnation: int, n: int) -> tuple[AnyCommand, list[AnyEvent]]:
    command = Drained(by=Sender("a/1", incarnation, n), shard=0, **PLACE)
    return command, [ShardDrained(shard=0, version=1, **PLACE)]


def expired(term: int) -> tuple[AnyCommand, list[AnyEvent]]:
    command = Expire(by=Sender("_registry", term, 1), agent="b", incarnation=1, term=term)
    return command, [AgentLost(agent="b", incarnation=1, term=term)]


def shard(index: int) -> AnyEvent:
    return ShardRegistered(shard=index, shards=2, spot=False, agent="a", layout=f"l{index}", **PLACE)


def published(version: int, *roots: str) -> AnyEvent:
    return VersionPublished(version=version, roots=roots, **PLACE)


def filled(index: int, root: str = "x") -> AnyEvent:
    return ShardFilled(shard=index, version=1, round=5, root=root, **PLACE)


DECIDED = RoundDecided(round=5, attempt=1, version=1, roots=("x", "y"), **PLACE)
ALL_READY = ReplicaReady(version=1, round=5, **PLACE)


def said(*events: AnyEvent) -> tuple[tuple[AnyCommand, list[AnyEvent]], ...]:
    """Let a live agent say one command for each event."""
    return (joined(1), *((drained(1, n)[0], [event]) for n, event in enumerate(events, start=2)))


REFUSED = CommandRejected(verb="drained", error="StaleSender", message="over", model="m")


@pytest.mark.parametrize(
    ("steps", "broken"),
    [
        ([joined(1), drained(1, 1), joined(3), drained(3, 1)], None),
        ([joined(3), drained(1, 1)], "the live incarnation alone counts"),
        ([joined(3), (drained(1, 1)[0], [REFUSED])], None),
        ([joined(3), joined(2)], "incarnations only rise"),
        ([joined(1), drained(1, 1), drained(1, 1)], "each command counts once"),
        ([expired(2), expired(1)], "terms only rise"),
        (said(shard(0), shard(1), published(1, "x", "y"), published(2, "z", "y")), None),
        (said(shard(0), shard(1), published(2, "x", "y"), published(2, "x", "y")), "versions only rise"),
        (said(shard(0), shard(1), published(1, "x", "y"), filled(0, "z")), "a root stands for ever"),
        (said(shard(0), shard(1), DECIDED, filled(0, "x"), filled(1, "y"), ALL_READY), None),
        (said(shard(0), shard(1), DECIDED, filled(0, "x"), ALL_READY), "all shards are ready"),
    ],
)
def test_a_broken_rule_is_named(steps: Sequence[tuple[AnyCommand, Sequence[AnyEvent]]], broken: str | None) -> None:
    rules = LogRules()

    def see() -> None:
        for seq, (command, events) in enumerate(steps, start=1):
            rules.see(seq, command, tuple(events))

    assert broken_by(see) == broken


# ------------------------------------------------------------------------------------------- updates never go back

BY = Sender("a/1", 1, 1)
ROUND = 20
ABOUT = {"model": "m", "replica": "engine", "i": 1, "k": 1, "time": 0.0, "by": BY}

Step = tuple[AnyCommand, AnyEvent]


def event(kind: type[Event], cmd: int = ROUND, **fields: object) -> AnyEvent:
    return kind(**{"cmd": cmd, **ABOUT, **fields})  # type: ignore[return-value,arg-type]


def wanted(wish: Any = "newer") -> Step:
    want = Want(by=BY, model="m", replica="engine", shard=0, want=wish)
    return want, event(RoundJoined, round=ROUND, shard=0, missing=())


def other(happened: AnyEvent) -> Step:
    return Granted(by=BY, model="m", replica="engine", shard=0, round=ROUND, attempt=1), happened


HELD = other(event(ReplicaReady, cmd=10, version=12))
STARTED = other(event(RoundStarted, cmd=21, round=ROUND, attempt=1, version=13))
OLDER = other(event(RoundDecided, cmd=22, round=ROUND, attempt=2, version=11, roots=()))
SAME = other(event(RoundDecided, cmd=22, round=ROUND, attempt=2, version=12, roots=()))
DRAINED = other(event(ShardDraining, cmd=11, shard=0, version=12))
LOST = (Join(by=BY, host="h", site="s"), AgentLost(agent="a", incarnation=1, term=1, cmd=11, i=1, k=1, time=0.0, by=BY))
REWOUND = other(ModelRewound(model="m", to=11, last=12, cmd=21, i=1, k=1, time=0.0, by=BY))


@pytest.mark.parametrize(
    ("steps", "back"),
    [
        pytest.param([HELD, wanted(), STARTED, OLDER], True, id="older"),
        pytest.param([HELD, wanted(), STARTED, SAME], False, id="the same again"),
        pytest.param([HELD, wanted("latest"), STARTED, OLDER], False, id="latest"),
        pytest.param([HELD, DRAINED, wanted(), STARTED, OLDER], False, id="drained before"),
        pytest.param([HELD, LOST, wanted(), STARTED, OLDER], False, id="lost before"),
        pytest.param([HELD, wanted(), STARTED, REWOUND, OLDER], False, id="rewound"),
        pytest.param([wanted(), STARTED, OLDER], False, id="held nothing"),
    ],
)
def test_an_update_that_goes_back_is_found(steps: Sequence[Step], *, back: bool) -> None:
    for level, demanded in ((Level.NEVER_OLDER, back), (Level.FORGETTING, False)):
        floors = UpdateFloors(level)
        broken = broken_by(lambda floors=floors: [floors.see(command, (event,)) for command, event in steps])  # type: ignore[misc]
        assert broken == ("updates never go back" if demanded else None)


# ------------------------------------------------------------------------------------------- who waits for whose bytes

OLD, NEW = ("m/b", ReadPriority(9, 9)), ("m/b", ReadPriority(12, 9))
READER, FIRST = ("m/a", ReadPriority(10, 10)), ("m/c", ReadPriority(8, 8))


@pytest.mark.parametrize(
    ("waits_for", "broken"),
    [
        # A replica's fills under two turns are two nodes: who waits for the old one may be waited for by the new one.
        ({READER: {OLD}, NEW: {READER}, OLD: {FIRST}}, False),
        ({READER: {NEW}, NEW: {READER}}, True),
        ({READER: {NEW, FIRST}, NEW: {OLD}, OLD: {READER}}, True),
        ({READER: {READER}}, True),
    ],
)
def test_a_circle_is_found_over_any_number(waits_for: dict[Fill, set[Fill]], *, broken: bool) -> None:
    assert (broken_by(lambda: check_no_cycle(waits_for)) is not None) == broken


# --------------------------------------------------------- what the log counts stands at its agent, once all is heard


@pytest.fixture(scope="module")
def world() -> World:
    with scaled_down():
        world = World(1, draw_config(1, calm=True))
        world.run()
    return world


@pytest.fixture
def ready(world: World) -> tuple[AgentNode, ShardCore]:
    """A shard that holds a version, and its agent, which has said all that it had to say."""
    return next(
        (agent, core)
        for agent in world.first.processes.agents.values()
        for core in agent.core.shards.values()
        if agent.lanes.are_silent and core.contents.memory is MemoryState.READY and core.operation is None
    )


FILLING, READY, DRAINING = MemoryState.FILLING, MemoryState.READY, MemoryState.DRAINING
COUNTED = r"counts .* for version \d+, and there it is "


@pytest.mark.parametrize(
    ("at_log", "at_agent", "found"),
    [
        ({}, {}, None),
        *(
            ({}, {"contents": ShardContents(memory, version=version)}, f"{COUNTED}{memory}")
            for memory, version in ((MemoryState.EMPTY, None), (READY, 1_000_000), (DRAINING, None), (FILLING, None))
        ),
        # An unpublish that was given up drains on at its agent only where the log counts the shard as draining too.
        ({}, {"memory": DRAINING}, "there it is draining"),
        *(
            ({"state": state}, {"memory": memory}, f"{memory} at .*, which the log {why}")
            for state, memory, why in (
                (ShardState.EMPTY, READY, "takes for empty"),
                (ShardState.EMPTY, FILLING, "takes for empty"),
                (ShardState.DRAINING, READY, "waits for the readers of"),
                (ShardState.FILLING, READY, "waits for the filling of"),
            )
        ),
        # What the log waits for and nobody brings.
        ({"round": lambda at: Round(number=1, wants={at: "latest"})}, {}, "waits for the filling of"),
        ({"offers": lambda at: {at: Offer(None, "")}}, {}, "has an offer of"),
        ({"leaving": True}, {}, "is to let go of"),
        ({"leaving": True}, {"detached": object()}, None),
        ({"members": lambda _: {}}, {}, "knows nothing of"),
        # Who is still to hear or to say something is not judged: a call is under way, it was not let in, it has more
        # to say, or it has begun anew.
        *(
            ({}, {"contents": ShardContents(), what: value}, None)
            for what, value in (
                ("operation", object()),
                ("joined", False),
                ("are_silent", False),
                ("incarnation", 1_000_000),
            )
        ),
    ],
)
def test_what_the_log_counts_and_its_agent_has_otherwise_is_found(
    world: World,
    ready: tuple[AgentNode, ShardCore],
    monkeypatch: pytest.MonkeyPatch,
    at_log: dict[str, Any],
    at_agent: dict[str, Any],
    found: str | None,
) -> None:
    agent, core = ready
    catalog = world.first.job.view.catalog
    replica = catalog.models[core.key.model].replicas[core.key.replica]
    shard = replica.members[core.key.shard]
    places: dict[str, Any] = {"state": shard, "leaving": shard, "memory": core.contents, "joined": agent.core}
    places |= {"round": replica, "offers": replica, "members": replica, "incarnation": catalog.agents[agent.name]}
    places["are_silent"] = type(agent.lanes)
    for name, value in (at_log | at_agent).items():
        made = value(core.key.shard) if isinstance(value, types.FunctionType) else value
        monkeypatch.setattr(places.get(name, core), name, made)
    if found is None:
        check_standing(agent, catalog)
    else:
        with pytest.raises(Violation, match=found):
            check_standing(agent, catalog)


def test_who_is_to_go_and_stays(
    world: World, ready: tuple[AgentNode, ShardCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, core = ready
    workers = world.first.processes.workers
    [rank] = [rank for rank in workers if rank.key == core.key and rank.agent is agent]
    check_going(agent, workers)
    monkeypatch.setattr(rank, "goes", True)
    check_going(agent, workers)  # It is published: the last copy of a retained version, as far as is known here.
    monkeypatch.setattr(core.contents, "memory", MemoryState.DRAINING)
    with pytest.raises(Violation, match="is draining and stays"):
        check_going(agent, workers)
    monkeypatch.setattr(core, "detached", object())
    check_going(agent, workers)
