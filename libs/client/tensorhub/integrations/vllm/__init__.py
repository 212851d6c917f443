"""vLLM: a weight-transfer backend called "tensorhub", for the engine and for the trainer.

vLLM finds `register` by the entry point group `vllm.general_plugins`, in each of its processes. The two backends are
imported where they are used, so that an API server imports neither.

Seams: `engine_backend`, `trainer_backend`.
"""

from typing import Final

BACKEND: Final = "tensorhub"


def register() -> None:
    """Make the backend known to vLLM. A second call does nothing: vLLM loads its plugins more than once."""
    from vllm.distributed.weight_transfer.factory import (  # noqa: PLC0415 (vLLM loads plugins in processes that transfer nothing)
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    if BACKEND not in WeightTransferEngineFactory._registry:  # noqa: SLF001 (it raises for a name that it has, and says nowhere which)
        WeightTransferEngineFactory.register_engine(BACKEND, f"{__name__}.engine_backend", "HubWeights")
        WeightTransferTrainerFactory.register_engine(BACKEND, f"{__name__}.trainer_backend", "HubTrainer")
