"""Ranks in their order, as they come and go, however many there are. Pure.

A sorted list moves half of itself for each rank that is put in: with a million, that is a fifth of a millisecond. Here
it is in blocks of bounded size, and only one of them moves.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Final

from tensorhub_common.protocol.rollout.entries import RequestId

BLOCK_MAX: Final = 1024
"""Limit of the ranks in one block; a fuller one is divided in two."""

Rank = tuple[int, bool, float, RequestId]
"""When a waiting request is placed, lower ones first: less urgent, can wait (or has not begun), less its length in
tokens, which."""


class RankOrder:
    """Ranks, each once, in their order."""

    def __init__(self, ranks: Iterable[Rank] = ()) -> None:
        """Begin with these."""
        self._blocks: list[list[Rank]] = []
        """In order, none of them empty."""
        self._lasts: list[Rank] = []
        """The last rank of each."""
        self._count = 0
        for rank in ranks:
            self.add(rank)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Rank]:
        """Return all of them; none may be added or removed meanwhile."""
        return chain.from_iterable(self._blocks)

    def add(self, rank: Rank) -> None:
        """Put a rank in its place."""
        self._count += 1
        if not self._blocks:
            self._blocks, self._lasts = [[rank]], [rank]
            return
        at = min(bisect_left(self._lasts, rank), len(self._lasts) - 1)
        block = self._blocks[at]
        insort(block, rank)
        self._lasts[at] = block[-1]
        if len(block) > BLOCK_MAX:
            half = len(block) // 2
            self._blocks[at : at + 1] = [block[:half], block[half:]]
            self._lasts[at : at + 1] = [block[half - 1], block[-1]]

    def remove(self, rank: Rank) -> None:
        """Take out a rank that is there."""
        self._count -= 1
        at = bisect_left(self._lasts, rank)
        block = self._blocks[at]
        del block[bisect_left(block, rank)]
        if block:
            self._lasts[at] = block[-1]
        else:
            del self._blocks[at], self._lasts[at]

    def every(self, step: int) -> Iterator[Rank]:
        """Return the first of so many, and of the next ones."""
        at = 0
        for block in self._blocks:
            yield from block[at::step]
            at = (at - len(block)) % step

    def behind(self, rank: Rank) -> Iterator[Rank]:
        """Return those behind a rank, which need not be there."""
        at = bisect_right(self._lasts, rank)
        if at == len(self._lasts):
            return iter(())
        first = self._blocks[at]
        return chain(
            islice(first, bisect_right(first, rank), None), chain.from_iterable(islice(self._blocks, at + 1, None))
        )
