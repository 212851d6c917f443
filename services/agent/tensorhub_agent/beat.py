"""The agent's beat.

It comes from a thread and a connection of its own, so that neither copying nor a busy event loop can hold it up. If the
agent's main loop stops turning altogether, the beat stops too: an agent that answers nobody is lost.

It says too who reads from this agent just now, for the planners: what they assigned themselves they forget when they
are restarted, and of what others assigned they know nothing.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from tensorhub_common.bus.connection import connect
from tensorhub_common.bus.failures import NoBus
from tensorhub_common.bus.silence import ping_every_s
from tensorhub_common.errors import TensorHubError
from tensorhub_common.settings import Settings
from tensorhub_common.subjects import beat
from tensorhub_common.wire.asks import Beat, Serving

MAIN_SILENT_S_MAX: Final = 10.0
"""The main loop must have turned within this for the beat to go on."""

CONNECT_AGAIN_S: Final = 0.2
JOIN_S_MAX: Final = 3.0

_log: Final = logging.getLogger(__name__)


class BeatThread:
    """Beats until it is stopped. `incarnation` and `turned` are written by the main loop's thread."""

    def __init__(self, settings: Settings, serving: Callable[[], tuple[Serving, ...]]) -> None:
        """Prepare; `start` begins. `serving` is called from this thread."""
        self._serving = serving
        self.incarnation = 0
        self._turned = time.monotonic()
        self._settings = settings
        self._thread = threading.Thread(target=self._run, name="tensorhub-beat", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = threading.Event()

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def turned(self) -> None:
        """Note that the main loop turns."""
        self._turned = time.monotonic()

    def stop(self) -> None:
        """End the thread, within a bound."""
        self._stop.set()
        if self._thread.is_alive():
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
            except TensorHubError as why:
                _log.debug("no beat yet: %s", why)
                await asyncio.sleep(CONNECT_AGAIN_S)
                continue
            async with bus:
                while not self._stop.is_set():
                    if self.incarnation and time.monotonic() - self._turned < MAIN_SILENT_S_MAX:
                        said = Beat(agent=agent, incarnation=self.incarnation, serving=self._serving())
                        body = msgspec.json.encode(said)
                        with contextlib.suppress(NoBus):
                            await bus.publish(subject, body)
                    await asyncio.sleep(beat_s)
