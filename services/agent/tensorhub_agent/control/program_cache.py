"""Transfer programs that this agent carries out, by digest: fetched from the blob store once, and kept.

Invariant: at most `UNITS_KEPT_MAX` units are kept in memory, beside the programs that are in use.
"""

import asyncio
from collections import OrderedDict
from typing import Final

import msgspec

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.jetstream.blob_store import BlobStore
from tensorhub_common.layout.layout import Layout, PieceTable, layout_of, pieces
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.programs.program import decoded
from tensorhub_common.protocol.decoding import MALFORMED

UNITS_KEPT_MAX: Final = 1_000_000
"""A shard of 10^12 parameters on 128 ranks has some 6,000."""

TABLES_MAX: Final = 64
"""Layouts of half-filled sources."""

_layouts: Final = msgspec.msgpack.Decoder(Layout)


class ProgramCache:
    """One job's programs."""

    def __init__(self, job: str, blobs: BlobStore) -> None:
        """Keep none yet."""
        self._job, self._blobs = job, blobs
        self._kept: OrderedDict[str, NumberedProgram] = OrderedDict()
        self._units = 0
        self._tables: OrderedDict[str, PieceTable] = OrderedDict()

    async def get(self, digest: str) -> NumberedProgram:
        """Return a program, ready to be carried out. Raises what `BlobStore.get` raises, or `LayoutMismatch`."""
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

    async def table(self, layout: str) -> PieceTable:
        """Return the pieces of a layout. Raises what `BlobStore.get` raises, or `LayoutMismatch`."""
        known = self._tables.get(layout)
        if known is None:
            data = await self._blobs.get(self._job, layout)
            known = await asyncio.to_thread(_table, data)
            while len(self._tables) >= TABLES_MAX:
                self._tables.popitem(last=False)
            self._tables[layout] = known
        return known


def _table(data: bytes) -> PieceTable:
    try:
        return pieces(layout_of(_layouts.decode(data).tensors))
    except MALFORMED as why:
        raise LayoutMismatch(f"the blob store has a layout that can't be read: {why}") from None


def _ready(data: bytes, digest: str) -> NumberedProgram:
    return NumberedProgram(decoded(data), digest)
