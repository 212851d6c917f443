"""Workers for verl's `CheckpointEngineManager`: an actor with other weights each step, rollouts that keep these."""

# mypy: disable-error-code="misc, untyped-decorator"
# verl stands in no environment of the checks.

from collections.abc import Iterator
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.rollout import BaseRollout, RolloutReplica

SHAPES: Final = {
    "embed.weight": ((64, 33), torch.float32),
    "layer.weight": ((17, 5, 3), torch.bfloat16),
    "layer.bias": ((1,), torch.float16),
    "scale": ((), torch.float32),
    "nothing": ((0, 4), torch.float32),
}


def weights_at(step: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the actor's full tensors as its engine does, one at a time, in memory that is used again."""
    generator = torch.Generator().manual_seed(step)
    again = torch.empty(64 * 33)
    for name, (shape, dtype) in SHAPES.items():
        count = torch.Size(shape).numel()
        again[:count] = torch.randn(count, generator=generator)
        yield name, again[:count].reshape(shape).to(dtype)


def actors_at(step: int) -> dict[str, torch.Tensor]:
    """Return copies of them."""
    return {name: tensor.clone() for name, tensor in weights_at(step)}


class Actor(Worker):
    """One rank of the actor, with the calls that the manager makes, as verl's ActorRolloutRefWorker has them."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=self.rank == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs.get(config.backend, {}),
        )
        self.walked = 0

    def weights(self, step: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is sent at a step."""
        return weights_at(step)

    def _counted(self, step: int) -> Iterator[tuple[str, torch.Tensor]]:
        for each in self.weights(step):
            self.walked += 1
            yield each

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int = 0, mode: str = "auto") -> dict[str, Any]:
        return await self.checkpoint_engine.send_weights(self._counted(global_steps), global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def how_many(self) -> int:
        return self.walked


def model_at(directory: str, step: int) -> Any:
    """Return the model that an actor has at a step: another one at each."""
    torch.manual_seed(1000 + step)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).eval()


class ModelActor(Actor):
    """An actor whose weights are a model's."""

    def __init__(self, config: CheckpointEngineConfig, directory: str) -> None:
        super().__init__(config)
        self.directory = directory

    def weights(self, step: int) -> Iterator[tuple[str, torch.Tensor]]:
        module = model_at(self.directory, step)
        # As verl's engines: without the tables of positions, which are in no state dict.
        yield from module.state_dict().items()


class Adapter(BaseRollout):
    """Stands in for an engine's adapter: it keeps copies."""

    def __init__(self, config: RolloutConfig, model_config: HFModelConfig) -> None:
        super().__init__(config, model_config, device_mesh=None)
        self.received: dict[str, torch.Tensor] = {}

    async def resume(self, tags: list[str]) -> None:
        raise NotImplementedError

    async def release(self) -> None:
        raise NotImplementedError

    async def update_weights(self, weights: Any, **_: Any) -> None:
        self.received = {name: tensor.clone() async for name, tensor in weights}


class RolloutWorker(CheckpointEngineWorker):
    """verl's own worker, with that adapter."""

    def __init__(self, rollout_config: RolloutConfig, model_config: HFModelConfig) -> None:
        super().__init__(rollout_config, model_config, Adapter(rollout_config, model_config))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def unlike(self, step: int) -> list[str]:
        """Return the names of tensors that are not, bit for bit, the actor's at this step."""
        wanted, received = actors_at(step), self.server_adapter.received
        return [
            name
            for name in {*wanted, *received}
            if name not in wanted
            or name not in received
            or wanted[name].dtype != received[name].dtype
            or wanted[name].shape != received[name].shape
            or bytes(wanted[name].reshape(-1).view(torch.uint8)) != bytes(received[name].reshape(-1).view(torch.uint8))
        ]


class Replica(RolloutReplica):
    """Some of the workers, and no server."""

    async def init_hybrid(self, worker_group: Any) -> None:
        first = self.world_size * self.replica_rank
        self.workers = worker_group.workers[first : first + self.world_size]

    async def launch_servers(self) -> None:
        raise NotImplementedError
