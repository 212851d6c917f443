"""The engine of this tree: any causal language model of transformers, on torch alone.

`schedule` decides what a step computes, `packed_model` computes it, `sampling` draws the tokens. This is what is around
them: it checks what is asked, ends what has ended, and keeps what goes wrong with one attempt to that attempt.

In exact mode an attempt's tokens and log-probabilities are a function of prompt, sampling and weights, bit for bit:
docs/design/rollouts/engine.md says why. In the fast mode all attempts are computed at once, in the weights' dtype.
"""

import platform
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from tensorhub_common.errors import BadPrompt
from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import TOKEN_BYTES, Finished, FinishReason, Sampling
from tensorhub_runner.core.runner_events import StepTokens
from tensorhub_runner.engines import model_check
from tensorhub_runner.engines import sampling as token_sampling
from tensorhub_runner.engines.engine import EngineCapacity, EngineFacts, check_begin, check_made
from tensorhub_runner.engines.kv_cache import KvCache
from tensorhub_runner.engines.models import context_tokens
from tensorhub_runner.engines.packed_model import PackedModel
from tensorhub_runner.engines.sampling import Scored
from tensorhub_runner.engines.schedule import Chunk, EngineLimits, Schedule, Sequence
from tensorhub_runner.engines.scoring import scores
from tensorhub_runner.engines.step_times import StepTimes

CPU_INFO: Final = Path("/proc/cpuinfo")
ERROR_CHARS_MAX: Final = 500
"""Limit of what is told of a library's error."""


EXACT_PREFILL_TOKENS_MAX: Final = 64
"""Limit of the tokens of prompts that a step computes in exact mode, where no other is given."""
FAST_PREFILL_TOKENS_MAX: Final = 512
"""The same in fast mode."""


