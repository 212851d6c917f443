"""Memory that bytes pass through between a wire and where they lie strided: bounded, and used again.

Fresh memory costs a fault for each of its pages, which is more than copying into it; so what is given back is kept.

Invariants:
- One user takes `slots_max` slots at most. Further ones wait, first come first served.
- A slot is given back only by who took it, and only once nothing can be written into it any more.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from tensorhub_agent.transports.ucxx.protocol.frames import SLOT_BYTES

KEPT_SLOTS_MAX: Final = 16
"""The most unused slots that a transport keeps."""


class SlotPool:
    """The unused slots of all connections of a transport."""

    def __init__(self) -> None:
        """Begin with none: they are made when they are wanted."""
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """Return a slot with undefined contents."""
        return self._free.pop() if self._free else memoryview(bytearray(SLOT_BYTES))

    def give_back(self, slot: memoryview) -> None:
        """Nothing is written into the slot any more."""
        if len(self._free) < KEPT_SLOTS_MAX:
            self._free.append(slot)


class BounceBuffers:
    """The slots of one user."""

    def __init__(self, store: SlotPool, slots_max: int) -> None:
        """Use at most `slots_max` slots at a time."""
        self._store = store
        self._left = asyncio.Semaphore(slots_max)

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[memoryview]:
        """Wait for a slot and lend it; nothing may be written into it when the block ends, however it does."""
        async with self._left:
            slot = self._store.take()
            try:
                yield slot
            finally:
                self._store.give_back(slot)
