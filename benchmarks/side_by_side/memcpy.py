"""The physical limit: plain memcpy of as many bytes between two regions of the arena, by one thread and by two."""

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Self

from benchmarks.side_by_side.arena import Arena

_memcpy: Final = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = None


class Memcpy:
    """The copies. `with` ends its threads."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._threads = ThreadPoolExecutor(2)
        self.run(1)

    def run(self, threads: int) -> float:
        """Copy all once, with one thread or two, and return the seconds."""
        origin, to, nbytes = self._arena.source.address, self._arena.destination(0).address, self._arena.nbytes
        part = nbytes // threads
        begin = time.perf_counter()
        if threads == 1:
            _memcpy(to, origin, nbytes)
        else:
            copies = [self._threads.submit(_memcpy, to + n * part, origin + n * part, part) for n in range(threads)]
            for copy in copies:
                copy.result()
        return time.perf_counter() - begin

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
