"""What the segments of one store take together, and how much they may.

Invariant: what was charged for a segment that could not be made is taken off again.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

from tensorhub_common.errors import MemoryExhausted

Refuse = Callable[[int, int, int], MemoryExhausted]
"""Makes the error for so many bytes more, of which so many are taken and at most so many may be."""


class ByteAccount:
    """One store's. Its methods may be called from any thread."""

    def __init__(self, bytes_max: int, refuse: Refuse) -> None:
        """Begin with nothing taken."""
        self.bytes_max = bytes_max
        self.total_bytes = 0
        self._refuse = refuse
        self._lock = threading.Lock()

    def check_room(self, nbytes: int) -> None:
        """Raise `MemoryExhausted` when `nbytes` more are over the limit now."""
        if self.total_bytes + nbytes > self.bytes_max:
            raise self._refuse(nbytes, self.total_bytes, self.bytes_max)

    @contextlib.contextmanager
    def charged(self, nbytes: int) -> Iterator[None]:
        """Charge what the block makes. Raises `MemoryExhausted` before it."""
        with self._lock:
            self.check_room(nbytes)
            self.total_bytes += nbytes
        try:
            yield
        except BaseException:
            self.take_off(nbytes)
            raise

    def add(self, nbytes: int) -> None:
        """Count what is there already, also beyond the limit."""
        with self._lock:
            self.total_bytes += nbytes

    def take_off(self, nbytes: int) -> None:
        """Count it no longer."""
        self.add(-nbytes)

    def clear(self) -> None:
        """Count nothing any more."""
        with self._lock:
            self.total_bytes = 0
