"""The physical limit: plain memcpy of as many bytes between two populated mappings of shared memory.

Both are made as the agents' segments are: a file under the same directory, reserved, then mapped shared.
"""

import ctypes
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Self

import numpy as np

_memcpy: Final = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = None


class Memcpy:
    """Two populated mappings of `nbytes` each. `with` frees them."""

    def __init__(self, shm_dir: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        self._threads = ThreadPoolExecutor(2)
        self._origin, self._to = (_mapping(shm_dir / f"tensorhub-bench-{os.getpid()}-{n}", nbytes) for n in range(2))
        np.frombuffer(self._origin, dtype=np.uint8)[:] = 1
        self.run(1)

    def run(self, threads: int) -> float:
        """Copy all once, with one thread or two, and return the seconds."""
        origin, to = _address(self._origin), _address(self._to)
        part = self.nbytes // threads
        begin = time.perf_counter()
        if threads == 1:
            _memcpy(to, origin, self.nbytes)
        else:
            copies = [self._threads.submit(_memcpy, to + n * part, origin + n * part, part) for n in range(threads)]
            for copy in copies:
                copy.result()
        return time.perf_counter() - begin

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        self._origin.close()
        self._to.close()


def _mapping(path: Path, nbytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        path.unlink()
        os.posix_fallocate(fd, 0, nbytes)
        return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(fd)


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
