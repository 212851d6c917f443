"""Follows the versions of the engine's model: each comes beside the engine, and is shown between two of its steps. I/O.

It is the newest one, or the one that the leader wants. A mapped engine shows memory of a trainer. Where the trainer
waits for that memory, the engine lets go of it, and has no weights until the next version is published.

Invariant: the number and the root that the core hears belong to the bytes that the engine reads from the next step on.
They come from the hub, and never from the engine.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Final, Literal, NoReturn, Protocol

import tensorhub
from tensorhub_common.observability.logs import logger
from tensorhub_runner.app.engine_driver import EngineDriver
from tensorhub_runner.core.runner_events import (
    LoadWanted,
    RunnerInput,
    WeightsChanging,
    WeightsComing,
    WeightsLoaded,
)
from tensorhub_runner.servers.server import ServerLost, ServerUnfit

FIRST_S_MAX: Final = 60.0
"""So long one call waits for the first version."""
UPDATE_WAIT_S: Final = 1.0
"""So long one call waits for a newer version; what the leader wants is looked at after it."""
UPDATE_S_MAX: Final = 600.0
"""The bound of one transfer."""
FINISH_S_MAX: Final = 3600.0
"""So long new weights wait for responses that end on their version; after it they go on with the new ones."""
STAYS_LOOK_S: Final = 0.05
"""While the version here is to stay, it is looked so often whether it still is."""
RETRY_S: Final = 0.5
"""The pause after a version could not be had."""
ASKED_BACK_S: Final = 0.02
"""So often it is looked whether a trainer waits for what is mapped. It costs one system call."""
PROGRESS_S: Final = 0.1
"""So often it is told how long a transfer will take."""

TRY_AGAIN: Final = (
    tensorhub.AgentUnavailable,
    # A call of the process before this one goes on at the agent until its bound.
    tensorhub.ReplicaConflict,
    tensorhub.RegistryUnavailable,
    tensorhub.RoundTimeout,
    tensorhub.VersionUnavailable,
    tensorhub.IntegrityError,
    ServerLost,
    ServerUnfit,
)

_log: Final = logger(__name__)


class Weights(Protocol):
    """Where versions come from, and what the engine has: a shard in this process, or a server's weights."""

    @property
    def model(self) -> str:
        """The model of the hub."""

    @property
    def version(self) -> int | None:
        """What the engine computes with; None: there are no weights."""

    @property
    def root(self) -> str:
        """The root of the digests of `version`."""

    @property
    def is_asked_back(self) -> bool:
        """Whether a trainer waits for the memory that the engine shows."""

    def let_go(self) -> None:
        """Show the trainer's memory no more."""

    async def replicate(
        self,
        version: int | Literal["latest"],
        *,
        timeout_s: float,
        swap_under: AbstractAsyncContextManager[None],
        on_progress: Callable[[int, int], None],
    ) -> object:
        """Bring a version, and have the engine use it under `swap_under`."""

    async def update(
        self,
        wait_s: float,
        *,
        timeout_s: float,
        swap_under: AbstractAsyncContextManager[None],
        on_progress: Callable[[int, int], None],
    ) -> object:
        """Bring a newer version, if there is one, in the same way."""


