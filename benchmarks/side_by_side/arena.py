"""The memory between which everybody but ourselves copies: one source and one destination for each reader.

All contenders share it, since only one runs at a time, so that many fit on one machine and all have the same bytes in
the same kind of memory: files as the agents' segments are, reserved, populated and mapped shared. They have no name, so
nothing is left behind however a run ends; other processes open them by the paths that `paths` tells.

The peers' programs import this module in environments of their own, so it needs numpy and nothing else.
"""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

READERS: Final = 4
SEED: Final = 1
COMPARED_BYTES: Final = 64 * 1024 * 1024
"""So much is compared at a time."""

Bytes = npt.NDArray[np.uint8]


class Region:
    """One mapping: its bytes as an array, and their address."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.nbytes = nbytes
        self.bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)


class Arena:
    """The regions; a process maps those that it uses."""

    def __init__(self, fds: Sequence[int]) -> None:
        self._fds = fds
        self._regions: dict[int, Region] = {}
        self.nbytes = os.fstat(fds[0]).st_size

    @property
    def source(self) -> Region:
        """What everybody reads."""
        return self._region(0)

    def destination(self, reader: int) -> Region:
        """Return what this reader fills."""
        return self._region(1 + reader)

    def _region(self, number: int) -> Region:
        if number not in self._regions:
            self._regions[number] = Region(self._fds[number], self.nbytes)
        return self._regions[number]

    @classmethod
    def create(cls, directory: Path, nbytes: int, readers: int = READERS) -> Self:
        """Make it, filled with random bytes that are the same in every run. Raises OSError if it does not fit."""
        arena = cls([_unnamed(directory, nbytes) for _ in range(1 + readers)])
        random = np.random.Generator(np.random.SFC64(SEED))
        arena.source.bytes[:] = np.frombuffer(random.bytes(nbytes), dtype=np.uint8)
        arena.erase()
        return arena

    @classmethod
    def open(cls, paths: Sequence[str]) -> Self:
        """Map what another process has made."""
        return cls([os.open(path, os.O_RDWR) for path in paths])

    @property
    def paths(self) -> list[str]:
        """Where other processes of this user find the regions, as long as this one lives."""
        return [f"/proc/{os.getpid()}/fd/{fd}" for fd in self._fds]

    def fd(self, number: int) -> int:
        """Return the file of a region; the source is the first."""
        return self._fds[number]

    def erase(self) -> None:
        """Make every byte of the destinations one that has to be written."""
        for reader in range(len(self._fds) - 1):
            np.bitwise_not(self.source.bytes, out=self.destination(reader).bytes)

    def is_equal(self, readers: int) -> bool:
        """Tell whether the first destinations hold the source's bytes."""
        return all(_equal(self.source.bytes, self.destination(each).bytes) for each in range(readers))

    def close(self) -> None:
        """Free the files; the mappings end with the process, or with their last array."""
        for fd in self._fds:
            os.close(fd)
        self._regions.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _unnamed(directory: Path, nbytes: int) -> int:
    path = directory / f"tensorhub-bench-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        path.unlink()
        os.posix_fallocate(fd, 0, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _equal(one: Bytes, other: Bytes) -> bool:
    parts: Any = range(0, one.size, COMPARED_BYTES)
    return all(np.array_equal(one[at : at + COMPARED_BYTES], other[at : at + COMPARED_BYTES]) for at in parts)
