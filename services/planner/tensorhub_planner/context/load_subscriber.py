"""Receives agents' beats, in which they report their readers. I/O: it decides nothing.

A planner that was just started knows no current read. In its first `LISTEN_S`, a request that leaves a choice therefore
waits until each of its sources has reported, within a bound. After that it is answered by what is known.
"""

import asyncio
import time
from collections.abc import Collection
from typing import Final

import msgspec

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import NotPermitted
from tensorhub_common.bus.message import Message
from tensorhub_common.observability import logs
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.heartbeat import Heartbeat
from tensorhub_common.protocol.subjects import BeatSubject, beats, parse_subject
from tensorhub_planner.load.ledger import LoadLedger

LISTEN_S: Final = 1.5
"""A planner counts as just started for this time: three beats by default."""
WAIT_S_MAX: Final = 0.6
"""A request waits for beats for this time: one by default comes in time, and the sender of the request still waits."""

_beats: Final = msgspec.json.Decoder(Heartbeat)
_log: Final = logs.logger(__name__)


class LoadSubscriber:
    """Hands beats to a ledger."""

    def __init__(self, bus: Bus, ledger: LoadLedger) -> None:
        self._bus, self._ledger = bus, ledger
        self._since = time.monotonic()
        self._next: asyncio.Future[None] | None = None
        """Done with the next beat, if a request waits for one."""

    async def start(self) -> None:
        """Subscribe. Where NATS forbids it, plans are based on this planner's own assignments alone."""
        self._since = time.monotonic()
        try:
            await self._bus.subscribe(beats(), self._on_beat)
        except NotPermitted as why:
            self._since -= LISTEN_S
            _log.warning("agents' loads are not received, so planners know only their own plans", why=str(why))

    def _on_beat(self, message: Message) -> None:
        try:
            beat = _beats.decode(message.data)
        except MALFORMED:
            return
        # NATS lets only this agent publish on this subject, and it reports no other agent's readers.
        if parse_subject(message.subject) != BeatSubject(beat.agent):
            return
        self._ledger.hear(beat, time.monotonic())
        if self._next is not None:
            self._next.set_result(None)
            self._next = None

    async def wait_for(self, agents: Collection[str]) -> None:
        """Return once all of these have reported, or have had their time."""
        until = min(self._since + LISTEN_S, time.monotonic() + WAIT_S_MAX)
        while time.monotonic() < until and self._ledger.reports.unheard(agents, time.monotonic()):
            if self._next is None:
                self._next = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._next,), timeout=until - time.monotonic())
