"""Connections to sources that no lease uses at the moment.

Always true: nothing is under way on a connection in here, and the source has said so; one that goes down is closed and
forgotten, and at most `IDLE_LINKS_MAX` stand.
"""

import asyncio
from typing import Final

from tensorhub_agent.transports.ucxx.link import Link
from tensorhub_common.runtime.supervision import Supervisor

IDLE_LINKS_MAX: Final = 64
"""Above this the one that has been idle for longest is closed."""


class IdleLinks:
    """All idle connections of one agent, the longest idle first."""

    def __init__(self) -> None:
        """Begin with none."""
        self._links: dict[Link, str] = {}
        self._closing: set[asyncio.Task[None]] = set()
        # A connection that can't be closed may bring bytes, so a fault ends the process.
        self._work = Supervisor("idle connections over ucxx")

    def put(self, endpoint: str, link: Link) -> None:
        """Keep a connection to a source."""
        link.on_frame = lambda _: self._drop(link)
        link.on_down = lambda _: self._drop(link)
        self._links[link] = endpoint
        if link.over is not None or len(self._links) > IDLE_LINKS_MAX:
            self._drop(link if link.over is not None else next(iter(self._links)))

    def take(self, endpoint: str) -> Link | None:
        """Return the connection to a source that was used last, if there is one."""
        for link, where in reversed(self._links.items()):
            if where == endpoint:
                del self._links[link]
                return link
        return None

    async def close(self) -> None:
        """Close them all."""
        for link in list(self._links):
            self._drop(link)
        await asyncio.gather(*self._closing)

    def _drop(self, link: Link) -> None:
        if self._links.pop(link, None) is not None:
            task = self._work.start(link.close(), "closing one")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