class WeightFollower:
    """The versions of one engine's shard; `run` is its task."""

    def __init__(
        self,
        shard: Weights,
        driver: EngineDriver,
        tell: Callable[[RunnerInput], None],
        wait_loadable: Callable[[], Awaitable[None]],
        version_wanted: Callable[[], int | None],
        on_loaded: Callable[[float, float], None],
        *,
        waits_for_finish: bool,
    ) -> None:
        """Prepare. `wait_loadable` ends once nothing runs that must end on its version.

        `version_wanted` returns the version that is to be here, and None where that is the newest.
        `on_loaded` takes, for each change of weights, how long the engine was waited for and stood still, in seconds.
        """
        self._shard, self._driver, self._tell = shard, driver, tell
        self._wait_loadable, self._waits_for_finish = wait_loadable, waits_for_finish
        self._version_wanted = version_wanted
        self._on_loaded = on_loaded
        self._wanted_at = self._paused_at = 0.0
        self._transfer: tuple[float, int] | None = None
        """When the transfer that is under way was first told of, and how many bytes had come then."""
        self._told_at = 0.0

    async def run(self) -> NoReturn:
        """Follow. Raises what asking again can't mend."""
        if self._shard.version is not None:
            # The process before this one has left it here.
            async with self:
                pass
        reported = ""
        while True:
            try:
                await self._follow()
                reported = ""
            except TRY_AGAIN as why:
                if str(why) != reported:
                    _log.warning("a version can't be had yet", model=self._shard.model, why=str(why))
                reported = str(why)
                await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        """Load what is wanted, or what is newer than what is here. Raises what `replicate` and `update` raise."""
        wanted, self._transfer = self._version_wanted(), None
        if wanted is not None and wanted != self._shard.version:
            try:
                await self._shard.replicate(
                    wanted, timeout_s=UPDATE_S_MAX, swap_under=self, on_progress=self._on_progress
                )
                return
            except tensorhub.VersionUnavailable as why:
                # The newest one then, so that this instance is of use until the leader asks for something else.
                _log.warning("a version that is wanted can't be had", model=self._shard.model, why=str(why))
        if wanted is not None and wanted == self._shard.version:
            # It stays: what would be fetched now is older than what is wanted in the end.
            await asyncio.sleep(STAYS_LOOK_S)
        elif self._shard.version is None:
            await self._shard.replicate("latest", timeout_s=FIRST_S_MAX, swap_under=self, on_progress=self._on_progress)
        else:
            await self._shard.update(
                UPDATE_WAIT_S, timeout_s=UPDATE_S_MAX, swap_under=self, on_progress=self._on_progress
            )

    def _on_progress(self, come: int, whole: int) -> None:
        """Tell now and then how long the rest will take, as fast as bytes have come so far."""
        now = time.perf_counter()
        if self._transfer is None:
            self._transfer = now, come
            return
        began_at, first = self._transfer
        if come > first and now - max(began_at, self._told_at) >= PROGRESS_S:
            self._told_at = now
            self._tell(WeightsComing((whole - come) * (now - began_at) / (come - first)))

    def lose(self) -> None:
        """Say that the version that was here can't be had any more: what ran goes on elsewhere."""
        self._tell(WeightsLoaded(None, ""))

    async def run_let_go(self) -> NoReturn:
        """Let go of mapped memory whenever its trainer waits for it."""
        while True:
            await asyncio.sleep(ASKED_BACK_S)
            if not self._shard.is_asked_back:
                continue
            async with self._driver.between_steps:
                # A newer version may have taken its place meanwhile.
                if self._shard.is_asked_back:
                    self._tell(WeightsChanging())
                    self._shard.let_go()
                    # Views that the engine keeps map the memory too.
                    await self._driver.weights_changed()
                    self._tell(WeightsLoaded(None, ""))

    async def __aenter__(self) -> None:
        """Wait until the weights may change, and have the engine stand still."""
        self._tell(LoadWanted())
        self._wanted_at = time.perf_counter()
        if self._waits_for_finish:
            try:
                async with asyncio.timeout(FINISH_S_MAX):
                    await self._wait_loadable()
            except TimeoutError:
                _log.warning("responses did not end on their version in time, and go on with the next one")
        await self._driver.between_steps.acquire()
        self._paused_at = time.perf_counter()
        try:
            await self._driver.stand_still()
        except BaseException:
            self._driver.between_steps.release()
            raise
        self._tell(WeightsChanging())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Have the engine go on with what its tensors show now."""
        try:
            engine = await self._driver.weights_changed()
            self._tell(WeightsLoaded(self._shard.version, self._shard.root, engine))
        except BaseException:
            self._tell(WeightsLoaded(None, ""))
            raise
        finally:
            self._driver.between_steps.release()
            self._on_loaded(self._paused_at - self._wanted_at, time.perf_counter() - self._paused_at)
