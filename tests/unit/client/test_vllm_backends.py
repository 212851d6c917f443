"""The two weight-transfer backends for vLLM, whose modules are fake here: what they ask of the hub, and in which order.

Tests with vLLM itself stand in tests/integrations.
"""

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

import tensorhub
from tensorhub import TensorSpec, VersionUnavailable


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


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """Import both backends over fake modules of vLLM."""
    for name, found in MODULES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            dotted = ".".join(parts[:end])
            if dotted not in sys.modules or end == len(parts):
                monkeypatch.setitem(sys.modules, dotted, ModuleType(dotted))
        vars(sys.modules[name]).update(found)
    here = "tensorhub.integrations.vllm"
    for name in (f"{here}.engine_backend", f"{here}.trainer_backend"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield import_module(f"{here}.engine_backend"), import_module(f"{here}.trainer_backend")
    for name in (f"{here}.engine_backend", f"{here}.trainer_backend"):
        monkeypatch.delitem(sys.modules, name, raising=False)


class Hub:
    """A hub with one shard, which is this object as well."""

    def __init__(self) -> None:
        self.connected: dict[str, Any] = {}
        self.registered: dict[str, Any] = {}
        self.said: list[Any] = []
        self.tensors = {"w": torch.zeros(2, 3)}
        self.version: int | None = None
        self.error: Exception | None = None

    def connect(self, **arguments: Any) -> "Hub":
        self.connected = arguments
        return self

    def specs(self, _: str) -> dict[str, TensorSpec]:
        return {"w": TensorSpec((2, 3), torch.float32)}

    def register(self, model: str, specs: dict[str, TensorSpec], **arguments: Any) -> "Hub":
        self.registered = {"model": model, "names": [*specs], **arguments}
        return self

    def replicate(self, version: int, *, timeout_s: float) -> None:
        assert timeout_s > 0
        if self.error is not None:
            raise self.error
        self.said.append(("replicate", version))

    @contextmanager
    def overwriting(self, *, publish: bool) -> Iterator[dict[str, torch.Tensor]]:
        assert publish
        yield self.tensors
        self.version = (self.version or 0) + 1

    def let_go(self) -> None:
        self.said.append("let go")

    def close(self) -> None:
        self.said.append("close")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr(tensorhub, "connect", hub.connect)
    return hub


class Model(nn.Module):
    """A model whose loader tells when it loads."""

    def __init__(self, said: list[Any]) -> None:
        super().__init__()
        self.w, self.said = nn.Parameter(torch.zeros(2, 3)), said

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        self.said.append(("load", [name for name, _ in tensors]))
        return {"w"}


def worker(engine_backend: Any, hub: Hub) -> Any:
    made = engine_backend.HubWeights()
    made.parallel_config = SimpleNamespace(rank=1)
    made.model, made.device = Model(hub.said), torch.device("cpu")
    made.model_config = SimpleNamespace(quantization=None)
    return made


@pytest.mark.parametrize(("given", "memory"), [({}, "host"), ({"memory": "device"}, "device")])
def test_a_worker_maps_the_memory_that_it_is_told_of(
    backends: tuple[Any, Any], hub: Hub, given: dict[str, str], memory: str
) -> None:
    """Of the host, as runners beside a server want it, unless it is told of its GPU's."""
    engine = worker(backends[0], hub)
    engine.init_transfer_engine(backends[0].HubInitInfo(job="j", model="policy", replica="vllm", agent="/a", **given))
    assert hub.connected == {"job": "j", "agent": "/a"}
    assert hub.registered == {
        "model": "policy", "names": ["w"], "replica": "vllm-rank-1", "spot": True, "install": "mapped", "memory": memory
    }  # fmt: skip


def test_a_version_is_let_go_of_once_it_is_loaded_and_the_model_untouched_without_one(
    backends: tuple[Any, Any], hub: Hub
) -> None:
    engine = worker(backends[0], hub)
    with pytest.raises(RuntimeError, match="comes before"):
        engine.receive_weights(backends[0].HubUpdateInfo(version=3))
    engine.init_transfer_engine(backends[0].HubInitInfo(job="j", model="policy", replica="vllm", memory="device"))
    hub.error = VersionUnavailable("register the reader with memory='host'")
    with pytest.raises(VersionUnavailable, match="memory='host'"):
        engine.receive_weights(backends[0].HubUpdateInfo(version=3))
    assert not hub.said
    hub.error = None
    engine.receive_weights(backends[0].HubUpdateInfo(version=3))
    assert hub.said == [("replicate", 3), "begins", ("load", ["w"]), "ends", "let go"]


@pytest.mark.parametrize(
    ("given", "memory", "server_memory"),
    [({}, "host", "host"), ({"memory": "device", "server_memory": "device"}, "device", "device")],
)
def test_a_trainer_publishes_where_it_is_told_and_tells_the_server_what_to_map(
    backends: tuple[Any, Any], hub: Hub, given: dict[str, str], memory: str, server_memory: str
) -> None:
    asked: list[Any] = []

    class Client:
        """Notes what it is asked."""

        def __getattr__(self, name: str) -> Any:
            return lambda *given, **named: asked.append((name, *given, *named.values()))

    class Source(list[Any]):
        def metadata(self) -> list[Any]:
            return [SimpleNamespace(name="w", shape=(2, 3), dtype=torch.float32)]

    info = backends[1].HubTrainerInfo(job="j", model="policy", **given)
    trainer = backends[1].HubTrainer.trainer_init(info, client=Client(), source=Source([("w", torch.ones(2, 3))]))
    assert (hub.registered["replica"], hub.registered["memory"]) == ("trainer", memory)
    trainer.send_weights()
    assert (trainer.version, hub.tensors["w"].unique().tolist()) == (1, [1])
    place = {"job": "j", "model": "policy", "replica": "vllm", "agent": None, "memory": server_memory}
    assert asked[0] == ("init_weight_transfer_engine", place)
    assert [name for name, *_ in asked[1:]] == ["start_weight_update", "update_weights", "finish_weight_update"]
    trainer.shutdown()
