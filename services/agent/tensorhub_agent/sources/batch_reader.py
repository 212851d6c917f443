"""Reading a batch from one source in the way that costs least: the pieces as they are, or patches of the old ones.

Invariants:
- A piece that doesn't hash to what the source's digests say after it was decoded is read as it is, from the same
  source, before anything is said of it. So a wrong patch, or one for other bytes than the reader has, costs time, and
  no source is blamed for it.
- A batch that would come otherwise because its line seems slow comes as it is now and then, which measures the line.
- A batch ends when nothing of it can be written any more, however it ends.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.encodings.codec_tasks import PatchTargets
from tensorhub_agent.encodings.columns import unit_of
from tensorhub_agent.leases.delta_store import COMING, NO_PATCH, SIZE
from tensorhub_agent.primitives.digests import digest_at
from tensorhub_agent.primitives.memory_region import MemoryRegion
from tensorhub_agent.rates.encoding_choice import LineEstimate, takes_patches
from tensorhub_agent.transports.base import EncodingSession
from tensorhub_common.layout.layout import PieceTable
from tensorhub_common.protocol.leases import DIGESTS_PAGE_PIECES
from tensorhub_common.protocol.ranges import Range
from tensorhub_common.protocol.worker import EncodedBytes

PATCHES_S: Final = 2.5
"""A batch waits so long for patches that are being made; a source that is silent for `stall_s` is left. Where none was
made in that time no later batch of the read waits."""

LOOK_AGAIN_S: Final = 0.05
"""How often it is looked for them."""

PAGE: Final = DIGESTS_PAGE_PIECES


@dataclass(frozen=True, slots=True)
class BatchTarget:
    """Where a shard's pieces go. `base` has its old version, if that is not in the same place."""

    destination: MemoryRegion
    base: MemoryRegion | None
    table: PieceTable


@dataclass(frozen=True, slots=True)
class BatchResult:
    """A batch that has come into the destination."""

    digests: bytes
    encoded: tuple[EncodedBytes, ...] = ()
    patches: dict[int, bytes] = field(default_factory=dict)
    """What led there from the old version, of pieces that are right now."""


