"""The torch engine, whose responses end where a benchmark has drawn it, and whose steps take what it says at least.

The model computes each token, and a draw of lots says after how many a response ends: so lengths are skewed, are equal
with each policy, and none of what decides knows them. Steps that are stretched stand for an engine that has a processor
of its own: several on a few cores would else share these, and an instance with less to do would make others faster.

A runner loads it by `TENSORHUB_RUNNER_ENGINE=benchmarks.rollouts.drawn_engine:load`, and finds `Drawn` in `FILE` of the
hub's directory.
"""

import dataclasses
import mmap
import os
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.demo_rl.counted_engine import FOLDER as COUNTS
from benchmarks.demo_rl.counted_engine import CountedEngine
from tensorhub_common.config.settings import Settings
from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import TOKEN_BYTES, EngineStep, Sampling
from tensorhub_rollout.policy.plateau import StepModel
from tensorhub_runner.app.engines import LoadedEngine, load_engine
from tensorhub_runner.core.runner_events import StepTokens
from tensorhub_runner.engines.engine import Engine

FILE: Final = "drawn.json"
STEPS: Final = "steps"
"""A folder of the hub's directory; it has one file for each process, of its latest steps: from each to the next one."""
KILLED: Final = "killed"
"""A folder of the hub's directory; it has one file for each runner that was killed, with when: seconds of the epoch."""
STEP: Final = struct.Struct("<ddd")
"""Batch, context tokens of each request, seconds."""
STEPS_MAX: Final = 4096
"""Limit of the steps that a process keeps, the latest."""


class Drawn(msgspec.Struct, frozen=True):
    """What was drawn, and how long steps take at least, in seconds."""

    lengths: dict[int, int]
    """By a request's own seed: how many tokens its response has."""
    step: StepModel = StepModel(0.0, 0.0, 0.0)
    prefill_s: float = 0.0
    """For each token of a context that is computed anew."""
    back_s: float = 0.0
    """A runner that was killed has its engine so long after that, or as soon as it can."""


class DrawnEngine(CountedEngine):
    """An engine whose responses end where it was drawn, and whose tokens are counted."""

    def __init__(self, engine: Engine, hub_directory: Path, name: str) -> None:
        """Do as the hub's directory says, and keep counts and the latest steps there, also of a process that dies."""
        own = f"{name}-{os.getpid()}"
        super().__init__(engine, hub_directory / COUNTS / own)
        self._drawn = _drawn_of(hub_directory)
        self._contexts: dict[Attempt, int] = {}
        self._prefill = 0
        """Tokens of contexts that are to be computed in the next step."""
        path = hub_directory / STEPS / own
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(STEPS_MAX * STEP.size))
        with path.open("r+b") as file:
            self._steps = mmap.mmap(file.fileno(), STEPS_MAX * STEP.size)
        self._kept = 0
        self._last: tuple[int, float, float] | None = None
        """The step before, where it has computed no context and another follows: batch, context and beginning."""

    def begin(self, attempt: Attempt, prompt: bytes, tokens: bytes, sampling: Sampling) -> None:
        """Go on behind these tokens of the response, until it has as many as were drawn."""
        ends = msgspec.structs.replace(sampling, tokens_max=self._drawn.lengths[sampling.seed])
        super().begin(attempt, prompt, tokens, ends)
        self._contexts[attempt] = context = (len(prompt) + len(tokens)) // TOKEN_BYTES
        self._prefill += context

    def stop(self, attempt: Attempt) -> None:
        """Leave an attempt."""
        super().stop(attempt)
        self._contexts.pop(attempt, None)
        if not self._engine.has_work:
            self._last = None  # A trainer's engine that has been told to give all away: no step follows the last one.

    def step(self) -> tuple[StepTokens, ...]:
        """Make one step, and wait until it has taken what it is to take."""
        began = time.perf_counter()
        if self._last is not None:
            # What the runner does between two steps counts: an instance makes no token meanwhile.
            batch, context, begun = self._last
            self._keep(EngineStep(batch, context, began - begun))
        made = tuple(map(_said, super().step()))
        grown = [each.attempt for each in made if each.tokens]
        batch, prefill, self._prefill = len(grown), self._prefill, 0
        context = sum(self._contexts[each] for each in grown) / max(1, batch)
        least_s = self._drawn.step.seconds(batch, context) if batch else 0.0
        least_s += self._drawn.prefill_s * prefill
        time.sleep(max(0.0, began + least_s - time.perf_counter()))
        self._last = (batch, context, began) if batch and not prefill and self._engine.has_work else None
        for each in made:
            if each.finished is not None:
                self._contexts.pop(each.attempt, None)
            elif each.attempt in self._contexts:
                self._contexts[each.attempt] += len(each.tokens) // TOKEN_BYTES
        return made

    def _keep(self, step: EngineStep) -> None:
        at = self._kept % STEPS_MAX * STEP.size
        STEP.pack_into(self._steps, at, step.batch, step.context_tokens, step.seconds)
        self._kept += 1


def _said(made: StepTokens) -> StepTokens:
    """Return a step's tokens: what ends where it was drawn has stopped, by its trainer's bound it would be cut."""
    if made.finished is None or made.finished.reason != "length":
        return made
    return msgspec.structs.replace(made, finished=msgspec.structs.replace(made.finished, reason="stop"))


def load(settings: Settings) -> LoadedEngine:
    """Make the torch engine of the settings' model, with drawn lengths.

    How long torch takes to be imported depends on what else the machine does; so a runner that was killed waits until
    it has been away for the same time in each job.
    """
    loaded = load_engine(dataclasses.replace(settings, runner_engine="torch"))
    killed = settings.dir / KILLED / settings.runner_id
    if killed.exists():
        back_at = float(killed.read_text()) + _drawn_of(settings.dir).back_s
        time.sleep(max(0.0, back_at - time.time()))
    return LoadedEngine(DrawnEngine(loaded.engine, settings.dir, settings.runner_id), loaded.module)


def _drawn_of(hub_directory: Path) -> Drawn:
    return msgspec.json.decode((hub_directory / FILE).read_bytes(), type=Drawn, strict=False)


def killing(hub_directory: Path, runner: str) -> None:
    """Note that a runner is about to be killed."""
    folder = hub_directory / KILLED
    folder.mkdir(exist_ok=True)
    (folder / runner).write_text(str(time.time()))


def steps_of(hub_directory: Path) -> list[EngineStep]:
    """Return the latest steps of all processes that a hub has had; none of them computed a context."""
    found = [*_steps_in(hub_directory)]
    return [EngineStep(int(batch), context, seconds) for batch, context, seconds in found if batch]


def _steps_in(hub_directory: Path) -> Iterable[tuple[float, float, float]]:
    for path in sorted((hub_directory / STEPS).glob("*")):
        yield from STEP.iter_unpack(path.read_bytes())
