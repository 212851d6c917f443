"""Encoding and decoding in the threads of the copy pool; decoded pieces are then hashed in place.

Invariant: as for every job of the pool, it ends only when none of its threads writes any more, and nothing outside
its spans is written.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from tensorhub_agent.compute.batch import HostBatch
from tensorhub_agent.compute.pool import CopyBatch, CopyPool
from tensorhub_agent.compute.spans import Spans, check_fits, columns
from tensorhub_agent.encodings.columns import Damaged
from tensorhub_agent.encodings.compression import pack, unpack
from tensorhub_agent.encodings.patch import apply
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES
from tensorhub_agent.primitives.memory_region import MemoryRegion

Coded = tuple[memoryview, int]
"""What a piece is made of, its patches one after another or the piece packed, and the unit that it is in."""


@dataclass(frozen=True, slots=True)
class PatchTargets:
    """Pieces by column that are to be patched: numbers at the source, and how many bytes their patches have."""

    pieces: Sequence[int]
    spans: Spans
    """The place of each, in the destination and in its base."""
    sizes: Sequence[int]
    units: Sequence[int]


class DecodeBatch(CopyBatch):
    """Pieces that are decoded, and then hashed in place.

    Of a piece whose code is damaged the digest is zeros, and the piece is as it was: it has to be read otherwise.
    """

    def __init__(
        self,
        destination: MemoryRegion,
        base: MemoryRegion | None,
        spans: Spans,
        coded: Sequence[Coded],
        decode: Callable[[memoryview, memoryview, int], None],
    ) -> None:
        """Prepare; span i is decoded from `coded[i]`. With `base` its piece is copied from there first."""
        super().__init__(destination, base, spans, bytearray(len(spans.nbytes) * PIECE_DIGEST_BYTES))
        self._coded, self._decode = coded, decode

    def _do(self, first: int, last: int, hasher: xxhash.xxh3_128) -> None:  # noqa: ARG002 (as every job has it)
        views = self._views
        assert views is not None
        if self._from_address is not None:
            self._copy(first, last)
        spans = self._spans
        for number in range(first, last):
            piece = views[0][spans.to[number] : spans.to[number] + spans.nbytes[number]]
            code, unit = self._coded[number]
            with contextlib.suppress(Damaged):
                self._decode(code, piece, unit)
                digest = xxhash.xxh3_128_digest(piece)
                self._digests[number * PIECE_DIGEST_BYTES : (number + 1) * PIECE_DIGEST_BYTES] = digest


class CompressBatch(HostBatch):
    """Pieces of a segment that are packed."""

    def __init__(self, view: MemoryRegion, origin: Sequence[int], nbytes: Sequence[int], units: Sequence[int]) -> None:
        """Prepare; span i is `nbytes[i]` bytes from `origin[i]` of the view, in units of `units[i]`."""
        super().__init__(view, None)
        self._spans = list(zip(origin, nbytes, units, strict=True))
        self._packed = [b""] * len(self._spans)

    async def result(self) -> list[bytes]:
        """Wait for the end; return each piece packed, empty where that is not worth it."""
        await self.done()
        return self._packed

    def _do(self, first: int, last: int, hasher: xxhash.xxh3_128) -> None:  # noqa: ARG002 (as every job has it)
        views = self._views
        assert views is not None
        for number in range(first, last):
            origin, nbytes, unit = self._spans[number]
            self._packed[number] = pack(views[0][origin : origin + nbytes], unit)


def patch_pieces(
    pool: CopyPool, destination: MemoryRegion, base: MemoryRegion | None, spans: Spans, patches: Sequence[Coded]
) -> DecodeBatch:
    """Overwrite pieces as their patches say; the result is the digest of each, zeros where a patch is damaged.

    Span i is patched by patches i, after it was copied from `base`, if there is one. Raises ValueError, and writes
    nothing, when a span does not fit into one of the views.
    """
    return _decoded(pool, DecodeBatch(destination, base, spans, patches, apply), destination, base, spans, patches)


def unpack_pieces(pool: CopyPool, destination: MemoryRegion, spans: Spans, packed: Sequence[Coded]) -> DecodeBatch:
    """Write packed pieces; the result is the digest of each, zeros where one is damaged or empty.

    Raises ValueError, and writes nothing, when a span does not fit.
    """
    return _decoded(pool, DecodeBatch(destination, None, spans, packed, unpack), destination, None, spans, packed)


def pack_pieces(
    pool: CopyPool, view: MemoryRegion, origin: Sequence[int], nbytes: Sequence[int], units: Sequence[int]
) -> CompressBatch:
    """Pack pieces that lie within the view. Raises ValueError when one does not."""
    to, _, sizes = columns(Spans(origin, origin, nbytes))
    check_fits("view", len(view), to, sizes)
    return pool.start(CompressBatch(view, origin, nbytes, units), sizes)


def _decoded(
    pool: CopyPool,
    job: DecodeBatch,
    destination: MemoryRegion,
    base: MemoryRegion | None,
    spans: Spans,
    coded: Sequence[Coded],
) -> DecodeBatch:
    to, origin, nbytes = columns(spans)
    check_fits("destination", len(destination), to, nbytes)
    if base is not None:
        check_fits("base", len(base), origin, nbytes)
    if destination.readonly or len(coded) != len(nbytes):
        raise ValueError("the destination can't be written, or not every span has patches")
    return pool.start(job, nbytes)
