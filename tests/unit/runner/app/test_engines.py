"""Engines that can't be made say which setting is to be changed."""

from pathlib import Path

import pytest
import torch
from tests.kit.tiny_engines import CONFIGS, tiny

from tensorhub._tensors.description import describe
from tensorhub_common.config.settings import InvalidSetting, load
from tensorhub_runner.app.engines import load_engine, server_of
from tensorhub_runner.servers.sglang import SglangServer
from tensorhub_runner.servers.vllm import VllmServer


@pytest.fixture
def model(tmp_path: Path) -> str:
    tiny(next(iter(CONFIGS))).config.save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"MODEL": ""}, "TENSORHUB_RUNNER_MODEL is not set"),
        ({"MODEL": "/nowhere"}, "TENSORHUB_RUNNER_MODEL can't be used"),
        ({"DEVICE": "cuda"}, "exact on CPUs alone: set TENSORHUB_RUNNER_EXACT=off"),
        ({"ENGINE": "llama"}, "must be torch, vllm, sglang, or an engine of your own"),
        ({"ENGINE": "vllm", "URL": "http://127.0.0.1:1"}, "a server, which generates and does not score"),
        ({"ENGINE": "no.such.module:load"}, "engine 'no.such.module:load' can't be loaded"),
    ],
)
def test_what_an_engine_can_not_be_made_of_is_told(model: str, given: dict[str, str], said: str) -> None:
    settings = {f"TENSORHUB_RUNNER_{name}": text for name, text in ({"MODEL": model} | given).items()}
    with pytest.raises(InvalidSetting, match=said):
        load_engine(load(settings))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "neither TENSORHUB_RUNNER_URL nor TENSORHUB_RUNNER_MODEL is set"),
        ({"MODEL": "/nowhere"}, "no config.json in /nowhere"),
        ({"URL": "http://127.0.0.1:1", "VLLM_ARGS": "--seed 1"}, "is for vLLM in process"),
        ({"URL": "http://127.0.0.1:1", "INSTALL": "mapped"}, "TENSORHUB_RUNNER_INSTALL is mapped"),
        ({"URL": "http://10.0.0.7:8000"}, "no authentication"),
        ({"URL": "https://127.0.0.1:8000"}, "as http://127.0.0.1:8000"),
        ({"URL": "http://127.0.0.1:8000/v1"}, "a server's root"),
    ],
)
def test_what_can_not_be_a_server_is_told(given: dict[str, str], said: str) -> None:
    settings = {f"TENSORHUB_RUNNER_{name}": text for name, text in ({"ENGINE": "vllm"} | given).items()}
    with pytest.raises(InvalidSetting, match=said):
        server_of(load(settings))


def test_a_server_is_found_where_the_settings_name_one() -> None:
    for url in ("http://127.0.0.1:8000", "http://localhost:8000/", "http://[::1]:8000"):
        found = server_of(load({"TENSORHUB_RUNNER_ENGINE": "vllm", "TENSORHUB_RUNNER_URL": url}))
        assert isinstance(found, VllmServer)
        assert found.url == url.rstrip("/")
    other = server_of(load({"TENSORHUB_RUNNER_ENGINE": "sglang", "TENSORHUB_RUNNER_URL": "http://127.0.0.1:30000"}))
    assert isinstance(other, SglangServer)
    assert server_of(load({"TENSORHUB_RUNNER_ENGINE": "torch"})) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_told(model: str) -> None:
    settings = {"TENSORHUB_RUNNER_MODEL": model, "TENSORHUB_RUNNER_DEVICE": "cuda", "TENSORHUB_RUNNER_EXACT": "off"}
    with pytest.raises(InvalidSetting, match="TENSORHUB_RUNNER_DEVICE=cuda can't be used"):
        load_engine(load(settings))


def test_what_is_registered_is_what_the_version_has_of_what_the_engine_computes(model: str) -> None:
    loaded = load_engine(load({"TENSORHUB_RUNNER_MODEL": model}))
    module = loaded.module
    parameters = [*dict(module.named_parameters())]
    (table, other) = sorted(loaded.computed)
    for of_version, left_out in (([table, other], []), ([other], [table]), ([], [table, other])):
        sent = [*parameters, *of_version]
        registered = describe(module, loaded.mapping(sent))
        kept = {name: each for name, each in module.named_buffers() if name not in left_out}
        assert registered.layout == describe({**dict(module.named_parameters()), **kept}).layout
    assert loaded.mapping([*parameters, table, other]) is None
    # A weight is never left out, whatever a version has.
    assert {*parameters} <= {each.name for each in describe(module, loaded.mapping([])).layout.tensors}
