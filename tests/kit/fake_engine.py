"""An engine without a model: its tokens follow from seed, position and version alone, at a pace of its own.

`tests.kit.fake_engine:load` is what TENSORHUB_RUNNER_ENGINE names. Settings of its own, in the environment:
FAKE_STEP_S (seconds a step takes), FAKE_DIES_OF (a prompt's first token id that kills the process that begins it).
"""

import os
import signal
import struct
import time
from hashlib import blake2b

import torch

from tensorhub_common.config.settings import Settings
from tensorhub_common.errors import BadPrompt
from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import Finished, Sampling
from tensorhub_runner.app.engines import LoadedEngine
from tensorhub_runner.core.runner_events import StepTokens
from tensorhub_runner.engines.engine import EngineCapacity, EngineFacts

VOCABULARY = 1000
WEIGHT = "w"


def token_of(seed: int, position: int) -> int:
    """Return the token of a request at a place, whichever engine makes it."""
    said = blake2b(f"{seed}.{position}".encode(), digest_size=4).digest()
    return int.from_bytes(said, "little") % VOCABULARY


def logprob_of(version: float, position: int) -> float:
    """Return the log-probability of a token: it tells which weights made it."""
    return -version - position / 65536


class FakeEngine:
    """One engine; its weights are one number, the version."""

    def __init__(self, slots: int, module: torch.nn.Module) -> None:
        self._slots, self._module = slots, module
        self._step_s = float(os.environ.get("FAKE_STEP_S", "0.002"))
        self._dies_of = int(os.environ.get("FAKE_DIES_OF", "-1"))
        self._running: dict[Attempt, tuple[Sampling, int]] = {}

    def begin(self, attempt: Attempt, prompt: bytes, tokens: bytes, sampling: Sampling) -> None:
        """Go on behind these tokens."""
        first = int.from_bytes(prompt[:4], "little")
        if first == self._dies_of:
            os.kill(os.getpid(), signal.SIGKILL)
        if first >= VOCABULARY:
            raise BadPrompt(f"the prompt has the token id {first}, but the model's ids are 0 to {VOCABULARY - 1}")
        self._running[attempt] = (sampling, len(tokens) // 4)

    def stop(self, attempt: Attempt) -> None:
        """Leave an attempt."""
        self._running.pop(attempt, None)

    def step(self) -> tuple[StepTokens, ...]:
        """Make one token of each."""
        time.sleep(self._step_s)
        version = float(self._module.get_parameter(WEIGHT)[0])
        made = []
        for attempt, (sampling, position) in [*self._running.items()]:
            token = token_of(sampling.seed, position)
            finished = None
            if token in sampling.stop_token_ids:
                finished = Finished(attempt, 0, "stop")
            elif position + 1 >= sampling.tokens_max:
                finished = Finished(attempt, 0, "length")
            if finished is None:
                self._running[attempt] = (sampling, position + 1)
            else:
                del self._running[attempt]
            logprob = logprob_of(version, position)
            made.append(StepTokens(attempt, struct.pack("<i", token), struct.pack("<f", logprob), finished))
        return tuple(made)

    def weights_changed(self) -> None:
        """Nothing is derived from the weights."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running)

    @property
    def capacity(self) -> EngineCapacity:
        """How much it takes."""
        return EngineCapacity(self._slots, 1 << 20, 1 << 30)

    @property
    def facts(self) -> EngineFacts:
        """What it is."""
        return EngineFacts(
            kind="fake", build=(), device="cpu", dtype="float32", is_exact=True, decode_s=(), prefill_s=None
        )


def load(settings: Settings) -> LoadedEngine:
    """Return a fake engine with its one weight."""
    module = torch.nn.Module()
    module.register_parameter(WEIGHT, torch.nn.Parameter(torch.zeros(16), requires_grad=False))
    return LoadedEngine(FakeEngine(settings.runner_slots, module), module)
