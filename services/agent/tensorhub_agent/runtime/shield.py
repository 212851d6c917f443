"""Waiting for what must not be left before its end: bytes may still be written until then."""

import asyncio
from collections.abc import Callable, Coroutine


def nothing() -> None:
    """Do nothing about a cancellation but wait."""


async def wait_shielded(future: asyncio.Future[None], on_cancel: Callable[[], None] = nothing) -> None:
    """Wait until a future is done, whatever came of it, and then return or raise what it has.

    A cancelled caller is kept until then, and cancelled after; `on_cancel` may hasten the end. The future is never
    cancelled by this.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as why:
            on_cancel()
            cancelled = why
    if cancelled is not None:
        raise cancelled
    future.result()


class SharedShutdown:
    """An end that takes time: begun by the first who wants it, waited for by everybody, cancelled or not."""

    def __init__(self, end: Callable[[], Coroutine[None, None, None]]) -> None:
        """Take what is to be done at the end, once."""
        self._end = end
        self._task: asyncio.Task[None] | None = None

    async def reached(self) -> None:
        """Begin it unless it has begun, and return when it is over."""
        if self._task is None:
            self._task = asyncio.create_task(self._end())
        await wait_shielded(self._task)
