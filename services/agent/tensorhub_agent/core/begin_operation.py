"""Which operation does which call. Pure."""

from tensorhub_agent.core.effects import AnyCall, CallPublish, CallRead, CallRegister, CallRelease, CallUnpublish
from tensorhub_agent.core.operation import Operation
from tensorhub_agent.core.operations.drain import AttachOperation, ReleaseOperation, UnpublishOperation
from tensorhub_agent.core.operations.publish import PublishOperation
from tensorhub_agent.core.operations.read import ReadOperation
from tensorhub_agent.core.operations.register import RegisterOperation
from tensorhub_agent.core.shard import ShardCore


def begin(core: ShardCore, call: AnyCall) -> Operation:
    """Return the operation that does a call; it has not started."""
    match call:
        case CallRegister():
            return AttachOperation(core, call) if core.registered else RegisterOperation(core, call)
        case CallPublish():
            return PublishOperation(core, call)
        case CallUnpublish():
            return UnpublishOperation(core, call)
        case CallRead():
            return ReadOperation(core, call)
        case CallRelease():
            return ReleaseOperation(core, call)