@dataclass(slots=True)
class BatchReader:
    """One source on another host. `digests` are those that it says its pieces have."""

    session: EncodingSession
    digests: bytes
    sizes: bytes = b""
    """Of the patches of each piece, as `SIZE`; empty where it offers none."""
    line: LineEstimate = field(default_factory=LineEstimate)
    more: Callable[[int], Awaitable[tuple[bytes, bool]]] | None = None
    """While patches are being made: asks for the page of sizes that begins at a piece, and whether more will come."""
    clock: Callable[[], float] = time.monotonic

    async def _await_patches(self, pieces: Sequence[Range]) -> None:
        """Wait for patches of these pieces while they are being made, but not for long, and in vain only once."""
        until, known = self.clock() + PATCHES_S, self.sizes
        for first, count in pieces:
            for page in range(first // PAGE * PAGE, first + count, PAGE):
                inside = range(max(first, page), min(first + count, page + PAGE))
                while self.more is not None and any(self._size(number) == COMING for number in inside):
                    sizes, is_coming = await self.more(page)
                    at, end = page * SIZE.size, page * SIZE.size + len(sizes)
                    if sizes and end <= len(self.sizes):
                        self.sizes = self.sizes[:at] + sizes + self.sizes[end:]
                    if not is_coming:
                        self.more = None
                    elif self.clock() > until:
                        if self.sizes == known:
                            # Its maker has no turn. A batch after the other would wait for it, longer than for pieces.
                            self.more = None
                        return
                    else:
                        await asyncio.sleep(LOOK_AGAIN_S)

    async def read(self, where: BatchTarget, pieces: Sequence[Range], progress: Callable[[int], None]) -> BatchResult:
        """Bring a batch. Raises `TransportLost`."""
        if self.more is not None:
            await self._await_patches(pieces)
        packs = self.line.prefers_compressed
        if not self.sizes and not packs:
            spans = Spans.of(where.table, pieces)
            return BatchResult(await self._timed(where, spans, progress))
        numbers = [number for first, count in pieces for number in range(first, first + count)]
        patched = self._patched(numbers, where.table)
        if (packs or self._only_slow(patched, where.table)) and self.line.probes_plain():
            packs, patched = False, _unchanged(patched)
        others = [number for number in numbers if number not in patched]
        packed, plain = (others, []) if packs else ([], others)
        batch = _Batch(self, where)
        await batch.bring(patched, packed, plain, progress)
        await batch.bring({}, [], [number for number in numbers if number not in batch.right], progress)
        found = batch.found
        return BatchResult(b"".join(found[number] for number in numbers), tuple(batch.encoded), batch.patches)

    async def _timed(self, where: BatchTarget, spans: Spans, progress: Callable[[int], None]) -> bytes:
        """Read pieces as they are, and measure."""
        self.line.asked(self.clock())
        came = 0
        try:
            digests = await self.session.read(where.destination, spans, digests=True, progress=progress)
            came = sum(spans.nbytes)
        finally:
            self.line.came(came, self.clock())
        return digests

    def _patched(self, numbers: Sequence[int], table: PieceTable) -> dict[int, int]:
        """Choose the pieces for which patches are asked for; returns the sizes of these."""
        sizes = {number: size for number in numbers if (size := self._size(number)) < COMING}
        nbytes = sum(table.nbytes[number] for number, size in sizes.items() if size)
        if takes_patches(nbytes, sum(sizes.values()), self.line.best_rate):
            return sizes
        return _unchanged(sizes)

    def _only_slow(self, patched: dict[int, int], table: PieceTable) -> bool:
        """Tell whether patches were chosen only because this read found the line slow."""
        nbytes = sum(table.nbytes[number] for number, size in patched.items() if size)
        return bool(nbytes) and self.line.patches_for_slowness(nbytes, sum(patched.values()))

    def _size(self, number: int) -> int:
        if len(self.sizes) < (number + 1) * SIZE.size:
            return NO_PATCH
        size: int = SIZE.unpack_from(self.sizes, number * SIZE.size)[0]
        return size

    async def plain(self, where: BatchTarget, numbers: Sequence[int], progress: Callable[[int], None]) -> bytes:
        """Read pieces as they are; return their digests."""
        return await self._timed(where, _spans(where.table, numbers), progress)


@dataclass(slots=True)
class _Batch:
    """What came of one batch so far."""

    reader: BatchReader
    where: BatchTarget
    found: dict[int, bytes] = field(default_factory=dict)
    """The digests, by piece."""
    right: set[int] = field(default_factory=set)
    """Those that need not be read again."""
    patches: dict[int, bytes] = field(default_factory=dict)
    encoded: list[EncodedBytes] = field(default_factory=list)

    async def bring(
        self, patched: dict[int, int], packed: Sequence[int], plain: Sequence[int], progress: Callable[[int], None]
    ) -> None:
        """Bring pieces in three ways; all of them have ended before what went wrong is raised."""
        ways = [self._patch(patched), self._unpack(packed), self._read(plain, progress)]
        for outcome in await asyncio.gather(*ways, return_exceptions=True):
            if outcome is not None:
                raise outcome

    async def _patch(self, patched: dict[int, int]) -> None:
        if not patched:
            return
        where = self.where
        wanted = PatchTargets(list(patched), _spans(where.table, patched), list(patched.values()), self._units(patched))
        digests, patches = await self.reader.session.overwrite(where.destination, where.base, wanted)
        nbytes = self._judge(patched, digests)
        self.patches = {number: patch for number, patch in zip(patched, patches, strict=True) if number in self.right}
        why = self.reader.line.why
        self.encoded.append(EncodedBytes(how="delta", nbytes=nbytes, wire_bytes=sum(patched.values()), why=why))

    async def _unpack(self, packed: Sequence[int]) -> None:
        if not packed:
            return
        where = self.where
        spans = _spans(where.table, packed)
        digests, came = await self.reader.session.unpack(where.destination, spans, self._units(packed))
        nbytes = self._judge(packed, digests)
        self.reader.line.packed(sum(spans.nbytes), sum(spans.nbytes) - nbytes + came)
        if came:
            self.encoded.append(EncodedBytes(how="zstd", nbytes=nbytes, wire_bytes=came, why=self.reader.line.why))

    async def _read(self, plain: Sequence[int], progress: Callable[[int], None]) -> None:
        """Read pieces as they are: whatever they hash to then is for the transfer to judge."""
        if plain:
            digests = await self.reader.plain(self.where, plain, progress)
            self.found.update((number, digest_at(digests, place)) for place, number in enumerate(plain))
            self.right.update(plain)

    def _judge(self, numbers: Iterable[int], digests: bytes) -> int:
        """Take the digests of decoded pieces; return the bytes of those that are right."""
        nbytes = 0
        for place, number in enumerate(numbers):
            self.found[number] = digest_at(digests, place)
            if self.found[number] == digest_at(self.reader.digests, number):
                self.right.add(number)
                nbytes += self.where.table.nbytes[number]
        return nbytes

    def _units(self, numbers: Iterable[int]) -> list[int]:
        table = self.where.table
        return [unit_of(table.layout.tensors[table.tensor[number]].itemsize) for number in numbers]


def _unchanged(sizes: dict[int, int]) -> dict[int, int]:
    """Return the pieces in which nothing has changed: they cost no more than to be hashed, as everything is."""
    return {number: size for number, size in sizes.items() if not size}


def _spans(table: PieceTable, numbers: Iterable[int]) -> Spans:
    at = [table.at[number] for number in numbers]
    return Spans(at, at, [table.nbytes[number] for number in numbers])
