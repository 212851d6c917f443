"""What a runner asks of an engine: begin and stop attempts, make a step, take changed weights.

An engine is synchronous and is called from one thread. It knows no request, no version and no clock of the fleet: the
runner's core decides, and its effects `Begin` and `Stop` are calls here. Tokens are int32 and log-probabilities
float32, little-endian, as in protocol/rollout/messages.py.

Always true:
- An attempt that was begun is in the engine until `stop`, or until a step gives its `finished`.
- What goes wrong with one attempt ends that attempt, as `failed` with an error, and neither the engine nor another one.
- Weights are read in `step` and `weights_changed` alone. Between them others may write them.
"""

from typing import Final, Protocol

import msgspec

from tensorhub_common.errors import BadPrompt
from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import TOKEN_BYTES, RunEngine, Sampling
from tensorhub_runner.core.runner_events import StepTokens

SEED_BITS: Final = 64
BUILD_CHARS_MAX: Final = 256
"""Limit of what each token run tells of its engine's build."""


class EngineCapacity(msgspec.Struct, frozen=True):
    """How much an engine takes."""

    slots: int
    """How many attempts are in it at once."""
    context_tokens_max: int
    """Limit of an attempt's prompt and response together."""
    cache_tokens_max: int
    """Limit of the tokens of all attempts whose keys and values are kept."""


class EngineFacts(msgspec.Struct, frozen=True):
    """What an engine is, and how fast it was."""

    kind: str
    build: tuple[tuple[str, str], ...]
    """Names and versions of what computes. Two exact engines make the same tokens where these are equal."""
    device: str
    dtype: str
    """In which it computes."""
    is_exact: bool
    """Whether an attempt's tokens and log-probabilities depend on nothing but its prompt, sampling and weights."""
    decode_s: tuple[tuple[int, float], ...]
    """By batch size: how long a step takes that makes one token of each attempt and computes no prompt, in seconds."""
    prefill_s: float | None
    """How long one token of a prompt takes, in seconds. None: not measured yet."""

    @property
    def run_engine(self) -> RunEngine:
        """What the token runs of this engine tell of it."""
        build = ", ".join(f"{name} {version}" for name, version in self.build)
        return RunEngine(self.kind, build[:BUILD_CHARS_MAX], self.dtype, self.is_exact)


class Engine(Protocol):
    """One engine, with the weights of one model."""

    def begin(self, attempt: Attempt, prompt: bytes, tokens: bytes, sampling: Sampling) -> None:
        """Go on behind these tokens of the response, from the next step on. Raises `BadPrompt`, and changes nothing."""

    def stop(self, attempt: Attempt) -> None:
        """Leave an attempt: no further step makes a token of it. One that is not here is no error."""

    def step(self) -> tuple[StepTokens, ...]:
        """Make one step: parts of prompts, or one token of each attempt, or both. Without work it returns nothing."""

    def weights_changed(self) -> None:
        """Make anew what was derived from the weights: others wrote them since the last step.

        Caches of attempts stay. One that must not go on with the cache of the old weights is stopped and begun again.
        """

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    @property
    def capacity(self) -> EngineCapacity:
        """How much it takes."""

    @property
    def facts(self) -> EngineFacts:
        """What it is, and how fast it was."""


def check_begin(prompt: bytes, tokens: bytes, sampling: Sampling, *, vocabulary: int, context_tokens_max: int) -> None:
    """Raise `BadPrompt` where an engine can't generate from this: it has `vocabulary` tokens, of ids from 0 on."""
    check_made(prompt, tokens, sampling, vocabulary=vocabulary)
    prompt_tokens, made = len(prompt) // TOKEN_BYTES, len(tokens) // TOKEN_BYTES
    if prompt_tokens + sampling.tokens_max > context_tokens_max:
        raise BadPrompt(
            f"the prompt has {prompt_tokens} tokens and the response may have {sampling.tokens_max}, but this engine's "
            f"context ends at {context_tokens_max}: shorten one of them"
        )
    if made > sampling.tokens_max:
        raise BadPrompt(f"the response has {made} tokens already, but may have {sampling.tokens_max}")


def check_made(prompt: bytes, tokens: bytes, sampling: Sampling, *, vocabulary: int) -> None:
    """Raise `BadPrompt` where no engine with `vocabulary` tokens can have made these of this prompt."""
    if not prompt:
        raise BadPrompt("the prompt has no token: give at least one")
    for what, given in (("prompt", prompt), ("response", tokens)):
        _check_tokens(what, given, vocabulary)
    _check_sampling(sampling)


def _check_tokens(what: str, given: bytes, vocabulary: int) -> None:
    if len(given) % TOKEN_BYTES:
        raise BadPrompt(f"the {what} has {len(given)} bytes, which is no whole number of int32 token ids")
    ids = memoryview(given).cast("i")
    if not ids:
        return
    wrong = next((each for each in (min(ids), max(ids)) if not 0 <= each < vocabulary), None)
    if wrong is not None:
        raise BadPrompt(f"the {what} has the token id {wrong}, but the model's ids are 0 to {vocabulary - 1}")


def _check_sampling(sampling: Sampling) -> None:
    # Written so that NaN is refused as well.
    if not 0.0 <= sampling.temperature < float("inf"):
        raise BadPrompt(f"temperature is {sampling.temperature}: give 0 for the likeliest token, or a positive number")
    if not 0.0 < sampling.top_p <= 1.0:
        raise BadPrompt(f"top_p is {sampling.top_p}: give a number above 0 and up to 1, which keeps all tokens")
    if sampling.top_k < 0:
        raise BadPrompt(f"top_k is {sampling.top_k}: give a positive number, or 0, which keeps all tokens")
    if sampling.tokens_max < 1:
        raise BadPrompt(f"tokens_max is {sampling.tokens_max}: a response has at least one token")
    if not -(1 << (SEED_BITS - 1)) <= sampling.seed < 1 << SEED_BITS:
        raise BadPrompt(f"the seed {sampling.seed} does not fit {SEED_BITS} bits")
