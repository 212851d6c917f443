"""The torch engine, with a count of the tokens that it makes in a file, which outlives the process however it ends.

A runner loads it by `TENSORHUB_RUNNER_ENGINE=benchmarks.demo_rl.counted_engine:load`. What all processes made, less
what was delivered, is what kills made runners make again.
"""

import dataclasses
import mmap
import os
import struct
from pathlib import Path
from typing import Final

from tensorhub_common.config.settings import Settings
from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import TOKEN_BYTES, Sampling
from tensorhub_runner.app.engines import LoadedEngine, load_engine
from tensorhub_runner.core.runner_events import StepTokens
from tensorhub_runner.engines.engine import Engine, EngineCapacity, EngineFacts

FOLDER: Final = "made"
"""In the hub's directory; it has one file of eight bytes for each process."""
COUNT: Final = struct.Struct("<q")


class CountedEngine:
    """An engine whose tokens are counted."""

    def __init__(self, engine: Engine, path: Path) -> None:
        self._engine = engine
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(COUNT.size))
        with path.open("r+b") as file:
            self._count = mmap.mmap(file.fileno(), COUNT.size)
        self._made = 0

    def step(self) -> tuple[StepTokens, ...]:
        """Make one step, and count its tokens."""
        made = self._engine.step()
        self._made += sum(len(each.tokens) // TOKEN_BYTES for each in made)
        COUNT.pack_into(self._count, 0, self._made)
        return made

    def begin(self, attempt: Attempt, prompt: bytes, tokens: bytes, sampling: Sampling) -> None:
        """Go on behind these tokens of the response."""
        self._engine.begin(attempt, prompt, tokens, sampling)

    def stop(self, attempt: Attempt) -> None:
        """Leave an attempt."""
        self._engine.stop(attempt)

    def weights_changed(self) -> None:
        """Take changed weights."""
        self._engine.weights_changed()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._engine.has_work

    @property
    def capacity(self) -> EngineCapacity:
        """How much it takes."""
        return self._engine.capacity

    @property
    def facts(self) -> EngineFacts:
        """What it is, and how fast it was."""
        return self._engine.facts


def load(settings: Settings) -> LoadedEngine:
    """Make the torch engine of the settings' model, counted."""
    loaded = load_engine(dataclasses.replace(settings, runner_engine="torch"))
    path = settings.dir / FOLDER / f"{settings.runner_id}-{os.getpid()}"
    return LoadedEngine(CountedEngine(loaded.engine, path), loaded.module)


def tokens_made(hub_directory: Path) -> int:
    """Return how many tokens all processes of a hub have made so far."""
    return sum(COUNT.unpack(path.read_bytes())[0] for path in (hub_directory / FOLDER).glob("*"))
