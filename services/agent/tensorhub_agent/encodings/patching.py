"""Applying patches in the threads of the copy pool, and hashing what stands then.

Always true: as for every job of the pool, it ends only when none of its threads writes any more, and nothing outside
its spans is written.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from tensorhub_agent.copying import CopyJob, CopyPool, Spans, check_fits, columns
from tensorhub_agent.encodings.columns import Damaged
from tensorhub_agent.encodings.patch import apply
from tensorhub_common.digests import PIECE_DIGEST_BYTES

Patches = tuple[memoryview, int]
"""Patches of a piece, one after another, and the unit that they are in."""


@dataclass(frozen=True, slots=True)
class Overwrites:
    """Pieces by column that are to be patched: numbers at the source, and how many bytes their patches have."""

    pieces: Sequence[int]
    spans: Spans
    """Where each stands, in the destination and in its base."""
    sizes: Sequence[int]
    units: Sequence[int]


class PatchJob(CopyJob):
    """Pieces overwritten by their patches, and hashed where they stand then.

    Of a piece whose patches are damaged the digest is zeros, and the piece is as it was: it has to be read otherwise.
    """

    def __init__(
        self, destination: memoryview, base: memoryview | None, spans: Spans, patches: Sequence[Patches]
    ) -> None:
        """Prepare; span i is patched by patches i. With `base` its piece is copied from there first."""
        super().__init__(destination, base, spans, bytearray(len(spans.nbytes) * PIECE_DIGEST_BYTES))
        self._patches = patches

    def _do(self, first: int, last: int, hasher: xxhash.xxh3_128) -> None:  # noqa: ARG002 (as every job has it)
        views = self._views
        assert views is not None
        if self._from_address is not None:
            self._copy(first, last)
        spans = self._spans
        for number in range(first, last):
            piece = views[0][spans.to[number] : spans.to[number] + spans.nbytes[number]]
            patch, unit = self._patches[number]
            with contextlib.suppress(Damaged):
                apply(patch, piece, unit)
                digest = xxhash.xxh3_128_digest(piece)
                self._digests[number * PIECE_DIGEST_BYTES : (number + 1) * PIECE_DIGEST_BYTES] = digest


def patch_pieces(
    pool: CopyPool, destination: memoryview, base: memoryview | None, spans: Spans, patches: Sequence[Patches]
) -> CopyJob:
    """Overwrite pieces as their patches say; the result is the digest of each, zeros where a patch is damaged.

    Span i is patched by patches i, after it was copied from `base`, if there is one. Raises ValueError, and writes
    nothing, when a span does not fit into one of the views.
    """
    to, origin, nbytes = columns(spans)
    check_fits("destination", len(destination), to, nbytes)
    if base is not None:
        check_fits("base", len(base), origin, nbytes)
    if destination.readonly or len(patches) != len(nbytes):
        raise ValueError("the destination can't be written, or not every span has patches")
    return pool.start(PatchJob(destination, base, spans, patches), nbytes)
