"""The SDK of TensorHub: what trainers and engines import.

    import tensorhub, torch
    hub = tensorhub.connect()
    hub.register("policy", {"w": torch.ones(4, 4)}, replica="trainer").publish(version=1)
    engine = hub.register("policy", {"w": torch.zeros(4, 4)}, replica="rollout-0")
    print(engine.replicate("latest"), engine.tensors["w"])

A name is imported from its module when it is first used, so that importing this package takes next to no time. Torch is
imported by the first `register`: a control host has none, and `versions`, `replicas` and `watch` need none.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorhub import mapping as mapping
    from tensorhub._control.watch import Watched as Watched
    from tensorhub._rollouts.prompts import Prompt as Prompt
    from tensorhub._rollouts.prompts import Sampling as Sampling
    from tensorhub._rollouts.responses import Response as Response
    from tensorhub._rollouts.responses import RunEngine as RunEngine
    from tensorhub._rollouts.responses import Staleness as Staleness
    from tensorhub._rollouts.responses import TokenRun as TokenRun
    from tensorhub._rollouts.responses import Turn as Turn
    from tensorhub.aio.hub import AsyncHub as AsyncHub
    from tensorhub.aio.hub import connect_async as connect_async
    from tensorhub.aio.rollouts import AsyncBatch as AsyncBatch
    from tensorhub.aio.rollouts import AsyncRollouts as AsyncRollouts
    from tensorhub.aio.seeding import Seeding as Seeding
    from tensorhub.aio.shard import AsyncShard as AsyncShard
    from tensorhub.errors import *  # noqa: F403 (one list of errors: `tensorhub.errors.__all__`)
    from tensorhub.specs import TensorSpec as TensorSpec
    from tensorhub.sync.hub import Hub as Hub
    from tensorhub.sync.hub import Shard as Shard
    from tensorhub.sync.hub import connect as connect
    from tensorhub.sync.rollouts import Batch as Batch
    from tensorhub.sync.rollouts import Rollouts as Rollouts
    from tensorhub_common.layout.parts import Part as Part
    from tensorhub_common.protocol.queries import ReplicaInfo as ReplicaInfo
    from tensorhub_common.protocol.queries import ShardInfo as ShardInfo
    from tensorhub_common.protocol.queries import VersionInfo as VersionInfo
    from tensorhub_common.protocol.rollout.questions import AttemptWhy as AttemptWhy
    from tensorhub_common.protocol.rollout.questions import ExpectedLength as ExpectedLength
    from tensorhub_common.protocol.rollout.questions import RequestWhy as RequestWhy
    from tensorhub_common.protocol.rollout.questions import RolloutStatus as RolloutStatus
    from tensorhub_common.protocol.rollout.questions import WhyAnswer as WhyAnswer
    from tensorhub_common.protocol.worker import ReadReport as ReadReport
    from tensorhub_common.protocol.worker import SourceReport as SourceReport

    __all__: list[str]
    __version__: str

_MODULES = {
    "AsyncBatch": "tensorhub.aio.rollouts",
    "AsyncHub": "tensorhub.aio.hub",
    "AsyncRollouts": "tensorhub.aio.rollouts",
    "AsyncShard": "tensorhub.aio.shard",
    "AttemptWhy": "tensorhub_common.protocol.rollout.questions",
    "Batch": "tensorhub.sync.rollouts",
    "ExpectedLength": "tensorhub_common.protocol.rollout.questions",
    "Hub": "tensorhub.sync.hub",
    "Part": "tensorhub_common.layout.parts",
    "Prompt": "tensorhub._rollouts.prompts",
    "ReadReport": "tensorhub_common.protocol.worker",
    "ReplicaInfo": "tensorhub_common.protocol.queries",
    "RequestWhy": "tensorhub_common.protocol.rollout.questions",
    "Response": "tensorhub._rollouts.responses",
    "RolloutStatus": "tensorhub_common.protocol.rollout.questions",
    "Rollouts": "tensorhub.sync.rollouts",
    "RunEngine": "tensorhub._rollouts.responses",
    "Sampling": "tensorhub._rollouts.prompts",
    "Seeding": "tensorhub.aio.seeding",
    "Shard": "tensorhub.sync.hub",
    "ShardInfo": "tensorhub_common.protocol.queries",
    "SourceReport": "tensorhub_common.protocol.worker",
    "Staleness": "tensorhub._rollouts.responses",
    "TensorSpec": "tensorhub.specs",
    "TokenRun": "tensorhub._rollouts.responses",
    "Turn": "tensorhub._rollouts.responses",
    "VersionInfo": "tensorhub_common.protocol.queries",
    "Watched": "tensorhub._control.watch",
    "WhyAnswer": "tensorhub_common.protocol.rollout.questions",
    "connect": "tensorhub.sync.hub",
    "connect_async": "tensorhub.aio.hub",
}
"""The module of each name but the errors."""


if not TYPE_CHECKING:  # A type checker would take every name for one that exists.

    def __getattr__(name: str) -> object:
        found: object
        if name == "mapping":
            return import_module("tensorhub.mapping")
        if name == "__version__":
            found = _version()
        elif name == "__all__":
            found = __dir__()
        elif name in _MODULES:
            found = getattr(import_module(_MODULES[name]), name)
        elif not name.startswith("_") and name in _errors():
            found = getattr(import_module("tensorhub.errors"), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted([*_MODULES, *_errors(), "__version__", "mapping"])


def _errors() -> list[str]:
    names: list[str] = import_module("tensorhub.errors").__all__
    return names


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 (it takes a third of the import's time)

    try:
        return version("tensorhub")
    except PackageNotFoundError:  # A checkout on the path that is not installed.
        return "0+unknown"
