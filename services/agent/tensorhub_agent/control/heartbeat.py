"""The agent's beat.

It comes from a thread and a connection of its own, so that neither copying nor a busy event loop can hold it up. If the
agent's main loop stops turning altogether, the heartbeat stops too: an agent that answers no request is lost.

It says too who reads from this agent just now, for the planners: what they assigned themselves they forget when they
are restarted, and of what others assigned they know nothing.
"""

import asyncio
import contextlib
import logging
import threading
import time
from typing import Final

import msgspec

from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.bus.errors import NoBus
from tensorhub_common.bus.keepalive import ping_every_s
from tensorhub_common.config.settings import Settings
from tensorhub_common.errors import TensorHubError
from tensorhub_common.protocol.heartbeat import Heartbeat, ServingLoad
from tensorhub_common.protocol.subjects import beat
from tensorhub_common.runtime.supervision import Supervisor

MAIN_SILENT_S_MAX: Final = 10.0
"""The main loop must have turned within this for the beat to go on."""

CONNECT_AGAIN_S: Final = 0.2
JOIN_S_MAX: Final = 3.0

_log: Final = logging.getLogger(__name__)


class HeartbeatThread:
    """Beats until it is stopped. `incarnation` and `turned` are written by the main loop's thread.

    An error that escapes ends the process: an agent without a beat is taken for lost, and would not know it.
    """

    def __init__(self, settings: Settings) -> None:
        """Prepare; `start` begins."""
        self._serving: tuple[ServingLoad, ...] = ()
        self.incarnation = 0
        self._turned = time.monotonic()
        self._settings = settings
        self._work = Supervisor("the beat")
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def start(self) -> None:
        """Begin to beat."""
        self._thread = self._work.thread(self._run, "tensorhub-beat")
        self._thread.start()

    def turned(self, serving: tuple[ServingLoad, ...]) -> None:
        """Note that the main loop turns, and who reads from this agent."""
        self._turned, self._serving = time.monotonic(), serving

    def stop(self) -> None:
        """End the thread, within a bound."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(JOIN_S_MAX)

    def _run(self) -> None:
        asyncio.run(self._beats())

    async def _beats(self) -> None:
        settings = self._settings
        agent, beat_s = settings.agent_id, settings.beat_s
        subject = beat(agent)
        while not self._stop.is_set():
            try:
                bus = await connect(
                    str(settings.nats),
                    name=f"{agent}-beat",
                    credentials=settings.credentials,
                    tls=settings.tls,
                    ping_every_s=ping_every_s(settings.lost_after_s),
                )
                async with bus:
                    while not self._stop.is_set():
                        await self._beat(bus, subject)
                        await asyncio.sleep(beat_s)
            except TensorHubError as why:
                _log.debug("no beat yet: %s", why)
                await asyncio.sleep(CONNECT_AGAIN_S)

    async def _beat(self, bus: Bus, subject: str) -> None:
        if not self.incarnation or time.monotonic() - self._turned >= MAIN_SILENT_S_MAX:
            return
        said = Heartbeat(agent=self._settings.agent_id, incarnation=self.incarnation, serving=self._serving)
        with contextlib.suppress(NoBus):
            await bus.publish(subject, msgspec.json.encode(said))
