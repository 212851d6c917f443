"""A shadow: a copy of what a shard published last, in the host's memory, and how it leads to patches.

Memory of the host is compared by the host, and the patches are applied to the shadow too, which so follows for little
more than what changes. Memory of a GPU is compared there: the shadow is brought beside it, some of it at a time, what
changed comes back, and then the shadow is overwritten over the bus. That takes none of the GPU's memory from a trainer,
and the bus is an order of magnitude faster than any line for which deltas are made.

Everything here is done in a thread of the pool, and blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorhub_agent.compute.batch import address_of
from tensorhub_agent.compute.device_copy import device_of
from tensorhub_agent.devices.columns import Columns
from tensorhub_agent.devices.engine import engine_of
from tensorhub_agent.devices.pinnable_mapping import pin_for
from tensorhub_agent.encodings.columns import unit_of
from tensorhub_agent.encodings.patch import apply, make, written
from tensorhub_agent.primitives.digests import digest_at
from tensorhub_agent.primitives.memory_region import host
from tensorhub_agent.storage.device_segments import AnySegment
from tensorhub_agent.storage.segments import Segment
from tensorhub_common.devices.device import Device
from tensorhub_common.layout.layout import PieceTable

CHORE_BYTES: Final = 4 * 1024 * 1024
"""A chore takes about so much at a time: some milliseconds, for which a job may have to wait."""

DEVICE_CHORE_BYTES: Final = 32 * 1024 * 1024
"""The same of a GPU's memory: the bus takes it in 0.6 ms, and most of a chore is the compression of what changed."""

CHORE_PIECES_MAX: Final = 256
"""The most pieces of a chore, where they are tiny."""

Patches = dict[int, bytes]
"""By piece."""

Digests = dict[int, bytes]
"""By piece."""


@dataclass(frozen=True, slots=True, eq=False)
class PublishedMemory:
    """What a shard has published: `digests` of its pieces, one after another."""

    segment: AnySegment
    table: PieceTable
    root: str
    digests: bytes

    @property
    def device(self) -> Device | None:
        """The GPU in whose memory it is."""
        return device_of(self.segment.view)

    def groups(self) -> Iterator[range]:
        """Cut the pieces into chores."""
        first = nbytes = 0
        nbytes_max = CHORE_BYTES if self.device is None else DEVICE_CHORE_BYTES
        for piece, size in enumerate(self.table.nbytes):
            if piece > first and (nbytes + size > nbytes_max or piece - first >= CHORE_PIECES_MAX):
                yield range(first, piece)
                first, nbytes = piece, 0
            nbytes += size
        yield range(first, len(self.table))

    def piece(self, view: memoryview, piece: int) -> memoryview:
        """Return the memory of a piece."""
        at = self.table.at[piece]
        return view[at : at + self.table.nbytes[piece]]

    def unit(self, piece: int) -> int:
        """Return the unit in which a piece is compared."""
        return unit_of(self.table.layout.tensors[self.table.tensor[piece]].itemsize)


@dataclass(slots=True, eq=False)
class Shadow:
    """A copy of what a shard published last."""

    segment: Segment
    digests: list[bytes | None]
    """What each piece in it hashes to; None: not known."""


def patches_to(publication: PublishedMemory, shadow: Shadow, pieces: Sequence[int]) -> Patches:
    """Return the patches that lead from the shadow to what is published, of pieces that have one worth its bytes."""
    if publication.device is not None:
        return _patches_on_device(publication.device, publication, shadow, pieces)
    view, found = host(publication.segment.view), Patches()
    for piece in pieces:
        old, new = publication.piece(shadow.segment.view, piece), publication.piece(view, piece)
        patch = make(old, new, publication.unit(piece))
        if patch is not None:
            found[piece] = patch
    return found


def follow(publication: PublishedMemory, shadow: Shadow, pieces: Sequence[int], patches: Patches) -> Digests:
    """Make the shadow what is published; return what is known of its pieces, whatever becomes of the memory meanwhile.

    Of other pieces it is known only if the memory was published until after.
    """
    if publication.device is not None:
        return _follow_on_device(publication.device, publication, shadow, pieces)
    view, found = host(publication.segment.view), Digests()
    for piece in pieces:
        target = publication.piece(shadow.segment.view, piece)
        if piece in patches:
            apply(patches[piece], target, publication.unit(piece))
            found[piece] = digest_at(publication.digests, piece)
        else:
            # By numpy, which lets go of the GIL; slice assignment between memoryviews doesn't.
            source = publication.piece(view, piece)
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
    return found


def _patches_on_device(device: Device, publication: PublishedMemory, shadow: Shadow, pieces: Sequence[int]) -> Patches:
    if not pieces:
        return {}
    pin_for(device, shadow.segment.view)
    old, new, nbytes = _places(publication, shadow, pieces)
    units = [publication.unit(piece) for piece in pieces]
    changes = engine_of(device).changes(old, new, nbytes, np.asarray(units, np.int64))
    sizes = nbytes.tolist()
    patches = [written(each, unit, size) for each, unit, size in zip(changes, units, sizes, strict=True)]
    return {piece: patch for piece, patch in zip(pieces, patches, strict=True) if patch is not None}


def _follow_on_device(device: Device, publication: PublishedMemory, shadow: Shadow, pieces: Sequence[int]) -> Digests:
    if not pieces:
        return {}
    pin_for(device, shadow.segment.view)
    to, origin, nbytes = _places(publication, shadow, pieces)
    digests = engine_of(device).send(to, origin, nbytes)
    return {piece: digest_at(digests, place) for place, piece in enumerate(pieces)}


def _places(publication: PublishedMemory, shadow: Shadow, pieces: Sequence[int]) -> tuple[Columns, Columns, Columns]:
    """Return where pieces are in the shadow and in what is published, and their sizes."""
    table = publication.table
    at = np.asarray([table.at[piece] for piece in pieces], np.int64)
    nbytes = np.asarray([table.nbytes[piece] for piece in pieces], np.int64)
    return at + address_of(shadow.segment.view), at + address_of(publication.segment.view), nbytes
