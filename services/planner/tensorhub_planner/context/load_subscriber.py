"""The planner's other ear: agents' beats, in which they say who reads from them. I/O: it listens and decides nothing.

A planner that was just started knows of no read that is under way. So in its first `LISTEN_S` a question that leaves a
choice waits until each source that it is about has spoken, within a bound; then at the latest it is answered by what is
known.
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
"""A planner takes itself for just started for so long: three beats by default."""
WAIT_S_MAX: Final = 0.6
"""A question waits for beats for so long: one by default comes in time, and the agent that asked still waits."""

_beats: Final = msgspec.json.Decoder(Heartbeat)
_log: Final = logs.logger(__name__)


class LoadSubscriber:
    """Hands beats to a ledger."""

    def __init__(self, bus: Bus, ledger: LoadLedger) -> None:
        self._bus, self._ledger = bus, ledger
        self._since = time.monotonic()
        self._next: asyncio.Future[None] | None = None
        """Done with the next beat, if anybody waits for one."""

    async def start(self) -> None:
        """Listen from now on. Where NATS forbids it, plans rest on this planner's own assignments alone."""
        self._since = time.monotonic()
        try:
            await self._bus.subscribe(beats(), self._on_beat)
        except NotPermitted as why:
            self._since -= LISTEN_S
            _log.warning("agents' loads are not heard, so planners know only their own plans", why=str(why))

    def _on_beat(self, message: Message) -> None:
        try:
            beat = _beats.decode(message.data)
        except MALFORMED:
            return
        # Whoever may publish on this subject is this agent, and speaks for no other.
        if parse_subject(message.subject) != BeatSubject(beat.agent):
            return
        self._ledger.hear(beat, time.monotonic())
        if self._next is not None:
            self._next.set_result(None)
            self._next = None

    async def wait_for(self, agents: Collection[str]) -> None:
        """Return once all of these have spoken, or have had their time."""
        until = min(self._since + LISTEN_S, time.monotonic() + WAIT_S_MAX)
        while time.monotonic() < until and self._ledger.said.unheard(agents, time.monotonic()):
            if self._next is None:
                self._next = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._next,), timeout=until - time.monotonic())
