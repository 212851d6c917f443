"""The weights of an engine that is a module of this process: its parameters are hub memory. I/O.

A module may have buffers that it computes by itself, as tables of positions, and that many trainers don't send. Those
that the version has are memory of the hub, as all else is; the others stay the module's own. So the first version
says what is registered. `WeightFollower` uses this in place of a shard.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Literal

from tensorhub.aio.hub import AsyncHub
from tensorhub.aio.shard import AsyncShard
from tensorhub_common.config.settings import Settings
from tensorhub_common.errors import RegistryUnavailable, VersionUnavailable
from tensorhub_runner.app.engines import LoadedEngine


class ModuleWeights:
    """A module's replica, from the first version on."""

    def __init__(self, hub: AsyncHub, loaded: LoadedEngine, settings: Settings, replica: str) -> None:
        """Prepare; `begin` registers."""
        self.model = settings.runner_hub_model
        self._hub, self._loaded, self._settings, self._replica = hub, loaded, settings, replica
        self._shard: AsyncShard | None = None

    async def begin(self) -> None:
        """Register, unless it takes a version to know what. Raises as `AsyncHub.register`."""
        with suppress(VersionUnavailable, RegistryUnavailable):
            await self._registered()

    @property
    def version(self) -> int | None:
        """What the module holds."""
        return None if self._shard is None else self._shard.version

    @property
    def root(self) -> str:
        """The root of the digests of `version`."""
        return "" if self._shard is None else self._shard.root

    @property
    def is_asked_back(self) -> bool:
        """Whether a trainer waits for the memory that the module shows."""
        return self._shard is not None and self._shard.is_asked_back

    def let_go(self) -> None:
        """Show the trainer's memory no more."""
        if self._shard is not None:
            self._shard.let_go()

    async def replicate(
        self,
        version: int | Literal["latest"],
        *,
        timeout_s: float,
        swap_under: AbstractAsyncContextManager[Any],
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Bring a version into the module. Raises as `AsyncHub.register` and `AsyncShard.replicate`."""
        is_new = self._shard is None
        shard = await self._registered()
        if is_new and shard.version is not None:
            # The process before this one has left it here.
            async with swap_under:
                pass
        if version not in ("latest", shard.version) or shard.version is None:
            await shard.replicate(version, timeout_s=timeout_s, swap_under=swap_under, on_progress=on_progress)

    async def update(
        self,
        wait_s: float,
        *,
        timeout_s: float,
        swap_under: AbstractAsyncContextManager[Any],
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Bring a newer version into the module, if there is one. Raises as `replicate`."""
        shard = await self._registered()
        await shard.update(wait_s, timeout_s=timeout_s, swap_under=swap_under, on_progress=on_progress)

    async def release(self, *, timeout_s: float) -> None:
        """Give the memory of the replica back."""
        if self._shard is not None:
            await self._shard.release(timeout_s=timeout_s)

    async def _registered(self) -> AsyncShard:
        """Return the replica. Raises `VersionUnavailable` where it takes a version to know of what."""
        if self._shard is None:
            loaded, settings = self._loaded, self._settings
            sent = await self._hub.specs(self.model) if loaded.computed else ()
            self._shard = await self._hub.register(
                self.model,
                loaded.module,
                replica=self._replica,
                spot=settings.runner_spot,
                install=settings.runner_install,
                mapping=loaded.mapping(sent),
            )
        return self._shard
