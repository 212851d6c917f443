"""Work that several callers want at once is done once, and all of them get its result."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Generic, TypeVar

from tensorhub_common.runtime.supervision import Supervisor, result_of

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class SingleFlight(Generic[K, T]):
    """The work in progress by key. Nothing is kept once it is done; a caller that is cancelled leaves it running."""

    def __init__(self, work: Supervisor, what: str) -> None:
        self._work, self._what = work, what
        self._running: dict[K, asyncio.Task[T]] = {}

    async def run(self, key: K, make: Callable[[], Coroutine[None, None, T]]) -> T:
        """Return or raise what the work for this key comes to; it is started where none is in progress."""
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = self._work.start(make(), self._what, awaited=True)
            task.add_done_callback(lambda _: self._running.pop(key, None))
        return await result_of(task)
