"""One runner as a process: its engine, the weights that it follows, and its line to the leader. I/O."""

import asyncio
import os
import signal
import time
from typing import Final

from opentelemetry.metrics import Meter

import tensorhub
from tensorhub_common.bus.connection import Bus
from tensorhub_common.config.settings import Settings
from tensorhub_common.errors import TensorHubError
from tensorhub_common.introspection.ping import answer_pings
from tensorhub_common.observability.logs import logger
from tensorhub_common.observability.metrics import recorder
from tensorhub_common.runtime.supervision import Supervisor
from tensorhub_common.service.systemd import serving
from tensorhub_runner.app.engine_driver import EngineDriver
from tensorhub_runner.app.engine_thread import EngineThread
from tensorhub_runner.app.engines import LoadedEngine, load_engine, server_of
from tensorhub_runner.app.leader_link import LeaderLink
from tensorhub_runner.app.module_weights import ModuleWeights
from tensorhub_runner.app.served_weights import ServedWeights
from tensorhub_runner.app.server_driver import ServerDriver
from tensorhub_runner.app.weight_follower import WeightFollower
from tensorhub_runner.core.runner import Runner, RunnerLimits
from tensorhub_runner.core.runner_events import PreemptionNoticed
from tensorhub_runner.servers.server import Server

ROLE: Final = "runner"
RELEASE_S_MAX: Final = 1.0
"""So long the hub is given to let go of the replica when the process ends."""
RELEASE_LEAVING_S_MAX: Final = 3.0
"""The same for a runner that does not come again: a wait of its follower's goes on at the agent for a second."""
RELEASE_AGAIN_S: Final = 0.1
NOTICE: Final = signal.SIGUSR1
"""The machine goes away soon: the runner takes no new request, and the leader moves what it has."""

_log: Final = logger(__name__)


class RunnerService:
    """One runner on one connection: `run`, and then `close`."""

    def __init__(self, bus: Bus, settings: Settings, meter: Meter) -> None:
        self.id = settings.runner_id
        self._bus, self._settings = bus, settings
        self._work = Supervisor(f"runner {self.id!r}")
        self._hub: tensorhub.AsyncHub | None = None
        self._driver: EngineDriver | None = None
        self._weights: ModuleWeights | ServedWeights | None = None
        self._is_leaving = False
        self.link: LeaderLink | None = None
        """From when the engine is loaded on."""
        self._record_pause = recorder(meter, "tensorhub.runner.load.pause")
        self._record_wait = recorder(meter, "tensorhub.runner.load.wait")

    async def run(self) -> None:
        """Load the engine or find its server, bring its weights, and serve until cancelled."""
        settings, job = self._settings, self._settings.job
        # Importing vLLM or building a model takes seconds; NATS must have its answers meanwhile.
        server = await asyncio.to_thread(server_of, settings)
        loaded = None if server is not None else await asyncio.to_thread(load_engine, settings)
        limits = RunnerLimits(slots=settings.runner_slots if loaded is None else loaded.engine.capacity.slots)
        incarnation = time.time_ns() // 1_000_000
        # A mapped engine shows memory of its trainer, which it would keep from being overwritten.
        keeps_versions = settings.runner_install != "mapped"
        core = Runner(
            self.id, settings.runner_hub_model, incarnation, limits, time.monotonic(), keeps_versions=keeps_versions
        )
        self._driver = _driver_of(server, loaded)
        link = self.link = LeaderLink(self._bus, job, core, self._driver, self._work)
        # This process has a runner's key. The SDK in it is a worker, whose key its agent names.
        os.environ.pop("TENSORHUB_CREDENTIALS", None)
        self._hub = await tensorhub.connect_async(job=job)
        self._weights = await self._brought(self._hub, self._driver, loaded)
        follower = WeightFollower(
            self._weights,
            self._driver,
            link.tell,
            lambda: link.until(lambda: core.may_load),
            lambda: core.version_wanted,
            self._on_loaded,
            waits_for_finish=keeps_versions,
        )
        if isinstance(self._driver, ServerDriver):
            self._driver.on_lost = follower.lose
        await link.start()
        self._work.start(follower.run(), "following versions")
        if settings.runner_install == "mapped":
            self._work.start(follower.run_let_go(), "letting go of mapped memory")
        asyncio.get_running_loop().add_signal_handler(NOTICE, self._on_notice, link)
        await answer_pings(self._bus, self.id, ROLE)
        async with serving(f"runner {self.id} serves"):
            _log.info("ready", engine=settings.runner_engine, slots=limits.slots, incarnation=incarnation)
            await asyncio.Event().wait()

    async def _brought(
        self, hub: tensorhub.AsyncHub, driver: EngineDriver, loaded: LoadedEngine | None
    ) -> ModuleWeights | ServedWeights:
        """Return where the engine's weights come from."""
        settings = self._settings
        model, replica = settings.runner_hub_model, settings.runner_replica or self.id
        if loaded is None:
            assert isinstance(driver, ServerDriver)
            return ServedWeights(hub, driver, model, replica, is_spot=settings.runner_spot)
        weights = ModuleWeights(hub, loaded, settings, replica)
        await weights.begin()
        return weights

    async def close(self) -> None:
        """Let go of engine and replica. What was running goes on elsewhere."""
        await self._work.close()
        if self._driver is not None:
            await self._driver.close()
        if self._weights is not None and self._is_leaving:
            await self._release(self._weights)
        if self._hub is not None:
            try:
                await self._hub.close(timeout_s=RELEASE_S_MAX)
            except TensorHubError as why:
                # The wait for a newer version goes on at the agent for seconds, for instance.
                _log.info("the replica stays with the agent, for the next process", why=str(why))

    async def _release(self, weights: ModuleWeights | ServedWeights) -> None:
        """Give the memory of a runner back that does not come again. A wait for a newer version ends first."""
        try:
            async with asyncio.timeout(RELEASE_LEAVING_S_MAX):
                while True:
                    try:
                        await weights.release(timeout_s=RELEASE_S_MAX)
                        return
                    except tensorhub.ReplicaConflict:
                        await asyncio.sleep(RELEASE_AGAIN_S)
        except (TimeoutError, TensorHubError) as why:
            _log.info("the replica stays with the agent", why=str(why))

    def _on_notice(self, link: LeaderLink) -> None:
        self._is_leaving = True
        _log.warning("the machine goes away soon")
        link.tell(PreemptionNoticed())

    def _on_loaded(self, wait_s: float, pause_s: float) -> None:
        self._record_wait(wait_s)
        self._record_pause(pause_s)


def _driver_of(server: Server | None, loaded: LoadedEngine | None) -> EngineDriver:
    """Return what drives the engine, of which there is one of the two."""
    if server is not None:
        return ServerDriver(server)
    assert loaded is not None
    return EngineThread(loaded.engine)
