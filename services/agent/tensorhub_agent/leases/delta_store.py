"""The deltas that an agent keeps: for each shard, the patches of its pieces from one version's bytes to a later one's.

A delta is known by the roots of the two versions, which are what the log vouches for: whatever numbers or names they
have, a patch between the same bytes is the same patch. Several deltas in a row are a chain, and their patches are
applied one after another. A piece of which a delta has no patch is read as it is. Pure.

Always true: `nbytes` is the sum of what is kept, and at most `bytes_max`; of a shard at most `versions_max` deltas are
kept. The oldest go first, and who was offered a delta before keeps what it was offered.
"""

import struct
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

SIZE: Final = struct.Struct("<I")
"""How a size of a patch travels."""

NO_PATCH: Final = 0xFFFF_FFFF
"""In place of a size: the piece itself has to be read."""

COMING: Final = 0xFFFF_FFFE
"""In place of a size: it is not known yet whether there will be a patch."""

KEPT_VERSIONS: Final = 4
"""An agent that makes no deltas of its own keeps this many of those that it has applied, of each shard."""


@dataclass(slots=True, eq=False)
class Delta:
    """Patches from the version with root `base` to the one with root `root`; empty where nothing changed."""

    shard: Hashable
    base: str
    root: str
    patches: list[bytes | None]
    nbytes: int = 0
    is_made: bool = False
    """No patch is added any more."""
    reached: int = 0
    """Of the pieces before this one it is known whether there is a patch; they come in their order."""


@dataclass(slots=True)
class PatchOffer:
    """What one reader may have instead of pieces; it keeps what it has, whatever is dropped meanwhile."""

    patches: list[tuple[bytes, ...] | None]
    sizes: bytes
    """Of each piece, as `SIZE`: how many bytes its patches have together, or `NO_PATCH`."""

    def grow(self, other: "PatchOffer") -> None:
        """Take in patches that were made since, of pieces that had none: what was told stays true."""
        sizes = bytearray(self.sizes)
        for piece, (mine, theirs) in enumerate(zip(self.patches, other.patches, strict=True)):
            if mine is None:
                self.patches[piece] = theirs
                sizes[piece * SIZE.size : (piece + 1) * SIZE.size] = other.page(piece, 1)
        self.sizes = bytes(sizes)

    def page(self, first: int, count: int) -> bytes:
        """Return the sizes of the first `count` pieces."""
        return self.sizes[first * SIZE.size : (first + count) * SIZE.size]


class DeltaStore:
    """All deltas of one agent, the oldest first."""

    def __init__(self, versions_max: int, bytes_max: int) -> None:
        """Keep nothing yet."""
        self._versions_max, self._bytes_max = versions_max, bytes_max
        self._deltas: list[Delta] = []
        self.nbytes = 0

    def begin(self, shard: Hashable, base: str, root: str, pieces: int) -> Delta:
        """Begin a delta between two versions of a shard; it takes the place of one between the same."""
        for known in [each for each in self._of(shard) if (each.base, each.root) == (base, root)]:
            self._drop(known)
        delta = Delta(shard, base, root, [None] * pieces)
        self._deltas.append(delta)
        for old in list(self._of(shard))[: -self._versions_max]:
            self._drop(old)
        return delta

    def put(self, delta: Delta, piece: int, patch: bytes | None) -> bool:
        """Take the patch of a piece; None where there is none. False: the delta was dropped, now or before."""
        if delta not in self._deltas:
            return False
        added = len(patch or b"") - len(delta.patches[piece] or b"")
        delta.patches[piece] = patch
        delta.reached = max(delta.reached, piece + 1)
        delta.nbytes += added
        self.nbytes += added
        while self.nbytes > self._bytes_max:
            self._drop(self._deltas[0])
        return delta in self._deltas

    def end(self, delta: Delta) -> None:
        """The delta has all the patches that it will have."""
        delta.is_made = True

    def forget(self, shard: Hashable) -> None:
        """Drop what is kept of a shard."""
        for delta in list(self._of(shard)):
            self._drop(delta)

    def is_coming(self, shard: Hashable, base: str, root: str) -> bool:
        """Tell whether the last delta of a chain between the two is being made just now."""
        chain = self._chain(shard, base, root)
        return bool(chain) and not chain[-1].is_made

    def offer(self, shard: Hashable, base: str, root: str, nbytes: Sequence[int]) -> PatchOffer | None:
        """Offer what leads from one version to the other; None where nothing does. `nbytes` of each piece."""
        chain = self._chain(shard, base, root)
        if not chain or any(len(delta.patches) != len(nbytes) for delta in chain):
            return None
        patches: list[tuple[bytes, ...] | None] = []
        sizes = bytearray()
        for piece, size in enumerate(nbytes):
            steps = _steps(chain, piece)
            length = sum(len(step) for step in steps) if steps is not None else NO_PATCH
            if steps is None and any(not delta.is_made and piece >= delta.reached for delta in chain):
                length = COMING
            elif length >= size:
                steps, length = None, NO_PATCH
            patches.append(steps)
            sizes += SIZE.pack(length)
        return PatchOffer(patches, bytes(sizes))

    def check(self) -> None:
        """Raise AssertionError when the account is wrong."""
        assert self.nbytes == sum(delta.nbytes for delta in self._deltas) <= self._bytes_max
        for delta in self._deltas:
            assert delta.nbytes == sum(len(patch or b"") for patch in delta.patches)
            assert len(list(self._of(delta.shard))) <= self._versions_max

    def _of(self, shard: Hashable) -> Iterator[Delta]:
        return (delta for delta in self._deltas if delta.shard == shard)

    def _drop(self, delta: Delta) -> None:
        self._deltas.remove(delta)
        self.nbytes -= delta.nbytes

    def _chain(self, shard: Hashable, base: str, root: str) -> list[Delta]:
        """Return the fewest deltas that lead from one root to the other."""
        paths: dict[str, list[Delta]] = {base: []}
        ways = [base]
        for way in ways:
            for delta in self._of(shard):
                if delta.base == way and delta.root not in paths:
                    paths[delta.root] = [*paths[way], delta]
                    ways.append(delta.root)
        return paths.get(root, [])


def _steps(chain: Sequence[Delta], piece: int) -> tuple[bytes, ...] | None:
    steps = []
    for delta in chain:
        patch = delta.patches[piece]
        if patch is None:
            return None
        if patch:
            steps.append(patch)
    return tuple(steps)
