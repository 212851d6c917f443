"""What the log counts as ready stands at its agent and is granted: else a plan would name what no reader can find.

Nor does the log wait for anything that no call of the agent brings: else every later call would be refused.

And what was said to go is on its way: a shard whose release was given up, since the registry was silent, goes once the
registry answers. Both are looked at where the agent has heard all that the log has to say, and the log all that the
agent has: until then one of them knows better.
"""

from collections.abc import Iterable

from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.catalog.transitions import AgentState, ShardState
from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.nodes.agent import AgentNode
from tensorhub_simulator.faultsim.nodes.worker import WorkerNode


def check_going(agent: AgentNode, ranks: Iterable[WorkerNode]) -> None:
    """Raise `Violation` if a shard of which a worker was told that it goes stays, and nothing is done about it."""
    if not agent.core.joined or not agent.lanes.are_silent:
        return
    for rank in ranks:
        core = agent.core.shards.get(rank.key) if rank.goes and rank.agent is agent else None
        if core is None or core.operation is not None or core.detached is not None:
            continue
        if core.contents.memory is not MemoryState.READY:
            # The last copy of a retained version stays, and was said to.
            raise Violation("what was released goes", f"{rank.key} on {agent.name} is {core.contents.memory} and stays")


def check_standing(agent: AgentNode, catalog: Catalog) -> None:
    """Raise `Violation` if the log takes a shard on which nothing is under way for something else than its agent."""
    core, record = agent.core, catalog.agents.get(agent.name)
    if record is None or record.state is not AgentState.LIVE or record.incarnation != core.incarnation:
        return
    if not core.joined or not agent.lanes.are_silent:
        return
    for shard_core in core.shards.values():
        if shard_core.operation is None:
            _check_idle(agent, shard_core, catalog)


def _check_idle(agent: AgentNode, core: ShardCore, catalog: Catalog) -> None:
    key, contents = core.key, core.contents
    model = catalog.models.get(key.model)
    replica = model.replicas.get(key.replica) if model is not None else None
    shard = replica.members.get(key.shard) if replica is not None else None
    if replica is None or shard is None or shard.agent != agent.name:
        why = "knows nothing of"
    elif shard.state is ShardState.READY and (contents.memory, contents.version) != (MemoryState.READY, shard.version):
        raise Violation(
            "what counts stands",
            f"the log counts {key} on {agent.name} for version {shard.version}, and there it is {contents.memory} "
            f"at {contents.version}",
        )
    elif shard.state is ShardState.FILLING or (replica.round is not None and key.shard in replica.round.wants):
        why = "waits for the filling of"
    elif key.shard in replica.offers:
        why = "has an offer of"
    elif core.detached is not None:
        return
    elif shard.leaving:
        why = "is to let go of"
    elif shard.state is ShardState.DRAINING and contents.memory is not MemoryState.DRAINING:
        why = "waits for the readers of"
    elif shard.state is ShardState.EMPTY and contents.memory in (MemoryState.READY, MemoryState.FILLING):
        why = "takes for empty"
    else:
        return
    raise Violation(
        "log and agent agree",
        f"nothing is under way on {key} on {agent.name}, {contents.memory} at {contents.version}, which the log {why}",
    )
