"""Which pieces of a read stand proven in the destination, and by what. Pure.

Always true: a piece counts by its digest, taken of the destination, only against a list whose root is the log's; so a
source that has moved on can vouch for nothing, and a source that sent right bytes has sent them.
"""

from collections.abc import Iterable

from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES, root_digest
from tensorhub_agent.primitives.ranges import ranges_of_gaps, set_marks
from tensorhub_common.protocol.log.commands import NO_ROOT
from tensorhub_common.protocol.ranges import Range


class Verification:
    """The pieces that are done, and the digests that the log vouches for once a source has brought them."""

    def __init__(self, pieces: int, root: str | None, kept: tuple[bytearray, bytes] | None, *, verify: bool) -> None:
        """Take what an earlier failed read of the same bytes has proven."""
        self.root = root
        self.verify = verify and root != NO_ROOT
        self.done = bytearray(pieces)
        self.digests: bytes | None = None
        if kept is not None and self.verify:
            self.done, self.digests = bytearray(kept[0]), kept[1]
        self.kept = sum(self.done)

    def missing(self) -> list[Range]:
        """Return the pieces that are not done."""
        return ranges_of_gaps(self.done)

    def confirmed(self, ranges: Iterable[Range]) -> None:
        """Count pieces by the word of their source, where there are no digests."""
        set_marks(self.done, ranges)

    def vouched(self, digests: bytes) -> bool:
        """Take a source's list of digests if it is the log's."""
        if len(digests) != len(self.done) * PIECE_DIGEST_BYTES:
            return False
        if self.digests is not None:
            return digests == self.digests
        if self.root is not None and root_digest(digests) != self.root:
            return False
        self.digests = digests
        return True

    def count(self, ranges: Iterable[Range], digests: bytes) -> list[Range]:
        """Count the pieces whose digests are right; returns those whose are not."""
        assert self.digests is not None
        at, wrong = 0, []
        for first, count in ranges:
            size = count * PIECE_DIGEST_BYTES
            expected = self.digests[first * PIECE_DIGEST_BYTES : first * PIECE_DIGEST_BYTES + size]
            found = digests[at : at + size]
            at += size
            if found == expected:
                set_marks(self.done, [(first, count)])
            else:
                wrong += self._count_each(first, count, found, expected)
        return wrong

    def _count_each(self, first: int, count: int, found: bytes, expected: bytes) -> list[Range]:
        wrong = []
        for number in range(count):
            cut = slice(number * PIECE_DIGEST_BYTES, (number + 1) * PIECE_DIGEST_BYTES)
            if found[cut] == expected[cut]:
                self.done[first + number] = 1
            else:
                wrong.append((first + number, 1))
        return wrong

    def keep(self) -> tuple[bytearray, bytes] | None:
        """Return what a later read of the same bytes need not read again."""
        if not self.verify or self.digests is None or not any(self.done):
            return None
        return bytearray(self.done), self.digests
