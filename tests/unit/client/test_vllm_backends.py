"""The two weight-transfer backends for vLLM, whose modules are fake here: what they ask of the hub, and in which order.

Tests with vLLM itself stand in tests/integrations.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kit.fake_vllm_modules import FakeModel, backends_over_fakes, worker_of

import tensorhub
from tensorhub import TensorSpec, VersionUnavailable


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    with backends_over_fakes(monkeypatch) as both:
        yield both


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


@pytest.mark.parametrize(("given", "memory"), [({}, "host"), ({"memory": "device"}, "device")])
def test_a_worker_maps_the_memory_that_it_is_told_of(
    backends: tuple[Any, Any], hub: Hub, given: dict[str, str], memory: str
) -> None:
    """Of the host, as runners beside a server want it, unless it is told of its GPU's."""
    engine = worker_of(backends[0], FakeModel((2, 3), hub.said), rank=1)
    engine.init_transfer_engine(backends[0].HubInitInfo(job="j", model="policy", replica="vllm", agent="/a", **given))
    assert hub.connected == {"job": "j", "agent": "/a"}
    assert hub.registered == {
        "model": "policy", "names": ["w"], "replica": "vllm-rank-1", "spot": True, "install": "mapped", "memory": memory
    }  # fmt: skip


def test_a_version_is_let_go_of_once_it_is_loaded_and_the_model_untouched_without_one(
    backends: tuple[Any, Any], hub: Hub
) -> None:
    engine = worker_of(backends[0], FakeModel((2, 3), hub.said), rank=1)
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
