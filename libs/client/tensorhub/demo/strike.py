"""Kills a replica in the middle of a transfer: looks at its memory, and strikes when part of it has been overwritten.

All bytes of a read are there some tens of ms after the log has said that it begins, and on a busy machine the word may
come too late. So the segments are looked at themselves from before the version is published: samples of them are
compared with what stood there while the replica was at rest.
The same look after the kill proves it: blocks that differ by then have been written by a read that never ended.

Always true: nobody is killed unless part of the memory, and not all of it, was overwritten at that moment; the segments
are opened before, so they stay readable when the agent that comes back has removed the names of those that it can't
trust; nothing is ever written to them.
"""

import contextlib
import mmap
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import xxhash

BLOCK_BYTES: Final = 256 * 1024
SAMPLE_BYTES: Final = 16
LOOK_WAIT_S: Final = 0.0003
LOOK_S_MAX: Final = 10.0
SHARE_MIN: Final = 0.1
SHARE_MAX: Final = 0.8


class Memory:
    """The segments of one agent, and what stood in them when this was made."""

    def __init__(self, segments: Sequence[Path]) -> None:
        """Map and digest them: some tens of ms for 100 MB."""
        self._maps = [_mapped(path) for path in segments]
        self.nbytes = sum(len(each) for each in self._maps)
        self._samples = self._sampled()
        self._digests = self._digested()

    def share_written(self) -> float:
        """Return which share of the samples differ by now, 0 to 1. Takes some 10 µs."""
        changed = sum(old != new for old, new in zip(self._samples, self._sampled(), strict=True))
        return changed / max(1, len(self._samples))

    def written_bytes(self) -> int:
        """Return how many bytes stand in blocks that differ by now."""
        blocks = zip(self._digests, self._digested(), strict=True)
        return sum(nbytes for (nbytes, old), (_, new) in blocks if old != new)

    def close(self) -> None:
        """Let the segments go."""
        for each in self._maps:
            each.close()

    def _sampled(self) -> list[bytes]:
        return [each[begin : begin + SAMPLE_BYTES] for each in self._maps for begin in range(0, len(each), BLOCK_BYTES)]

    def _digested(self) -> list[tuple[int, bytes]]:
        found = []
        for each in self._maps:
            with memoryview(each) as view:
                blocks = (view[begin : begin + BLOCK_BYTES] for begin in range(0, len(each), BLOCK_BYTES))
                found += [(len(block), xxhash.xxh3_128_digest(block)) for block in blocks]
        return found


class Strike:
    """A replica that is to be killed, with its agent, in its next read."""

    def __init__(self, replica: str, pid: int, agent_pid: int, memory: Memory) -> None:
        self.replica = replica
        self.pid = pid
        self.agent_pid = agent_pid
        self.memory = memory
        self.is_falling = False
        self.round: int | None = None
        """The read that it falls in, and when the log said that this begins, in seconds since the epoch."""
        self.began: float | None = None
        self.filled = 0
        """How many shards were reported filled in that round."""

    def fall(self) -> bool:
        """Look until part of the memory is overwritten, then kill. False: it was all there before one could look.

        Blocks until the read is under way, so it is for a thread.
        """
        deadline = time.monotonic() + LOOK_S_MAX
        while (share := self.memory.share_written()) < SHARE_MIN:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_WAIT_S)
        if share > SHARE_MAX:
            return False
        for pid in (self.agent_pid, self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return True


def _mapped(path: Path) -> mmap.mmap:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(file, 0, prot=mmap.PROT_READ)
    finally:
        os.close(file)
