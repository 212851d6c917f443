"""The SDK of TensorHub: what trainers and engines import.

    import tensorhub, torch
    hub = tensorhub.connect()
    hub.register("policy", {"w": torch.ones(4, 4)}, replica="trainer").publish(version=1)
    engine = hub.register("policy", {"w": torch.zeros(4, 4)}, replica="rollout-0")
    print(engine.replicate("latest"), engine.tensors["w"])

Importing it brings in no torch: a control host has none, and `versions`, `replicas` and `watch` need none.
"""

from importlib.metadata import PackageNotFoundError, version

from tensorhub import mapping
from tensorhub._control.watch import Watched
from tensorhub.aio.hub import AsyncHub, connect_async
from tensorhub.aio.shard import AsyncShard
from tensorhub.specs import TensorSpec
from tensorhub.sync.hub import Hub, Shard, connect
from tensorhub_common.bus.errors import LogGap, LogMissing
from tensorhub_common.config.settings import InvalidSetting
from tensorhub_common.errors import (
    AgentUnavailable,
    BadCommand,
    DrainTimeout,
    IntegrityError,
    InvalidName,
    JobGone,
    LayoutMismatch,
    MemoryExhausted,
    NotFilled,
    NotInThisVersion,
    NotPublished,
    RegistryUnavailable,
    ReplicaConflict,
    RetentionFull,
    RoundTimeout,
    StaleSender,
    TensorHubError,
    VersionConflict,
    VersionUnavailable,
)
from tensorhub_common.layout.parts import Part
from tensorhub_common.protocol.queries import ReplicaInfo, ShardInfo, VersionInfo
from tensorhub_common.protocol.worker import ReadReport, SourceReport

try:
    __version__ = version("tensorhub")
except PackageNotFoundError:  # A checkout on the path that nobody installed.
    __version__ = "0+unknown"

# A traceback names an error by the module that callers import, which is this one.
for _error in (
    AgentUnavailable,
    BadCommand,
    DrainTimeout,
    IntegrityError,
    InvalidName,
    InvalidSetting,
    JobGone,
    LayoutMismatch,
    LogGap,
    LogMissing,
    MemoryExhausted,
    NotFilled,
    NotInThisVersion,
    NotPublished,
    RegistryUnavailable,
    ReplicaConflict,
    RetentionFull,
    RoundTimeout,
    StaleSender,
    TensorHubError,
    VersionConflict,
    VersionUnavailable,
):
    _error.__module__ = __name__

__all__ = [
    "AgentUnavailable",
    "AsyncHub",
    "AsyncShard",
    "BadCommand",
    "DrainTimeout",
    "Hub",
    "IntegrityError",
    "InvalidName",
    "InvalidSetting",
    "JobGone",
    "LayoutMismatch",
    "LogGap",
    "LogMissing",
    "MemoryExhausted",
    "NotFilled",
    "NotInThisVersion",
    "NotPublished",
    "Part",
    "ReadReport",
    "RegistryUnavailable",
    "ReplicaConflict",
    "ReplicaInfo",
    "RetentionFull",
    "RoundTimeout",
    "Shard",
    "ShardInfo",
    "SourceReport",
    "StaleSender",
    "TensorHubError",
    "TensorSpec",
    "VersionConflict",
    "VersionInfo",
    "VersionUnavailable",
    "Watched",
    "__version__",
    "connect",
    "connect_async",
    "mapping",
]
