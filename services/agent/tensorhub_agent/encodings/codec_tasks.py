"""Encoding and decoding in the threads of the copy pool; decoded pieces are then hashed in place.

Invariant: as for every job of the pool, it ends only when none of its threads writes any more, and nothing outside
its spans is written.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from tensorhub_agent.compute.batch import HostBatch, PoolBatch, address_of
from tensorhub_agent.compute.device_copy import device_of
from tensorhub_agent.compute.pool import CopyBatch, CopyPool
from tensorhub_agent.compute.spans import Spans, check_fits, columns
from tensorhub_agent.devices.changes import Changes
from tensorhub_agent.devices.columns import Columns, join_adjacent
from tensorhub_agent.devices.engine import engine_of
from tensorhub_agent.encodings.columns import Damaged
from tensorhub_agent.encodings.compression import pack, unpack
from tensorhub_agent.encodings.patch import apply, changes_in
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES
from tensorhub_agent.primitives.memory_region import MemoryRegion
from tensorhub_common.devices.device import Device

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


class DevicePatchBatch(PoolBatch):
    """Pieces of a GPU's memory that are overwritten there, and then hashed in place.

    Columns are unpacked by the host; positions are looked at, and values stored, by the GPU. Digests are as those of
    `DecodeBatch`.
    """

    def __init__(
        self, device: Device, destination: MemoryRegion, base: MemoryRegion | None, spans: Spans, coded: Sequence[Coded]
    ) -> None:
        """Prepare; see `DecodeBatch`. A base is memory of the same GPU, or of any other kind."""
        super().__init__()
        self._engine = engine_of(device)
        self._regions: tuple[MemoryRegion, MemoryRegion | None] | None = destination, base
        to, origin, self._nbytes = columns(spans)
        self._to = to + address_of(destination)
        self._from = None if base is None else origin + address_of(base)
        self._coded = coded
        self._digests = bytearray(len(self._nbytes) * PIECE_DIGEST_BYTES)

    async def result(self) -> bytes:
        """See `CopyBatch.result`."""
        await self.done()
        return bytes(self._digests)

    def _let_go(self) -> None:
        self._regions = None

    def _do(self, first: int, last: int, hasher: xxhash.xxh3_128) -> None:  # noqa: ARG002 (the device hashes)
        some = slice(first, last)
        if self._from is not None:
            places = join_adjacent(self._to[some], self._from[some], self._nbytes[some])
            self._engine.copy(*(each.tolist() for each in places))
        patches: dict[int, list[Changes]] = {}
        for number in range(first, last):
            code, unit = self._coded[number]
            with contextlib.suppress(Damaged):
                patches[number] = changes_in(code, unit, int(self._nbytes[number]) // unit)
        readable = np.fromiter(patches, np.int64, len(patches))
        units = np.array([self._coded[number][1] for number in patches], np.int64)
        to, nbytes = self._to[readable], self._nbytes[readable]
        digests, right = self._engine.overwrite(to, nbytes, units, list(patches.values()))
        for place, number in enumerate(patches):
            if right[place]:
                found = digests[place * PIECE_DIGEST_BYTES : (place + 1) * PIECE_DIGEST_BYTES]
                self._digests[number * PIECE_DIGEST_BYTES : (number + 1) * PIECE_DIGEST_BYTES] = found


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
) -> DecodeBatch | DevicePatchBatch:
    """Overwrite pieces as their patches say; the result is the digest of each, zeros where a patch is damaged.

    Span i is patched by patches i, after it was copied from `base`, if there is one. Raises ValueError, and writes
    nothing, when a span does not fit into one of the views.
    """
    nbytes = _checked(destination, base, spans, patches)
    if (device := device_of(destination)) is not None:
        return pool.start(DevicePatchBatch(device, destination, base, spans, patches), nbytes)
    return pool.start(DecodeBatch(destination, base, spans, patches, apply), nbytes)


def unpack_pieces(pool: CopyPool, destination: memoryview, spans: Spans, packed: Sequence[Coded]) -> DecodeBatch:
    """Write packed pieces; the result is the digest of each, zeros where one is damaged or empty.

    Raises ValueError, and writes nothing, when a span does not fit.
    """
    nbytes = _checked(destination, None, spans, packed)
    return pool.start(DecodeBatch(destination, None, spans, packed, unpack), nbytes)


def pack_pieces(
    pool: CopyPool, view: MemoryRegion, origin: Sequence[int], nbytes: Sequence[int], units: Sequence[int]
) -> CompressBatch:
    """Pack pieces that lie within the view. Raises ValueError when one does not."""
    to, _, sizes = columns(Spans(origin, origin, nbytes))
    check_fits("view", len(view), to, sizes)
    return pool.start(CompressBatch(view, origin, nbytes, units), sizes)


def _checked(destination: MemoryRegion, base: MemoryRegion | None, spans: Spans, coded: Sequence[Coded]) -> Columns:
    """Return the sizes of spans that fit into both memories. Raises ValueError."""
    to, origin, nbytes = columns(spans)
    check_fits("destination", len(destination), to, nbytes)
    if base is not None:
        check_fits("base", len(base), origin, nbytes)
    if destination.readonly or len(coded) != len(nbytes):
        raise ValueError("the destination can't be written, or not every span has patches")
    return nbytes
