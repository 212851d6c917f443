"""Reading a batch from one source in the way that costs least: the pieces as they are, or patches of what stands there.

Always true:
- A piece that doesn't hash to what the source's digests say after it was patched is read as it is, from the same
  source, before anything is said of it. So a wrong patch, or one for other bytes than stand here, costs time, and
  nobody is blamed for it.
- A batch ends when nothing of it can be written any more, however it ends.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tensorhub_agent.copying import Spans
from tensorhub_agent.encodings.choice import takes_patches
from tensorhub_agent.encodings.columns import unit_of
from tensorhub_agent.encodings.deltas import NO_PATCH, SIZE
from tensorhub_agent.encodings.patching import Overwrites
from tensorhub_agent.pace import Pace
from tensorhub_agent.transport import PatchingSession
from tensorhub_common.digests import digest_of
from tensorhub_common.layout import PieceTable
from tensorhub_common.wire.transfer import Range
from tensorhub_common.wire.worker import Encoded


@dataclass(frozen=True, slots=True)
class Where:
    """Where a shard's pieces go. `base`: where its old version stands, if not in the same place."""

    destination: memoryview
    base: memoryview | None
    table: PieceTable


@dataclass(frozen=True, slots=True)
class Brought:
    """A batch that stands in the destination."""

    digests: bytes
    encoded: tuple[Encoded, ...] = ()
    patches: dict[int, bytes] = field(default_factory=dict)
    """What led there from the old version, of pieces that are right now."""


@dataclass(slots=True)
class PatchingReader:
    """One source that offers patches. `digests` are those that it says its pieces have."""

    session: PatchingSession
    digests: bytes
    sizes: bytes
    """Of the patches of each piece, as `SIZE`."""
    pace: Pace = field(default_factory=lambda: Pace("ucxx"))

    async def read(self, where: Where, pieces: Sequence[Range], progress: Callable[[int], None]) -> Brought:
        """Bring a batch. Raises `TransportLost`."""
        numbers = [number for first, count in pieces for number in range(first, first + count)]
        patched = self._patched(numbers, where.table)
        plain = [number for number in numbers if number not in patched]
        found: dict[int, bytes] = {}
        overwritten, read = await asyncio.gather(
            self._overwrite(where, patched), self._plain(where, plain, found, progress), return_exceptions=True
        )
        # Both have ended before either is heard.
        if isinstance(overwritten, BaseException):
            raise overwritten
        if isinstance(read, BaseException):
            raise read
        patches, encoded = self._judged(patched, where.table, *overwritten, found)
        await self._plain(where, [number for number in patched if number not in patches], found, progress)
        return Brought(b"".join(found[number] for number in numbers), encoded, patches)

    def _patched(self, numbers: Sequence[int], table: PieceTable) -> dict[int, int]:
        """Choose the pieces for which patches are asked for; returns the sizes of these."""
        sizes = {number: size for number in numbers if (size := self._size(number)) != NO_PATCH}
        nbytes = sum(table.nbytes[number] for number in sizes)
        return sizes if takes_patches(nbytes, sum(sizes.values()), self.pace.rate) else {}

    def _size(self, number: int) -> int:
        if len(self.sizes) < (number + 1) * SIZE.size:
            return NO_PATCH
        size: int = SIZE.unpack_from(self.sizes, number * SIZE.size)[0]
        return size

    async def _overwrite(self, where: Where, patched: dict[int, int]) -> tuple[bytes, list[bytes]]:
        if not patched:
            return b"", []
        table = where.table
        units = [unit_of(table.layout.tensors[table.tensor[number]].itemsize) for number in patched]
        wanted = Overwrites(list(patched), _spans(table, patched), list(patched.values()), units)
        return await self.session.overwrite(where.destination, where.base, wanted)

    async def _plain(
        self, where: Where, numbers: Sequence[int], found: dict[int, bytes], progress: Callable[[int], None]
    ) -> None:
        if not numbers:
            return
        began = time.monotonic()
        spans = _spans(where.table, numbers)
        digests = await self.session.read(where.destination, spans, digests=True, progress=progress)
        self.pace.came(sum(spans.nbytes), time.monotonic() - began)
        found.update((number, digest_of(digests, place)) for place, number in enumerate(numbers))

    def _judged(
        self,
        patched: dict[int, int],
        table: PieceTable,
        digests: bytes,
        patches: Sequence[bytes],
        found: dict[int, bytes],
    ) -> tuple[dict[int, bytes], tuple[Encoded, ...]]:
        """Return the patches that led to the right bytes, and what has come by patches."""
        good = {}
        for place, (number, patch) in enumerate(zip(patched, patches, strict=True)):
            found[number] = digest_of(digests, place)
            if found[number] == digest_of(self.digests, number):
                good[number] = patch
        if not patched:
            return good, ()
        nbytes = sum(table.nbytes[number] for number in good)
        return good, (Encoded(how="delta", nbytes=nbytes, wire_bytes=sum(patched.values())),)


def _spans(table: PieceTable, numbers: Sequence[int] | dict[int, int]) -> Spans:
    at = [table.at[number] for number in numbers]
    return Spans(at, at, [table.nbytes[number] for number in numbers])
