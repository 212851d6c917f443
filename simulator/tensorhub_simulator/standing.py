"""What the log counts as ready stands at its agent: what nobody offers would be planned for, and found by nobody.

Looked at where the agent has heard all that the log has to say, and the log all that the agent has: until then one of
them knows better.
"""

from typing import TYPE_CHECKING

from tensorhub_agent.memory import Memory
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.catalog.table import AgentState, ShardState
from tensorhub_simulator.memory import Violation

if TYPE_CHECKING:
    from tensorhub_simulator.agent import AgentNode


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
        # What drains is the end of a call that had no answer: its worker calls again, and the bytes stand until then.
        stands = held.memory in (Memory.READY, Memory.DRAINING) and held.version == shard.version
        if shard_core.operation is None and not stands:
            raise Violation(
                "what counts stands",
                f"the log counts {key} on {agent.name} for version {shard.version}, and there it is {held.memory} "
                f"at {held.version}",
            )
