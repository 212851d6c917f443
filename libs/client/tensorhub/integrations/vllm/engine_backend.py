"""The engine's side: each of vLLM's workers loads a version out of hub memory of its host. I/O.

A worker maps the memory of a replica that holds the version on this host: the one of the runner beside the server, or
a trainer's, which may be memory of the worker's own GPU. The bytes there are verified. While they are mapped they are
not overwritten, whatever becomes of the runner (installs.py). vLLM's own loader takes from them what the worker's rank
needs, and converts, quantises and repacks it as it does with a checkpoint. So the ranks of a host have one copy in hub
memory between them, and a byte crosses the network once for each host.

Invariant: the model is written only once a whole, verified version is mapped. An error after that leaves the model with
parts of two versions; then vLLM has said so to the caller, and the next update writes all of it again.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

import tensorhub

if TYPE_CHECKING:
    from tensorhub.sync.hub import Hub, Shard

MAP_S_MAX: Final = 30.0
"""The bound of mapping a version, in seconds: no byte of it moves."""

TABLES: Final = ".rotary_emb."
"""In the name of tables of positions, which a trainer's module may have as buffers and vLLM computes for itself."""


@dataclass
class HubInitInfo(WeightTransferInitInfo):
    """Where the versions come from."""

    job: str
    model: str
    """The model of the hub."""
    replica: str
    """The name that this server's workers have in the hub, each with its rank behind it."""
    agent: str | None = None
    """This host's agent: its socket's path. None: as `tensorhub.connect` finds it."""
    memory: str = "host"
    """What each worker maps: memory of the "host", or with "device" that of its own GPU, where a replica has it. Then
    the model is loaded from there by copies within the GPU."""


@dataclass
class HubUpdateInfo(WeightTransferUpdateInfo):
    """Which version is to be loaded."""

    version: int


class HubWeights(WeightTransferEngine[HubInitInfo, HubUpdateInfo]):
    """The backend in one worker."""

    init_info_cls = HubInitInfo
    update_info_cls = HubUpdateInfo

    _hub: "Hub | None" = None
    _shard: "Shard | None" = None

    def init_transfer_engine(self, init_info: HubInitInfo) -> None:
        """Connect to the agent, and register what the newest version consists of.

        Raises `VersionUnavailable` before the first version.
        """
        self.shutdown()
        rank = self.parallel_config.rank
        self._hub = tensorhub.connect(job=init_info.job, agent=init_info.agent)
        self._shard = self._hub.register(
            init_info.model,
            self._hub.specs(init_info.model),
            replica=f"{init_info.replica}-rank-{rank}",
            spot=True,
            install="mapped",
            memory=init_info.memory,
        )

    def start_weight_update(self) -> None:
        """Write nothing yet: the engine may go on until `update_weights`."""

    def receive_weights(self, update_info: HubUpdateInfo) -> None:
        """Map the version, and have vLLM's loader write it into the model."""
        if self._shard is None:
            raise RuntimeError("init_weight_transfer_engine comes before update_weights")
        # Raises while the model is untouched.
        self._shard.replicate(update_info.version, timeout_s=MAP_S_MAX)
        wanted = {name for name, _ in self.model.named_parameters()}
        try:
            with torch.device(self.device), torch.no_grad():
                initialize_layerwise_reload(self.model)
                try:
                    loaded = self.model.load_weights(
                        (name, tensor) for name, tensor in self._shard.tensors.items() if TABLES not in name
                    )
                finally:
                    # After an error too: what the loader keeps for half a layer must not get into the next version.
                    finalize_layerwise_reload(self.model, self.model_config)
                    _pack_tied(self.model)
        finally:
            # The holder may overwrite its memory with the next version from here on.
            self._shard.let_go()
        # As vLLM's own loader of checkpoints checks it. What a layer lacks would be bytes of nothing.
        missing = wanted - loaded if loaded is not None and self.model_config.quantization is None else set()
        if missing:
            raise RuntimeError(
                f"version {update_info.version} lacks {len(missing)} tensors of the model, such as {min(missing)!r}: "
                "publish whole versions"
            )

    def finish_weight_update(self) -> None:
        """Do nothing: the version is in the model since `update_weights`."""

    def shutdown(self) -> None:
        """Leave the hub."""
        hub, self._hub, self._shard = self._hub, None, None
        if hub is not None:
            hub.close()


def _pack_tied(model: torch.nn.Module) -> None:
    """Pack the output layer again where it is the table of embeddings.

    On CPUs vLLM keeps weights packed beside each layer. Its reload packs what was loaded, and a tied output layer is
    not: it would go on with the version before.
    """
    if not current_platform.is_cpu():
        return
    packed: set[int] = set()
    for layer in model.modules():
        weight, method = getattr(layer, "weight", None), getattr(layer, "quant_method", None)
        if weight is None or not isinstance(method, UnquantizedEmbeddingMethod):
            continue
        if id(weight) in packed:
            method.process_weights_after_loading(layer)
        packed.add(id(weight))
