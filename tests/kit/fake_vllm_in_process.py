"""vLLM's modules with the names alone that a runner imports, and an `AsyncLLM` without a model.

Its tokens follow from seed and position alone, its log-probabilities from the version too. What a runner can't learn
from the real one, of 0.32, it can't learn from this one:

- What was asked of a core that dies is never answered. What is asked of it later raises.
- An error of a worker comes as a bare `Exception`, and that of a stream as vLLM's own.
- Pausing is answered before the ends of the streams have come through their tasks.
- A stream of an engine that was shut down says nothing more. One whose core has died raises.
"""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kit.fake_engine import logprob_of, token_of

from tensorhub.integrations.vllm import ENDS_WITH

STEP_S = 0.002
VOCABULARY = 1000
TEMPERATURE_MAX = 2.0


class VLLMError(Exception):
    pass


class VLLMClientError(VLLMError):
    pass


class VLLMValidationError(VLLMClientError):
    pass


class VLLMServerError(VLLMError):
    pass


class EngineDeadError(VLLMServerError):
    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above) for the root cause.")


class GracefulHTTPError(VLLMError):
    pass


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams:
    def __init__(self, **given: Any) -> None:
        names = {"max_tokens", "temperature", "top_p", "top_k", "seed", "stop_token_ids", "ignore_eos", "logprobs"}
        assert {*given} <= names | {"detokenize", "output_kind"}
        vars(self).update(given)
        # The real one's bound, and not a ValueError.
        if not 0.0 <= given["temperature"] <= TEMPERATURE_MAX:
            raise VLLMValidationError(f"temperature must be in [0, 2], got {given['temperature']}.")


def TokensPrompt(**given: Any) -> dict[str, Any]:  # noqa: N802 (vLLM's name)
    assert {*given} <= {"prompt_token_ids", "cache_salt"}
    return given


@dataclass
class WeightTransferInitRequest:
    init_info: dict[str, Any]


@dataclass
class WeightTransferUpdateRequest:
    update_info: dict[str, Any]


@dataclass
class WeightTransferConfig:
    backend: str = "nccl"


@dataclass
class AsyncEngineArgs:
    model: str = ""
    max_model_len: int | None = None
    load_format: str = "auto"
    logprobs_mode: str = "raw_logprobs"
    skip_tokenizer_init: bool = False
    disable_log_stats: bool = False
    weight_transfer_config: WeightTransferConfig | None = None

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--model")
        parser.add_argument("--max-model-len", type=int)
        parser.add_argument("--load-format", default="auto")
        parser.add_argument("--logprobs-mode", default="raw_logprobs")
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "AsyncEngineArgs":
        return cls(**vars(args))

    def create_engine_config(self) -> object:
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ValueError(f"max_model_len must be positive, got {self.max_model_len}")
        return object()


