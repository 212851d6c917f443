"""vLLM: a weight-transfer backend called "tensorhub", for the engine and for the trainer.

vLLM finds `register` by the entry point group `vllm.general_plugins`, in each of its processes. The two backends are
imported where they are used, so that an API server imports neither.

Seams: `engine_backend`, `trainer_backend`.
"""

import os
import select
import threading
from typing import Final

BACKEND: Final = "tensorhub"
ENDS_WITH: Final = "_TENSORHUB_ENDS_WITH"
"""The process with which those of an engine end: the runner that has the engine in it. Empty: they go on alone."""


def register() -> None:
    """Make the backend known to vLLM. A second call does nothing: vLLM loads its plugins more than once."""
    _end_with_runner()
    from vllm.distributed.weight_transfer.factory import (  # noqa: PLC0415 (vLLM loads plugins in processes that transfer nothing)
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    if BACKEND not in WeightTransferEngineFactory._registry:  # noqa: SLF001 (it raises for a name that it has, and says nowhere which)
        WeightTransferEngineFactory.register_engine(BACKEND, f"{__name__}.engine_backend", "HubWeights")
        WeightTransferTrainerFactory.register_engine(BACKEND, f"{__name__}.trainer_backend", "HubTrainer")


def _end_with_runner() -> None:
    """End this process at once when the runner ends, however it does.

    The core of vLLM does not look after its parent: it would go on, and keep the memory of the model.
    """
    runner = int(os.environ.get(ENDS_WITH) or 0)
    if runner in (0, os.getpid()) or any(each.name == ENDS_WITH for each in threading.enumerate()):
        return
    try:
        runs = os.pidfd_open(runner)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_end_after, args=(runs,), name=ENDS_WITH, daemon=True).start()


def _end_after(runs: int) -> None:
    waiting = select.poll()
    waiting.register(runs, select.POLLIN)
    waiting.poll()
    os._exit(1)
