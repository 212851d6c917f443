"""The weights of an engine that is a server: whole versions in hub memory of this host, loaded from there. I/O.

The runner holds the model's own tensors as a replica. A version comes into it while the server goes on with the one
before, since the server has a copy of its own. Then the server stands still, and reads the version out of that memory.
`WeightFollower` uses this in place of a shard.

Invariant: `version` is what the server's model holds. It is None from before the first byte is written into the model
until all are.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Literal

from tensorhub.aio.hub import AsyncHub
from tensorhub.aio.shard import AsyncShard
from tensorhub_runner.app.server_driver import ServerDriver
from tensorhub_runner.servers.server import WeightSource

REGISTER_S_MAX: Final = 30.0


class ServedWeights:
    """What a server's model holds, and the replica that it comes from."""

    is_asked_back = False
    """Nobody waits for the memory: the server maps it while it loads alone."""

    def __init__(self, hub: AsyncHub, driver: ServerDriver, model: str, replica: str, *, is_spot: bool) -> None:
        """Prepare. The replica is registered with the first version, which tells what it consists of."""
        self.model = model
        self._hub, self._driver, self._replica, self._is_spot = hub, driver, replica, is_spot
        self._shard: AsyncShard | None = None

    @property
    def version(self) -> int | None:
        """What the server's model holds."""
        return self._driver.version

    @property
    def root(self) -> str:
        """The root of the digests of `version`, as the log has it."""
        shard = self._shard
        return shard.root if shard is not None and shard.version == self.version else ""

    async def replicate(
        self,
        version: int | Literal["latest"],
        *,
        timeout_s: float,
        swap_under: AbstractAsyncContextManager[Any],
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Have the server load a version. Raises what `AsyncShard.replicate` raises, and `ServerLost`."""
        shard = await self._registered()
        if version == "latest" and shard.version is not None:
            # It is here since the server was lost.
            await shard.update(timeout_s=timeout_s, on_progress=on_progress)
        elif version != shard.version:
            await shard.replicate(version, timeout_s=timeout_s, on_progress=on_progress)
        await self._load(shard, swap_under)

    async def update(
        self,
        wait_s: float,
        *,
        timeout_s: float,
        swap_under: AbstractAsyncContextManager[Any],
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Have the server load a newer version, if there is one. Raises as `replicate`."""
        shard = await self._registered()
        await shard.update(wait_s, timeout_s=timeout_s, on_progress=on_progress)
        # Also what came with an earlier call, and could not be loaded then.
        await self._load(shard, swap_under)

    def let_go(self) -> None:
        """Do nothing: no memory of a trainer is shown."""

    async def release(self, *, timeout_s: float) -> None:
        """Give the memory of the replica back."""
        if self._shard is not None:
            await self._shard.release(timeout_s=timeout_s)

    async def _registered(self) -> AsyncShard:
        """Return the replica. Raises `VersionUnavailable` before the first version."""
        if self._shard is None:
            specs = await self._hub.specs(self.model)
            self._shard = await self._hub.register(
                self.model, specs, replica=self._replica, spot=self._is_spot, timeout_s=REGISTER_S_MAX
            )
        return self._shard

    async def _load(self, shard: AsyncShard, swap_under: AbstractAsyncContextManager[Any]) -> None:
        version = shard.version
        if version is None or version == self.version:
            return
        source = WeightSource(self._hub.job, self.model, self._replica, str(self._hub.socket))
        async with swap_under:
            await self._driver.load(source, version)
