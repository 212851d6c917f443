"""The modules of vLLM that its weight-transfer backends import, fake: enough to run the backends where vLLM is not."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn


class _Generic:
    def __class_getitem__(cls, _: object) -> type:
        return cls


@dataclass
class _Info:
    """What vLLM's own dataclasses of this kind are: nothing."""


class _Trainer(_Generic):
    def __init__(self, *, client: Any, source: Any, is_sender: bool) -> None:
        self.client, self.source = client, source
        assert is_sender


MODULES: dict[str, dict[str, Any]] = {
    "vllm.distributed.weight_transfer.base": {
        "WeightTransferEngine": _Generic,
        "WeightTransferInitInfo": _Info,
        "WeightTransferUpdateInfo": _Info,
        "TrainerInitInfo": type("TrainerInitInfo", (), {"is_sender": True}),
        "TrainerWeightTransferEngine": _Trainer,
        "VLLMWeightSyncClient": object,
        "WeightSource": object,
    },
    "vllm.model_executor.layers.vocab_parallel_embedding": {"UnquantizedEmbeddingMethod": object},
    "vllm.model_executor.model_loader.reload": {
        "initialize_layerwise_reload": lambda model: model.said.append("begins"),
        "finalize_layerwise_reload": lambda model, _: model.said.append("ends"),
    },
    "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: False)},
}


@contextmanager
def backends_over_fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """Import the engine's backend and the trainer's over fake modules of vLLM."""
    for name, found in MODULES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            dotted = ".".join(parts[:end])
            if dotted not in sys.modules or end == len(parts):
                monkeypatch.setitem(sys.modules, dotted, ModuleType(dotted))
        vars(sys.modules[name]).update(found)
    here = "tensorhub.integrations.vllm"
    names = (f"{here}.engine_backend", f"{here}.trainer_backend")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield import_module(names[0]), import_module(names[1])
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)


class FakeModel(nn.Module):
    """A model with one parameter, whose loader tells when it loads."""

    def __init__(self, shape: tuple[int, ...], said: list[Any]) -> None:
        super().__init__()
        self.w, self.said = nn.Parameter(torch.zeros(shape)), said

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        given = dict(tensors)
        self.said.append(("load", [*given]))
        self.w.copy_(given["w"])
        return {"w"}


def worker_of(backend: Any, model: FakeModel, rank: int = 0, device: str = "cpu") -> Any:
    """Return the backend in one of vLLM's workers."""
    made = backend.HubWeights()
    made.parallel_config = SimpleNamespace(rank=rank)
    made.model, made.device = model, torch.device(device)
    made.model_config = SimpleNamespace(quantization=None)
    return made
