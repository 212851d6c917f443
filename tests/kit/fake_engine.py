"""An engine without a model: its tokens follow from seed, position and version alone, at a pace of its own.

`tests.kit.fake_engine:load` is what TENSORHUB_RUNNER_ENGINE names. Settings of its own, in the environment:

- FAKE_STEP_S: seconds a step takes.
- FAKE_PREFILL_STEPS: so many steps make no token of an attempt that was begun last.
- FAKE_DIES_OF: a prompt's first token id that kills the process that begins it.
- FAKE_LENGTH_MEAN: each attempt draws its tokens, and after how many of them it stops, from a chance of its own. The
  number is geometric, so that a response has the same distribution of lengths wherever it was moved.
- FAKE_RECORDS: a folder; each engine writes there what it makes (`tests.kit.engine_records`).
"""

import os
import random
import signal
import struct
import time
from dataclasses import dataclass
from hashlib import blake2b

import torch
from tests.kit.engine_records import EngineRecorder

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


@dataclass(slots=True)
class _Running:
    """One attempt. `left`: after how many further tokens chance stops it; None: its tokens follow from its seed."""

    sampling: Sampling
    position: int
    prefill_steps: int
    left: int | None


class FakeEngine:
    """One engine; its weights are one number, the version."""

    def __init__(self, slots: int, module: torch.nn.Module, name: str) -> None:
        self._slots, self._module = slots, module
        self._step_s = float(os.environ.get("FAKE_STEP_S", "0.002"))
        self._prefill_steps = int(os.environ.get("FAKE_PREFILL_STEPS", "0"))
        self._dies_of = int(os.environ.get("FAKE_DIES_OF", "-1"))
        self._length_mean = float(os.environ.get("FAKE_LENGTH_MEAN", "0"))
        self._chance = random.Random(os.urandom(16))
        self._recorder = EngineRecorder(os.environ.get("FAKE_RECORDS", ""), name)
        self._running: dict[Attempt, _Running] = {}

    def begin(self, attempt: Attempt, prompt: bytes, tokens: bytes, sampling: Sampling) -> None:
        """Go on behind these tokens."""
        first, position = int.from_bytes(prompt[:4], "little"), len(tokens) // 4
        self._recorder.begun(sampling.seed, attempt, position, self._version)
        if first == self._dies_of:
            os.kill(os.getpid(), signal.SIGKILL)
        if first >= VOCABULARY:
            raise BadPrompt(f"the prompt has the token id {first}, but the model's ids are 0 to {VOCABULARY - 1}")
        left = self._draw_length() if self._length_mean else None
        self._running[attempt] = _Running(sampling, position, self._prefill_steps, left)

    def _draw_length(self) -> int:
        """Draw from the geometric distribution of this mean: at least one token."""
        count = 1
        while self._chance.random() >= 1 / self._length_mean:
            count += 1
        return count

    def stop(self, attempt: Attempt) -> None:
        """Leave an attempt."""
        self._running.pop(attempt, None)

    def step(self) -> tuple[StepTokens, ...]:
        """Make one token of each whose prompt is computed."""
        time.sleep(self._step_s)
        version = self._version
        made = []
        for attempt, each in [*self._running.items()]:
            if each.prefill_steps:
                each.prefill_steps -= 1
                continue
            token, position = self._next_token(each), each.position
            finished = None
            if token in each.sampling.stop_token_ids:
                finished = Finished(attempt, 0, "stop")
            elif position + 1 >= each.sampling.tokens_max:
                finished = Finished(attempt, 0, "length")
            if finished is None:
                each.position += 1
            else:
                del self._running[attempt]
            self._recorder.made(each.sampling.seed, attempt, position, token, version)
            logprob = logprob_of(version, position)
            made.append(StepTokens(attempt, struct.pack("<i", token), struct.pack("<f", logprob), finished))
        self._recorder.write()
        return tuple(made)

    def _next_token(self, running: _Running) -> int:
        if running.left is None:
            return token_of(running.sampling.seed, running.position)
        running.left -= 1
        stops = running.sampling.stop_token_ids
        if not running.left and stops:
            return stops[0]
        return next(token for token in iter(lambda: self._chance.randrange(VOCABULARY), -1) if token not in stops)

    @property
    def _version(self) -> int:
        return int(self._module.get_parameter(WEIGHT)[0])

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
    return LoadedEngine(FakeEngine(settings.runner_slots, module, settings.runner_id), module)