@dataclass
class FakeVllmInProcess:
    """What a test sets decides what goes wrong with each engine; what it reads is what was asked."""

    start_error: str | None = None
    """No engine can be made."""
    errors: dict[str, str] = field(default_factory=dict)
    """The workers raise this, by the method of `AsyncLLM`."""
    holds: set[str] = field(default_factory=set)
    """Methods of `AsyncLLM` that are not answered while they stand here."""
    is_full: bool = False
    is_silent: bool = False
    """Its streams make no token."""
    tokens_at_once: int = 1
    gives_logprobs: bool = True
    ends_as: str = "length"
    versions_said: list[str] | None = None
    """What its responses say that they are of; None: the truth."""
    made: list["AsyncLLM"] = field(default_factory=list)
    arguments: list[AsyncEngineArgs] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    requests: list[tuple[str, dict[str, Any], SamplingParams]] = field(default_factory=list)
    places: list[dict[str, str]] = field(default_factory=list)

    @property
    def engine(self) -> "AsyncLLM":
        return self.made[-1]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the modules where they are imported from, and leave the environment as it was."""
        for name in (ENDS_WITH, "VLLM_WORKER_MULTIPROC_METHOD"):
            monkeypatch.setenv(name, "")
        for name, content in self.modules().items():
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)

    def modules(self) -> dict[str, dict[str, Any]]:
        engine = SimpleNamespace(from_engine_args=lambda arguments: AsyncLLM(self, arguments))
        return {
            "vllm": {"__version__": "0.32.0", "SamplingParams": SamplingParams, "TokensPrompt": TokensPrompt},
            "vllm.config": {"WeightTransferConfig": WeightTransferConfig},
            "vllm.distributed": {},
            "vllm.distributed.weight_transfer": {},
            "vllm.distributed.weight_transfer.base": {
                "WeightTransferInitRequest": WeightTransferInitRequest,
                "WeightTransferUpdateRequest": WeightTransferUpdateRequest,
            },
            "vllm.engine": {},
            "vllm.engine.arg_utils": {"AsyncEngineArgs": AsyncEngineArgs},
            "vllm.exceptions": {"GracefulHTTPError": GracefulHTTPError, "VLLMClientError": VLLMClientError},
            "vllm.sampling_params": {"RequestOutputKind": RequestOutputKind},
            "vllm.utils": {},
            "vllm.utils.argparse_utils": {"FlexibleArgumentParser": argparse.ArgumentParser},
            "vllm.v1": {},
            "vllm.v1.engine": {},
            "vllm.v1.engine.async_llm": {"AsyncLLM": engine},
        }


class AsyncLLM:
    """One engine, with its core."""

    def __init__(self, machine: FakeVllmInProcess, arguments: AsyncEngineArgs) -> None:
        machine.arguments.append(arguments)
        if machine.start_error is not None:
            raise RuntimeError(machine.start_error)
        machine.made.append(self)
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
        self.version = "default"
        """What is in its model."""
        self.label = "default"
        """What its core says that it is of."""
        self.running = self.waiting = 0
        self.is_updating = False
        self.ended_after_s: float | None = None
        """The time that `shutdown` gave its processes."""
        self._machine = machine
        self._is_dead = self._is_paused = False
        self._pauses = 0

    def die(self) -> None:
        """End its core, as a kill does."""
        self._is_dead = True

    @property
    def errored(self) -> bool:
        return self._is_dead or self.ended_after_s is not None

    def shutdown(self, timeout: float | None = None) -> None:
        assert timeout is not None
        self.ended_after_s = timeout

    # ------------------------------------------------------------------------------------------ tokens

    async def generate(
        self, prompt: dict[str, Any], sampling_params: SamplingParams, request_id: str
    ) -> AsyncIterator[SimpleNamespace]:
        machine, params = self._machine, vars(sampling_params)
        machine.requests.append((request_id, prompt, sampling_params))
        if self.errored:
            raise EngineDeadError
        if max(prompt["prompt_token_ids"]) >= VOCABULARY:
            raise VLLMValidationError("Token id 5000 is out of vocabulary")
        if machine.is_full:
            raise GracefulHTTPError("The engine is currently busy and cannot accept new requests.")
        self.running += 1
        try:
            pauses, count = self._pauses, 0
            # As a runner asks it: the prompt's first token says how long it is, and its second is the seed.
            length, seed = prompt["prompt_token_ids"][:2]
            made_before = len(prompt["prompt_token_ids"]) - length
            while True:
                await asyncio.sleep(STEP_S)
                if self.ended_after_s is not None:
                    await asyncio.Event().wait()
                if self._is_dead:
                    raise EngineDeadError
                if self._pauses != pauses:
                    # The tokens of a step that was under way are lost, and its end has none.
                    yield self._output([], 0, "abort")
                    return
                if self._is_paused or machine.is_silent:
                    continue
                several = min(machine.tokens_at_once, params["max_tokens"] - count)
                positions = range(made_before + count, made_before + count + several)
                tokens = [token_of(seed, position) for position in positions]
                stops = [at for at, token in enumerate(tokens, 1) if token in params["stop_token_ids"]]
                tokens = tokens[: stops[0]] if stops else tokens
                count += len(tokens)
                reason = "stop" if stops else (machine.ends_as if count == params["max_tokens"] else None)
                yield self._output(tokens, made_before + count - len(tokens), reason)
                if reason is not None:
                    return
        finally:
            self.running -= 1

    def _output(self, tokens: list[int], first: int, reason: str | None) -> SimpleNamespace:
        machine = self._machine
        version = float(self.version) if self.version.isdigit() else 0.0
        logprobs = [
            {token: SimpleNamespace(logprob=logprob_of(version, first + at))} for at, token in enumerate(tokens)
        ]
        said = [self.label] if machine.versions_said is None else machine.versions_said
        one = SimpleNamespace(
            token_ids=tokens,
            logprobs=logprobs if machine.gives_logprobs else None,
            finish_reason=reason,
            weight_versions=None if reason is None else [SimpleNamespace(version=each) for each in said],
        )
        return SimpleNamespace(outputs=[one])

    async def pause_generation(self, *, mode: str = "abort") -> None:
        assert mode == "abort"
        await self._asked("pause_generation", "pause_scheduler")
        self._is_paused = True
        self._pauses += 1

    async def resume_generation(self) -> None:
        await self._asked("resume_generation", "resume_scheduler")
        self._is_paused = False

    # ------------------------------------------------------------------------------------------ weights

    async def init_weight_transfer_engine(self, request: WeightTransferInitRequest) -> None:
        await self._asked("init_weight_transfer_engine")
        self._machine.places.append(request.init_info)

    async def start_weight_update(self) -> None:
        await self._asked("start_weight_update")
        if self.is_updating:
            raise self._failure("start_weight_update called while a weight update is already active.")
        self.is_updating = True

    async def update_weights(self, request: WeightTransferUpdateRequest) -> None:
        try:
            await self._asked("update_weights")
        except Exception:
            # As a worker ends an update that has raised.
            self.is_updating = False
            raise
        assert self.is_updating
        assert self._is_paused
        self.version = str(request.update_info["version"])

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await self._asked("finish_weight_update")
        if not self.is_updating:
            raise self._failure("finish_weight_update called without a matching start_weight_update.")
        self.is_updating = False
        if weight_version is not None:
            self.label = weight_version

    async def _asked(self, method: str, method_of_core: str = "collective_rpc") -> None:
        self._machine.asked.append(method)
        if self.errored:
            raise EngineDeadError
        self.waiting += 1
        try:
            # Nothing ends a question whose core has died.
            while method in self._machine.holds or self.errored:  # noqa: ASYNC110 (a test sets what it stands for)
                await asyncio.sleep(STEP_S)
        finally:
            self.waiting -= 1
        if method in self._machine.errors:
            raise self._failure(self._machine.errors[method], method_of_core)

    @staticmethod
    def _failure(said: str, method: str = "collective_rpc") -> Exception:
        return Exception(f"Call to {method} method failed: {said}")
