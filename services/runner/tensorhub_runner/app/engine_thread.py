"""The engine in a thread of its own: begun and stopped attempts, steps, and a lock between steps. I/O.

Invariants:
- The engine is called from one thread, and by one caller at a time.
- `between_steps` is held by whoever changes weights, and no step is under way then.
- What the core has said before a step is done before it.
"""

import asyncio
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

from tensorhub_common.errors import TensorHubError
from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import TOKEN_BYTES, Finished, RunEngine
from tensorhub_runner.app.engine_driver import OnStepped, ignore_steps
from tensorhub_runner.core.runner_events import Begin, StepTokens, Stop
from tensorhub_runner.engines.engine import Engine


class EngineThread:
    """One engine; `run` is its task."""

    def __init__(self, engine: Engine) -> None:
        self.on_stepped: OnStepped = ignore_steps
        self.between_steps = asyncio.Lock()
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._commands: list[Begin | Stop] = []
        self._wanted = asyncio.Event()
        self.busy_s = 0.0
        """How long all steps took together."""
        self.recomputed = 0
        """How many tokens of responses attempts have begun behind, for which a cache was computed anew."""

    def do(self, command: Begin | Stop) -> None:
        """Begin or stop an attempt before the next step."""
        self._commands.append(command)
        if isinstance(command, Begin):
            self.recomputed += len(command.tokens) // TOKEN_BYTES
        self._wanted.set()

    async def run(self) -> NoReturn:
        """Make steps while there is work."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wanted.wait()
            async with self.between_steps:
                commands, self._commands = self._commands, []
                made, seconds, has_work = await loop.run_in_executor(self._thread, self._step, commands)
                if not has_work and not self._commands:
                    self._wanted.clear()
                if made:
                    self.on_stepped(made, seconds)
            # Whoever waits for the lock has it now.
            await asyncio.sleep(0)

    async def stand_still(self) -> None:
        """Do nothing: no step is under way while the caller has `between_steps`."""

    async def weights_changed(self) -> RunEngine:
        """Tell the engine that others wrote its weights, and return what it is. The caller has `between_steps`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._weights_changed)

    async def leave(self, attempts: Iterable[Attempt]) -> None:
        """Have the engine leave attempts at once, and make no further step: it is somebody else's from here on."""
        await self.between_steps.acquire()
        # What was forgotten during the last step is nowhere else any more.
        stopped = [each.attempt for each in self._commands if isinstance(each, Stop)]
        self._commands.clear()
        loop = asyncio.get_running_loop()
        for attempt in (*stopped, *attempts):
            await loop.run_in_executor(self._thread, self._engine.stop, attempt)

    async def close(self) -> None:
        """End the thread after its step."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _weights_changed(self) -> RunEngine:
        self._engine.weights_changed()
        # The first weights may decide how an engine computes.
        return self._engine.facts.run_engine

    def _step(self, commands: list[Begin | Stop]) -> tuple[tuple[StepTokens, ...], float, bool]:
        failed = []
        for command in commands:
            match command:
                case Stop(attempt=attempt):
                    self._engine.stop(attempt)
                case Begin(attempt=attempt, prompt=prompt, tokens=tokens, sampling=sampling):
                    try:
                        self._engine.begin(attempt, prompt, tokens, sampling)
                    except TensorHubError as why:
                        failed.append(StepTokens(attempt, b"", b"", Finished(attempt, 0, "failed", str(why))))
        began = time.perf_counter()
        made = self._engine.step() if self._engine.has_work else ()
        took_s = time.perf_counter() - began
        self.busy_s += took_s
        return (*failed, *made), took_s, self._engine.has_work
