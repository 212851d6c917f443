"""Doing many requests at once, a few at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

CHUNKS_UNDER_WAY_MAX: Final = 8


async def gather_bounded(indices: Iterable[int], work: Callable[[int], Awaitable[None]]) -> None:
    """Do the work for every index, a few at a time; at the first failure stop all and raise it."""
    room = asyncio.Semaphore(CHUNKS_UNDER_WAY_MAX)

    async def one(index: int) -> None:
        async with room:
            await work(index)

    try:
        async with asyncio.TaskGroup() as group:
            for index in indices:
                group.create_task(one(index))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
