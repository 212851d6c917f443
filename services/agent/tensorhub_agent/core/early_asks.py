"""Questions for leases that come before this agent has heard what its log says: which are worth waiting. Pure."""

from tensorhub_agent.core.operations.read import ReadOperation
from tensorhub_agent.core.operations.stage import Stage
from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.core.shard_state import Memory
from tensorhub_common.protocol.plans import LeaseAsk


def is_published(core: ShardCore | None, ask: LeaseAsk) -> bool:
    """Tell whether the log has taken the version that is asked for as published by this shard."""
    return core is not None and (core.held.memory, core.held.version) == (Memory.READY, ask.version)


def may_be_decided(core: ShardCore | None, ask: LeaseAsk) -> bool:
    """Tell whether the log may have decided what this agent has not heard yet, and the reader has.

    Or whether it is not known yet by which program the shard will be filled.
    """
    operation = core.operation if core is not None else None
    if not isinstance(operation, ReadOperation):
        return False
    return operation.stage is Stage.JOINING or (ask.program is not None and operation.may_turn_to_program)
