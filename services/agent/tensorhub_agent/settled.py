"""Waiting for what must not be left before its end: bytes may still be written until then."""

import asyncio
from collections.abc import Callable


def nothing() -> None:
    """Do nothing about a cancellation but wait."""


async def settled(future: asyncio.Future[None], on_cancel: Callable[[], None] = nothing) -> None:
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
