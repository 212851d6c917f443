"""The trainer's side: a trainer that uses vLLM's own interface publishes into the hub. I/O.

    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, WeightTransferTrainerFactory
    trainer = WeightTransferTrainerFactory.trainer_init(
        HubTrainerInfo(job="run-7", model="policy", rank=0), client=client, source=ModuleSource(module))
    trainer.send_weights()

Every `send_weights` publishes the next version. Engines with a runner beside them follow it by themselves. A client for
one more server may be given: its workers then load the version out of the memory of a replica on their host, and
`send_weights` returns when they have. A trainer on the server's own GPU has `memory="device"` and
`server_memory="device"`: the workers map what it publishes, and no byte passes through the host.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

import tensorhub
from tensorhub.integrations.vllm import BACKEND

if TYPE_CHECKING:
    from tensorhub.sync.hub import Hub, Shard


@dataclass
class HubTrainerInfo(TrainerInitInfo):
    """Where versions are published."""

    backend: ClassVar[str] = BACKEND

    job: str
    model: str
    """The model of the hub."""
    replica: str = "trainer"
    """The name of this copy of the model."""
    agent: str | None = None
    """This host's agent: its socket's path. None: as `tensorhub.connect` finds it."""
    memory: str = field(default="host", kw_only=True)
    """Where versions are published: in memory of the "host", or with "device" of this trainer's GPU."""
    server_replica: str = field(default="vllm", kw_only=True)
    """The name that the workers of the client's server have in the hub."""
    server_agent: str | None = field(default=None, kw_only=True)
    """The agent of the server's host: its socket's path there. None: as `tensorhub.connect` finds it."""
    server_memory: str = field(default="host", kw_only=True)
    """What the server's workers map: memory of their "host", or with "device" of their own GPU."""


class HubTrainer(TrainerWeightTransferEngine[HubTrainerInfo]):
    """The backend in a trainer. Rank 0 publishes; the others take part in gathering, as vLLM's sources want it."""

    init_info_cls = HubTrainerInfo

    def __init__(self, info: HubTrainerInfo, *, client: VLLMWeightSyncClient | None, source: WeightSource) -> None:
        """Register what the source will give."""
        # None: the engines have runners, which no client has to drive.
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self._info = info
        self._hub: Hub | None = None
        self._shard: Shard | None = None
        if info.is_sender:
            self._hub = tensorhub.connect(job=info.job, agent=info.agent)
            specs = {each.name: tensorhub.TensorSpec(each.shape, each.dtype) for each in source.metadata()}
            self._shard = self._hub.register(info.model, specs, replica=info.replica, memory=info.memory)
        self._is_server_ready = False

    @classmethod
    def trainer_init(
        cls, init_info: HubTrainerInfo, *, client: VLLMWeightSyncClient | None, source: WeightSource | None = None
    ) -> Self:
        """Return a trainer that is ready to send. Called on every rank."""
        if source is None:
            raise ValueError(
                "the tensorhub backend publishes whole versions: give a source, as in ModuleSource(module)"
            )
        return cls(init_info, client=client, source=source)

    @property
    def version(self) -> int | None:
        """What was published last. None: nothing, or this rank does not publish."""
        return None if self._shard is None else self._shard.version

    def send_weights(self) -> None:
        """Publish what the source gives as the next version, and have the client's server load it."""
        assert self.source is not None
        if self._shard is None:
            for _ in self.source:
                """The other ranks gather with rank 0."""
            return
        with torch.no_grad(), self._shard.overwriting(publish=True) as tensors:
            for name, tensor in self.source:
                tensors[name].copy_(tensor)
        if self.client is not None:
            self._update_server()

    def _update_server(self) -> None:
        if not self._is_server_ready:
            info = self._info
            place = {
                "job": info.job,
                "model": info.model,
                "replica": info.server_replica,
                "agent": info.server_agent,
                "memory": info.server_memory,
            }
            self.client.init_weight_transfer_engine(place)
            self._is_server_ready = True
        version = self.version
        try:
            self.client.start_weight_update()
        except Exception:  # noqa: BLE001 (each client raises its own)
            # Somebody was killed within an update: vLLM refuses another one until that is finished.
            self.client.finish_weight_update()
            self.client.start_weight_update()
        self.client.update_weights({"version": version})
        self.client.finish_weight_update(weight_version=str(version))

    def shutdown(self) -> None:
        """Leave the hub; what was published stays with this host's agent only as long as this replica."""
        if self._hub is not None:
            self._hub.close()
