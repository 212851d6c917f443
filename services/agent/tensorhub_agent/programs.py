"""Transfer programs that this agent carries out, by digest: fetched from the blob store once, and kept.

Always true: at most `UNITS_KEPT_MAX` units are kept in memory, beside the programs that are in use.
"""

import asyncio
from collections import OrderedDict
from typing import Final

from tensorhub_common.bus.blobs import Blobs
from tensorhub_common.program import Execution, decoded

UNITS_KEPT_MAX: Final = 1_000_000
"""A shard of 10^12 parameters on 128 ranks has some 6,000."""


class Programs:
    """One job's programs."""

    def __init__(self, job: str, blobs: Blobs) -> None:
        """Keep none yet."""
        self._job, self._blobs = job, blobs
        self._kept: OrderedDict[str, Execution] = OrderedDict()
        self._units = 0

    async def get(self, digest: str) -> Execution:
        """Return a program, ready to be carried out. Raises what `Blobs.get` raises, or `LayoutMismatch`."""
        known = self._kept.get(digest)
        if known is not None:
            self._kept.move_to_end(digest)
            return known
        data = await self._blobs.get(self._job, digest)
        program = await asyncio.to_thread(_ready, data, digest)
        if digest not in self._kept:
            self._units += len(program)
        self._kept[digest] = program
        while self._units > UNITS_KEPT_MAX and len(self._kept) > 1:
            self._units -= len(self._kept.popitem(last=False)[1])
        return program


def _ready(data: bytes, digest: str) -> Execution:
    return Execution(decoded(data), digest)
