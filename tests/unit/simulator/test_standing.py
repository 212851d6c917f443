"""What the log counts stands at its agent: looked at where neither of them has anything left to hear."""

import pytest

from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.core.shard_state import MemoryState, ShardContents
from tensorhub_common.catalog.state import Offer, Replica, Round, Shard
from tensorhub_common.catalog.transitions import ShardState
from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.drawing import draw_config
from tensorhub_simulator.faultsim.invariants.log_agreement import check_going, check_standing
from tensorhub_simulator.faultsim.nodes.agent import AgentNode
from tensorhub_simulator.faultsim.runner.run import scaled_down
from tensorhub_simulator.faultsim.world import World


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


def test_what_stands_as_the_log_counts_it_is_well(world: World, ready: tuple[AgentNode, ShardCore]) -> None:
    check_standing(ready[0], world.first.job.view.catalog)


@pytest.mark.parametrize(
    "wrong",
    [
        ShardContents(),
        ShardContents(MemoryState.READY, version=1_000_000),
        ShardContents(MemoryState.DRAINING),
        ShardContents(MemoryState.FILLING),
    ],
    ids=str,
)
def test_what_the_log_counts_and_nobody_offers_is_found(
    world: World, ready: tuple[AgentNode, ShardCore], wrong: ShardContents, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, core = ready
    monkeypatch.setattr(core, "contents", wrong)
    with pytest.raises(Violation, match=rf"counts .* on {agent.name} for version \d+, and there it is {wrong.memory}"):
        check_standing(agent, world.first.job.view.catalog)


def test_what_the_log_counts_and_its_agent_drains_is_found(
    world: World, ready: tuple[AgentNode, ShardCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unpublish that was given up drains on at its agent only where the log counts the shard as draining too."""
    agent, core = ready
    monkeypatch.setattr(core.contents, "memory", MemoryState.DRAINING)
    with pytest.raises(Violation, match="there it is draining"):
        check_standing(agent, world.first.job.view.catalog)


@pytest.mark.parametrize(
    ("state", "memory", "why"),
    [
        (ShardState.EMPTY, MemoryState.READY, "takes for empty"),
        (ShardState.EMPTY, MemoryState.FILLING, "takes for empty"),
        (ShardState.DRAINING, MemoryState.READY, "waits for the readers of"),
        (ShardState.FILLING, MemoryState.READY, "waits for the filling of"),
    ],
)
def test_what_the_log_takes_for_something_else_than_its_agent_is_found(
    world: World,
    ready: tuple[AgentNode, ShardCore],
    state: ShardState,
    memory: MemoryState,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent, core = ready
    monkeypatch.setattr(of_log(world, core)[1], "state", state)
    monkeypatch.setattr(core.contents, "memory", memory)
    with pytest.raises(Violation, match=f"{memory} at .*, which the log {why}"):
        check_standing(agent, world.first.job.view.catalog)


def of_log(world: World, core: ShardCore) -> tuple[Replica, Shard]:
    replica = world.first.job.view.catalog.models[core.key.model].replicas[core.key.replica]
    return replica, replica.members[core.key.shard]


def test_what_the_log_waits_for_and_nobody_brings_is_found(
    world: World, ready: tuple[AgentNode, ShardCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, core = ready
    replica, shard = of_log(world, core)
    with monkeypatch.context() as patched:
        patched.setattr(replica, "round", Round(number=1, wants={core.key.shard: "latest"}))
        with pytest.raises(Violation, match="waits for the filling of"):
            check_standing(agent, world.first.job.view.catalog)
    with monkeypatch.context() as patched:
        patched.setattr(replica, "offers", {core.key.shard: Offer(None, "")})
        with pytest.raises(Violation, match="has an offer of"):
            check_standing(agent, world.first.job.view.catalog)
    with monkeypatch.context() as patched:
        patched.setattr(shard, "leaving", True)
        with pytest.raises(Violation, match="is to let go of"):
            check_standing(agent, world.first.job.view.catalog)
        patched.setattr(core, "detached", object())
        check_standing(agent, world.first.job.view.catalog)
    with monkeypatch.context() as patched:
        patched.delitem(replica.members, core.key.shard)
        with pytest.raises(Violation, match="knows nothing of"):
            check_standing(agent, world.first.job.view.catalog)
    check_standing(agent, world.first.job.view.catalog)


def test_what_a_worker_was_told_to_go_and_stays_is_found(
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


@pytest.mark.long
@pytest.mark.parametrize("why", ["a call is under way", "it was not let in", "it has more to say", "it has begun anew"])
def test_who_is_still_to_hear_or_to_say_something_is_not_judged(
    world: World, ready: tuple[AgentNode, ShardCore], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    agent, core = ready
    monkeypatch.setattr(core, "contents", ShardContents())
    match why:
        case "a call is under way":
            monkeypatch.setattr(core, "operation", object())
        case "it was not let in":
            monkeypatch.setattr(agent.core, "joined", False)
        case "it has more to say":
            monkeypatch.setattr(type(agent.lanes), "are_silent", False)
        case _:
            monkeypatch.setattr(world.first.job.view.catalog.agents[agent.name], "incarnation", 1_000_000)
    check_standing(agent, world.first.job.view.catalog)
