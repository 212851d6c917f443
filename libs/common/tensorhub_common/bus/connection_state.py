"""Whether there is a connection, since when, and who wants to know.

Invariant: each watcher is called once for each change, and never without one.
"""

import asyncio
import time
from collections.abc import Callable

ConnectionWatcher = Callable[[bool], None]


class ConnectionState:
    """What one connection is, as far as is known: there, or not."""

    def __init__(self) -> None:
        """Begin without a connection."""
        self.since: float | None = None
        """Since when (`time.monotonic`) it has lasted without a break; None while there is none."""
        self.lost_count = 0
        """How many times it was lost."""
        self._there = asyncio.Event()
        self._watchers: list[ConnectionWatcher] = []

    def watch(self, watcher: ConnectionWatcher) -> Callable[[], None]:
        """Call `watcher(connected)` at each change from now on, and return what ends that. It must not raise."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher) if watcher in self._watchers else None

    def note(self, *, connected: bool) -> None:
        """Record the state, and call the watchers if it has changed."""
        if connected == (self.since is not None):
            return
        if connected:
            self.since = time.monotonic()
            self._there.set()
        else:
            self.since = None
            self.lost_count += 1
            self._there.clear()
        for watcher in list(self._watchers):
            watcher(connected)

    async def wait(self, timeout_s: float) -> bool:
        """Return True once there is a connection, and False when there is none within the bound."""
        if self.since is None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._there.wait()
            except TimeoutError:
                return False
        return True
