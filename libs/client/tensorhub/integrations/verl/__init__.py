"""verl with the hub: its weights by `CheckpointEngine`, its generation by `RolloutReplica`, both called "tensorhub".

    actor_rollout_ref.rollout.checkpoint_engine.backend=tensorhub
    actor_rollout_ref.rollout.name=tensorhub

verl imports this package by the entry point group `verl.plugins`, in each of its processes.

Seams: this package itself, `checkpoint_engine`, `rollout_server`, `replica`.
"""

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

from tensorhub.integrations.verl.checkpoint_engine import BACKEND, TensorHubCheckpointEngine
from tensorhub.integrations.verl.replica import NoEngine, TensorHubReplica

__all__ = ["NoEngine", "TensorHubCheckpointEngine", "TensorHubReplica"]

RolloutReplicaRegistry.register(BACKEND, lambda: TensorHubReplica)
# verl has no call that registers what stands in a fused worker.
_ROLLOUT_REGISTRY[BACKEND, "async"] = f"{NoEngine.__module__}.{NoEngine.__qualname__}"
