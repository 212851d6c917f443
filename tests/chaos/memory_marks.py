"""Looks into the segments of shards from outside the hub, to see the moment in which one is being overwritten.

Every eight bytes of a `Content` differ between versions, so marks of which some have changed mean that one comes in.
"""

import asyncio
import mmap
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Self

import torch
from tests.bounds import WAIT_S
from tests.leftovers import memory_of

from tensorhub import AsyncShard
from tensorhub_agent.storage.segments import MANIFEST_SUFFIX, SEGMENT_SUFFIX

MARKS: Final = 64
MARK_BYTES: Final = 8
CALM_S: Final = 0.05
"""What has not changed for so long is not being overwritten."""

BEGUN, OVER = 0.1, 0.7
"""Between these shares of changed marks a fill is in its middle; some marks stand in what no version changes."""


def segments_of(directory: Path, agent: str = "") -> list[Path]:
    return memory_of(directory, agent and f"{agent}-", SEGMENT_SUFFIX)


def manifests_of(directory: Path) -> list[Path]:
    return memory_of(directory, end=MANIFEST_SUFFIX)


async def first_bytes(shards: Iterable[AsyncShard], *reads: "asyncio.Future[Any]") -> None:
    """Return once bytes have come into each of some shards that were zero, or one of the reads is over.

    Nothing but the memory shows when its first byte has come.
    """
    marks = [
        [tensor.reshape(-1).view(torch.uint8)[:64] for tensor in shard.tensors.values() if tensor.numel()]
        for shard in shards
    ]

    def have_come() -> bool:
        return all(any(bool(mark.any()) for mark in each) for each in marks)

    async with asyncio.timeout(WAIT_S):
        while not have_come() and not any(read.done() for read in reads):  # noqa: ASYNC110 (as said)
            await asyncio.sleep(0)


class Marks:
    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        step = len(self._memory) // MARKS
        self._places = [step * number for number in range(MARKS)]
        self._base = self._look()
        self._changed_at = time.monotonic()

    @classmethod
    def of(cls, directory: Path, agent: str) -> Self:
        (path,) = segments_of(directory, agent)
        return cls(path)

    def are_mixed(self) -> bool:
        now, seen = time.monotonic(), self._look()
        changed = sum(mark != before for mark, before in zip(seen, self._base, strict=True)) / MARKS
        if not changed:
            return False
        if now - self._changed_at > CALM_S and BEGUN < changed < OVER:
            return True
        # The first look may have met a fill, and a fill that is over is the next one's base.
        self._base, self._changed_at = seen, now
        return False

    def _look(self) -> list[bytes]:
        return [self._memory[place : place + MARK_BYTES] for place in self._places]
