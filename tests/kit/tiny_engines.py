"""Tiny causal language models of several families, and engines that generate with them."""

from array import array
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
from transformers import PreTrainedModel

from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import Finished, Sampling
from tensorhub_runner.engines.engine import Engine
from tensorhub_runner.engines.models import build
from tensorhub_runner.engines.schedule import EngineLimits
from tensorhub_runner.engines.torch_engine import TorchEngine

VOCABULARY: Final = 61
CONTEXT: Final = 48
STEPS_MAX: Final = 2000

SIZES: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
WINDOW: Final = 6
"""Shorter than the sequences, so that a window counts."""

CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "llama": {**SIZES, "attention_bias": True},
    "mistral": {**SIZES, "sliding_window": WINDOW},
    "qwen2": {**SIZES, "tie_word_embeddings": True},
    "qwen3": {**SIZES, "head_dim": 12},
    "qwen3_moe": {**SIZES, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 41,
        "n_positions": CONTEXT,
        "vocab_size": VOCABULARY,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "gemma2": {**SIZES, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW},
    # Neither this family nor gpt2 rounds to float32 on its way, so each bit is seen. For odd sizes, as gpt2 has here,
    # kernels add up in another order from one place of a pass to the next.
    "phi": {**SIZES, "partial_rotary_factor": 0.5, "hidden_size": 64, "intermediate_size": 192},
}


def tiny(family: str, dtype: torch.dtype = torch.float32, seed: int = 1) -> PreTrainedModel:
    """Return a model whose logits are far from even."""
    model = build({"model_type": family, **CONFIGS[family]}, dtype)
    fill(model, seed)
    return model


def fill(model: PreTrainedModel, seed: int) -> None:
    """Write other values into the memory of a model's parameters, as a version from the hub does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)


def engine_of(model: PreTrainedModel, *, is_exact: bool = True, **limits: int) -> TorchEngine:
    """Return an engine with the model's weights."""
    engine = TorchEngine(model, is_exact=is_exact, limits=EngineLimits(**{"slots": 8, **limits}))
    engine.weights_changed()
    return engine


def ids(tokens: Iterable[int]) -> bytes:
    return array("i", tokens).tobytes()


class Response:
    """What came of one attempt."""

    def __init__(self, attempt: Attempt, tokens: list[int], logprobs: list[float]) -> None:
        self.attempt, self.tokens, self.logprobs = attempt, tokens, logprobs
        self.finished: Finished | None = None

    def __eq__(self, other: object) -> bool:
        """Compare bit for bit; which attempt it was counts nothing."""
        assert isinstance(other, Response)
        return (self.tokens, self.logprobs, self.reason) == (other.tokens, other.logprobs, other.reason)

    __hash__ = None  # type: ignore[assignment]  # It changes.

    def __repr__(self) -> str:
        return f"Response({self.tokens}, {self.logprobs}, {self.finished})"

    @property
    def reason(self) -> str | None:
        return None if self.finished is None else self.finished.reason


class Desk:
    """Begins attempts at an engine, steps it, and keeps what comes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._responses: dict[Attempt, Response] = {}

    def begin(self, prompt: Iterable[int], sampling: Sampling, before: Response | None = None) -> Response:
        """Begin an attempt, behind what came of another one."""
        attempt = Attempt(1, len(self._responses))
        tokens, logprobs = ([], []) if before is None else (list(before.tokens), list(before.logprobs))
        self.engine.begin(attempt, ids(prompt), ids(tokens), sampling)
        self._responses[attempt] = Response(attempt, tokens, logprobs)
        return self._responses[attempt]

    def stop(self, response: Response) -> None:
        self.engine.stop(response.attempt)

    def step(self) -> None:
        for made in self.engine.step():
            response = self._responses[made.attempt]
            assert response.finished is None
            response.tokens += np.frombuffer(made.tokens, "<i4").tolist()
            response.logprobs += np.frombuffer(made.logprobs, "<f4").tolist()
            response.finished = made.finished

    def run(self) -> None:
        """Step until the engine has no work."""
        for _ in range(STEPS_MAX):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine has work for ever")

    def generate(self, *asked: tuple[list[int], Sampling]) -> list[Response]:
        """Begin all of these at once, and run."""
        responses = [self.begin(*each) for each in asked]
        self.run()
        return responses
