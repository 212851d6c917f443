"""The fake vLLM in process has no name that the real one lacks, and options are refused by vLLM's own parser."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest
from tests.kit import fake_vllm_in_process as fake
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import CompletionOutput
from vllm.v1.engine import exceptions as engine_exceptions
from vllm.v1.engine.async_llm import AsyncLLM

from tensorhub_common.config.settings import InvalidSetting
from tensorhub_runner.servers.vllm_in_process import VllmInProcess

OWN = {"die", "generate", "running"}
"""What a test asks of the fake; `generate` is compared by itself."""


def test_each_name_is_one_of_vllms() -> None:
    for module, names in fake.FakeVllmInProcess().modules().items():
        theirs = import_module(module)
        assert all(hasattr(theirs, name) for name in names)
    for name in fake.AsyncEngineArgs.__dataclass_fields__:
        assert name in AsyncEngineArgs.__dataclass_fields__
    assert {"token_ids", "logprobs", "finish_reason", "weight_versions"} <= {*CompletionOutput.__dataclass_fields__}


def test_each_method_is_asked_as_one_of_vllms() -> None:
    for name, method in inspect.getmembers(fake.AsyncLLM, inspect.isfunction):
        if name.startswith("_") or name in OWN:
            continue
        theirs = inspect.signature(getattr(AsyncLLM, name)).parameters
        for parameter in inspect.signature(method).parameters.values():
            assert parameter.kind == theirs[parameter.name].kind
            assert parameter.default == theirs[parameter.name].default
    assert isinstance(AsyncLLM.errored, property)
    first = [*inspect.signature(AsyncLLM.generate).parameters]
    assert first[:4] == [*inspect.signature(fake.AsyncLLM.generate).parameters]


@pytest.mark.parametrize(
    "kind", [fake.VLLMClientError, fake.VLLMValidationError, fake.GracefulHTTPError, fake.EngineDeadError]
)
def test_an_error_is_of_the_same_kinds_as_theirs(kind: type[Exception]) -> None:
    module = engine_exceptions if kind is fake.EngineDeadError else import_module("vllm.exceptions")
    theirs = getattr(module, kind.__name__)
    assert [each.__name__ for each in theirs.__mro__] == [each.__name__ for each in kind.__mro__]


def test_a_temperature_is_refused_as_theirs_is() -> None:
    told = []
    for kind in (SamplingParams, fake.SamplingParams):
        with pytest.raises(Exception, match=r"temperature must be in \[0, 2\], got 3.0") as why:
            kind(temperature=3.0)
        told.append(type(why.value).__name__)
    assert told == ["VLLMValidationError"] * 2


@pytest.mark.parametrize(
    ("options", "told"), [("--max-modle-len 64", "unrecognized arguments"), ("--max-model-len 4096", "max_model_len")]
)
@pytest.mark.usefixtures("vllm_here")
def test_options_that_vllm_refuses_are_a_wrong_setting(model_folder: Path, options: str, told: str) -> None:
    with pytest.raises(InvalidSetting, match=f"(?s)TENSORHUB_RUNNER_VLLM_ARGS can't be used: .*{told}"):
        VllmInProcess(model_folder, options)