class TorchEngine:
    """One model, and the attempts that are generated with it. Called from one thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        is_exact: bool,
        limits: EngineLimits | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take a model whose parameters have memory. `weights_changed` has to be called once they have values.

        Raises `ValueError` where the limits or the model's device don't fit, and `NotInThisVersion` for a model whose
        attention can't be replaced.
        """
        limits = EngineLimits() if limits is None else limits
        self.capacity: Final = _capacity(model, limits)
        self._longest = context_tokens(model)
        self._model = PackedModel(model, is_exact=is_exact)
        self._cache = KvCache(limits.cache_tokens_max)
        own = EXACT_PREFILL_TOKENS_MAX if is_exact else FAST_PREFILL_TOKENS_MAX
        prefill_tokens_max = limits.prefill_tokens_max or own
        self._schedule = Schedule(limits.cache_tokens_max, prefill_tokens_max)
        self._over: dict[Attempt, StepTokens] = {}
        """Attempts that had ended when they were begun; the next step says so."""
        self._times, self._clock = StepTimes(), clock
        self._has_weights = self._is_checked = False

    # ------------------------------------------------------------------------------------------ what a runner calls

    def begin(self, attempt: Attempt, prompt: bytes, tokens: bytes, sampling: Sampling) -> None:
        """Go on behind these tokens of the response, from the next step on. Raises `BadPrompt`, and changes nothing."""
        check_begin(
            prompt,
            tokens,
            sampling,
            vocabulary=self._model.vocabulary,
            context_tokens_max=self.capacity.context_tokens_max,
        )
        self._check_weights()
        if attempt in self._schedule or attempt in self._over:
            raise RuntimeError(f"{attempt} is in the engine already: stop it first")
        if len(self._schedule) + len(self._over) >= self.capacity.slots:
            raise RuntimeError(f"{self.capacity.slots} attempts are in the engine, which is all it takes")
        sequence = Sequence(attempt, prompt, len(prompt) // TOKEN_BYTES, array("i", prompt + tokens), sampling)
        reason = _ended(sequence)
        if reason is None:
            self._schedule.begin(sequence)
        else:
            self._over[attempt] = StepTokens(attempt, b"", b"", Finished(attempt, sequence.made, reason))

    def stop(self, attempt: Attempt) -> None:
        """Leave an attempt: no further step makes a token of it. One that is not here is no error."""
        self._schedule.end(attempt)
        self._over.pop(attempt, None)

    def step(self) -> tuple[StepTokens, ...]:
        """Make one step: parts of prompts, or one token of each attempt, or both. Without work it returns nothing."""
        self._one_thread()
        over = tuple(self._over.values())
        self._over.clear()
        chunks = self._schedule.plan()
        if not chunks:
            return over
        begun_at = self._clock()
        made = self._made(chunks)
        decoded = sum(each.is_decode for each in chunks)
        prefilled = sum(each.count for each in chunks if not each.is_decode)
        self._times.add(decoded=decoded, prefilled=prefilled, step_s=self._clock() - begun_at)
        return (*over, *made)

    def weights_changed(self) -> None:
        """Make anew what was derived from the weights. Caches of attempts stay, and no later attempt shares them.

        Raises `NotInThisVersion` where the model computes packed rows otherwise than by itself. The first weights that
        show it are asked: numbers, and not all zero.
        """
        self._one_thread()
        self._model.refresh()
        self._schedule.weights_changed()
        if not self._is_checked and model_check.check(self._model):
            self._is_checked = True
            if self._model.is_exact and not model_check.has_equal_rows(self._model):
                self._model.exact_rows = 1
        self._has_weights = True

    def score(self, prompt: bytes, tokens: bytes, start: int, end: int, sampling: Sampling) -> list[Scored | None]:
        """Score tokens `start` to `end` of a response that was made before; no attempt is touched by it.

        None: the logits at a place are no finite numbers. The memory for keys and values is taken for this call, as
        much as the tokens need. Raises `BadPrompt` where the model can't have made these tokens: an id is none of its
        own, or its context ends before.
        """
        self._one_thread()
        self._check_weights()
        check_made(prompt, tokens, sampling, vocabulary=self._model.vocabulary)
        count = (len(prompt) + len(tokens)) // TOKEN_BYTES
        if self._longest is not None and count > self._longest:
            raise BadPrompt(f"prompt and response have {count} tokens, and the model's context ends at {self._longest}")
        return list(scores(self._model, prompt, tokens, start, end, sampling))

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._over or len(self._schedule))

    @property
    def facts(self) -> EngineFacts:
        """What it is, and how fast it was."""
        return EngineFacts(
            kind="torch",
            build=(
                ("torch", torch.__version__),
                ("transformers", transformers.__version__),
                ("processor", _processor(self._model.device)),
                ("exact rows", str(self._model.exact_rows) if self._model.is_exact else "any"),
            ),
            device=str(self._model.device),
            dtype=str(self._model.dtype).removeprefix("torch."),
            is_exact=self._model.is_exact,
            decode_s=self._times.decode_s,
            prefill_s=self._times.prefill_s,
        )

    def _check_weights(self) -> None:
        if not self._has_weights:
            raise RuntimeError("the engine has no weights yet: call weights_changed once the model has values")

    # ------------------------------------------------------------------------------------------ a step

    def _one_thread(self) -> None:
        """Have torch compute in this thread alone, in exact mode: several may divide and add up otherwise."""
        if self._model.is_exact and torch.get_num_threads() != 1:
            torch.set_num_threads(1)

    def _made(self, chunks: list[Chunk]) -> list[StepTokens]:
        """Compute chunks and draw; where that fails, each chunk by itself."""
        try:
            drawn = self._drawn(chunks)
        except Exception as error:  # noqa: BLE001 (what a model or a kernel may raise is not known, and ends one attempt)
            if len(chunks) > 1:
                return [made for chunk in chunks for made in self._made([chunk])]
            return [self._failed(chunks[0].sequence, f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX])]
        for chunk in chunks:
            self._schedule.computed(chunk)
        return [self._take(sequence, each) for sequence, each in drawn]

    def _drawn(self, chunks: list[Chunk]) -> list[tuple[Sequence, token_sampling.Draw | None]]:
        last = self._model.compute(self._cache, chunks)
        if not last:
            return []
        sequences = [chunk.sequence for chunk, _ in last]
        drawn = token_sampling.draw(
            torch.stack([logits for _, logits in last]),
            [each.sampling for each in sequences],
            [len(each.tokens) for each in sequences],
            one_by_one=self._model.is_exact,
        )
        return list(zip(sequences, drawn, strict=True))

    def _take(self, sequence: Sequence, drawn: token_sampling.Draw | None) -> StepTokens:
        if drawn is None:
            return self._failed(
                sequence, "the model's logits are no finite numbers: the weights or the prompt make NaN"
            )
        sequence.tokens.append(drawn.token)
        reason = _ended(sequence)
        finished = None
        if reason is not None:
            finished = Finished(sequence.attempt, sequence.made, reason)
            self._schedule.end(sequence.attempt)
        token, logprob = np.array(drawn.token, "<i4").tobytes(), np.array(drawn.logprob, "<f4").tobytes()
        return StepTokens(
            sequence.attempt, token, logprob, finished, is_current=sequence.weights == self._schedule.weights
        )

    def _failed(self, sequence: Sequence, error: str) -> StepTokens:
        self._schedule.end(sequence.attempt)
        return StepTokens(sequence.attempt, b"", b"", Finished(sequence.attempt, sequence.made, "failed", error))


def _ended(sequence: Sequence) -> FinishReason | None:
    """Return why nothing follows the tokens of a response; None: something does."""
    if sequence.made and sequence.tokens[-1] in sequence.sampling.stop_token_ids:
        return "stop"
    return "length" if sequence.made >= sequence.sampling.tokens_max else None


def _capacity(model: PreTrainedModel, limits: EngineLimits) -> EngineCapacity:
    for name in ("slots", "cache_tokens_max", "prefill_tokens_max"):
        given: int | None = getattr(limits, name)
        if given is not None and given < 1:
            raise ValueError(f"{name} is {given}: give at least 1")
    longest = context_tokens(model)
    own = limits.cache_tokens_max if longest is None else min(longest, limits.cache_tokens_max)
    wanted = own if limits.context_tokens_max is None else limits.context_tokens_max
    if not 1 <= wanted <= own:
        raise ValueError(
            f"context_tokens_max is {wanted}, but the model's context ends at {longest} and the cache at "
            f"{limits.cache_tokens_max}: give 1 to {own}"
        )
    return EngineCapacity(limits.slots, wanted, limits.cache_tokens_max)


def _processor(device: torch.device) -> str:
    """Return the name of what computes. Libraries choose their kernels by it, and kernels round each in its own way."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name} {torch.backends.cpu.get_cpu_capability()}"
