"""A trainer's own engine as an instance, for as long as it seeds (RLBoost, NSDI'26, section 4.1). I/O.

It runs in the trainer's process, which owns the engine before and after. Its weights are the version that the trainer
has published, and stand still meanwhile. The SDK finds this module by its name, since it depends on no service.

Invariant: once `leave` is back, the engine has none of its attempts, and makes no step.
"""

import asyncio
import time
from contextlib import suppress
from typing import Final

from tensorhub_common.bus.connection import Bus
from tensorhub_common.protocol.subjects import LOCAL_RUNNER
from tensorhub_common.runtime.supervision import Fault, Supervisor, log_only
from tensorhub_runner.app.engine_thread import EngineThread
from tensorhub_runner.app.leader_link import LeaderLink
from tensorhub_runner.core.runner import Runner, RunnerLimits
from tensorhub_runner.core.runner_events import PreemptionNoticed, WeightsLoaded
from tensorhub_runner.engines.engine import Engine

LEAVE_S_MAX: Final = 5.0
"""So long the leader is given to take over what has begun; what it lacks then is made again elsewhere."""
FORGET_S_MAX: Final = 0.25
"""So long others are given to go on once the leader has all tokens: then it need not find out that this one is gone."""


class LocalInstance:
    """One engine between `start` and `leave`."""

    def __init__(self, bus: Bus, job: str, model: str, engine: Engine) -> None:
        """Prepare. `model` is the hub's."""
        self._work = Supervisor("the trainer's own engine", on_fault=self._failed)
        self._error: BaseException | None = None
        limits = RunnerLimits(slots=engine.capacity.slots)
        incarnation = time.time_ns() // 1_000_000
        self._core = Runner(LOCAL_RUNNER, model, incarnation, limits, time.monotonic(), is_local=True)
        self._link = LeaderLink(bus, job, self._core, EngineThread(engine), self._work)

    @property
    def tokens(self) -> int:
        """How many tokens were made here."""
        return self._core.tokens

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits here."""
        states = self._core.states()
        return not (states["running"] or states["waiting"])

    async def start(self, version: int, root: str) -> None:
        """Take requests: `version`, with this root, is what the engine reads."""
        engine = await self._link.driver.weights_changed()
        await self._link.start()
        self._link.tell(WeightsLoaded(version, root, engine))

    async def wait_enough(self, idle_s: float, first_s: float) -> None:
        """Wait until a leader says that it is enough, or nothing has run or waited here for so long.

        `first_s`: so long the first request may take to come. Raises what the engine has raised.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(first_s):
                await self._link.until(lambda: not self.is_idle or self._is_over)
        while True:
            await self._link.until(lambda: self.is_idle or self._is_over)
            with suppress(TimeoutError):
                async with asyncio.timeout(idle_s):
                    await self._link.until(lambda: not self.is_idle or self._is_over)
            if self._error is not None:
                raise self._error
            if self.is_idle or self._core.is_enough:
                return

    @property
    def _is_over(self) -> bool:
        return self._error is not None or self._core.is_enough

    def _failed(self, fault: Fault) -> None:
        """Keep an error of the engine for the trainer: no further step is made."""
        log_only(fault)
        self._error = self._error or fault.error
        self._link.look()

    async def leave(self) -> None:
        """Give back all that is open: others go on behind the last token."""
        self._link.tell(PreemptionNoticed())
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S_MAX):
                    await self._link.until(lambda: self._core.is_drained)
                async with asyncio.timeout(FORGET_S_MAX):
                    await self._link.until(lambda: not self._core.held)
        finally:
            try:
                await self._link.close()
            finally:
                await self._work.close()
