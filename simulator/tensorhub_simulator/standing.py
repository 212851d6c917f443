"""What the log counts as ready stands at its agent and is granted: else it would be planned for, and found by nobody.

And what was said to go is on its way: a shard whose release was given up, since the registry was silent, goes once the
registry answers. Both are looked at where the agent has heard all that the log has to say, and the log all that the
agent has: until then one of them knows better.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tensorhub_agent.memory import Memory
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.catalog.table import AgentState, ShardState
from tensorhub_simulator.memory import Violation

if TYPE_CHECKING:
    from tensorhub_simulator.agent import AgentNode
    from tensorhub_simulator.workers import Rank


def check_going(agent: "AgentNode", ranks: Iterable["Rank"]) -> None:
    """Raise `Violation` if a shard of which a worker was told that it goes stays, and nothing is done about it."""
    if not agent.core.joined or not agent.lanes.are_silent:
        return
    for rank in ranks:
        core = agent.core.shards.get(rank.key) if rank.goes and rank.agent is agent else None
        if core is None or core.operation is not None or core.lingering is not None:
            continue
        if core.held.memory is not Memory.READY:
            # The last copy of a retained version stays, and was said to.
            raise Violation("what was released goes", f"{rank.key} on {agent.name} is {core.held.memory} and stays")


def check_standing(agent: "AgentNode", catalog: Catalog) -> None:
    """Raise `Violation` if a shard on which no call is under way lacks what the log counts it for."""
    core, record = agent.core, catalog.agents.get(agent.name)
    if record is None or record.state is not AgentState.LIVE or record.incarnation != core.incarnation:
        return
    if not core.joined or not agent.lanes.are_silent:
        return
    for key, shard_core in core.shards.items():
        model = catalog.models.get(key.model)
        replica = model.replicas.get(key.replica) if model is not None else None
        shard = replica.members.get(key.shard) if replica is not None else None
        if shard is None or shard.agent != agent.name or shard.state is not ShardState.READY:
            continue
        held = shard_core.held
        stands = held.memory is Memory.READY and held.version == shard.version
        if shard_core.operation is None and not stands:
            raise Violation(
                "what counts stands",
                f"the log counts {key} on {agent.name} for version {shard.version}, and there it is {held.memory} "
                f"at {held.version}",
            )
