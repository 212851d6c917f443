"""The sizes of layouts' pieces, kept by digest; layouts themselves are read when they are needed.

A layout's pieces follow from the layout alone, and its digest is its content, so what was read once stays true.

Invariants:
- At most `LAYOUTS_MAX` layouts with `PIECES_KEPT_MAX` pieces together are kept.
- A layout that describes more than `PIECES_MAX` pieces is refused before any of them is computed.
"""

import asyncio
from collections import OrderedDict
from typing import Final

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.jetstream.blob_store import BlobStore
from tensorhub_common.layout.layout import PIECE_BYTES_MAX, Layout, payload_bytes, pieces
from tensorhub_common.runtime.single_flight import SingleFlight
from tensorhub_common.runtime.supervision import Supervisor
from tensorhub_planner.compiler.layout_reader import LayoutReader
from tensorhub_planner.primitives.piece_sizes import PieceSizes

LAYOUTS_MAX: Final = 4096
PIECES_KEPT_MAX: Final = 4_000_000
"""About 150 MB at worst; a model of 10^12 two-byte parameters has half a million pieces, however it is cut."""
PIECES_MAX: Final = 4_000_000
AT_ONCE_BYTES_MAX: Final = 64 * 1024
"""A layout that is not longer is read in the event loop, in well under a millisecond. Thousands of ranks have thousands
of short ones, and handing each to a thread would take longer."""


class LayoutStore:
    """Layouts by digest, out of the blob store."""

    def __init__(self, blobs: BlobStore, work: Supervisor) -> None:
        self._blobs = blobs
        self._entries = LayoutReader()
        self._sizes: OrderedDict[str, PieceSizes] = OrderedDict()
        self._pieces = 0
        self._reading = SingleFlight[str, PieceSizes](work, "reading a layout")

    def known(self, digest: str) -> PieceSizes | None:
        """Return the sizes of a layout's pieces if they are kept."""
        sizes = self._sizes.get(digest)
        if sizes is not None:
            self._sizes.move_to_end(digest)
        return sizes

    async def sizes(self, job: str, digest: str) -> PieceSizes:
        """Return the sizes of a layout's pieces. Raises what `BlobStore.get` raises, or `LayoutMismatch`."""
        sizes = self.known(digest)
        if sizes is not None:
            return sizes
        # All shards of a replica ask at once.
        return await self._reading.run(digest, lambda: self._read(job, digest))

    async def layout(self, job: str, digest: str) -> Layout:
        """Return a layout itself. Raises what `BlobStore.get` raises, or `LayoutMismatch`."""
        data = await self._blobs.get(job, digest)
        if len(data) <= AT_ONCE_BYTES_MAX:
            return self._entries.decoded(data, digest)
        return await asyncio.to_thread(self._entries.decoded, data, digest)

    async def _read(self, job: str, digest: str) -> PieceSizes:
        layout = await self.layout(job, digest)
        sizes = await asyncio.to_thread(_sizes_of, layout, digest)
        self._keep(digest, sizes)
        return sizes

    def _keep(self, digest: str, sizes: PieceSizes) -> None:
        self._sizes[digest] = sizes
        self._pieces += len(sizes)
        while len(self._sizes) > LAYOUTS_MAX or (self._pieces > PIECES_KEPT_MAX and len(self._sizes) > 1):
            self._pieces -= len(self._sizes.popitem(last=False)[1])


def _sizes_of(layout: Layout, digest: str) -> PieceSizes:
    if most_pieces(layout) > PIECES_MAX:
        raise LayoutMismatch(
            f"layout {digest[:12]} has {payload_bytes(layout)} bytes in {len(layout.tensors)} tensors, more than one "
            "shard may have: use more shards"
        )
    return PieceSizes(pieces(layout).nbytes)


def most_pieces(layout: Layout) -> int:
    """Return a number that the layout's pieces don't exceed, without computing them.

    A tensor is one piece, or rows of pieces each longer than PIECE_BYTES_MAX in which all but the last are longer than
    half of it: so there are at most three for each PIECE_BYTES_MAX, and one more.
    """
    return 3 * payload_bytes(layout) // PIECE_BYTES_MAX + len(layout.tensors)
