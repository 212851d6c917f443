"""Memory of holders that workers of this agent map: descriptors, between the holder and the worker.

Invariant: a descriptor carries its holder's lock, so it is kept here no longer than a read lasts; what is not handed
to a worker by then is closed.
"""

import os

LentMemory = tuple[int, ...]
"""The descriptors of one memory. That of host memory carries the lock; of a GPU's memory the second one does."""


class MappedDescriptors:
    """What one mapped shard's reads have taken: at most what is coming, and what was swapped in and not handed over."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._coming: LentMemory = ()
        self._swapped: LentMemory = ()

    def take(self, fds: LentMemory) -> None:
        """Take what a read has brought, in place of what it had brought before."""
        self.let_go()
        self._coming = fds

    def let_go(self) -> None:
        """Close what is coming: it is not wanted any more."""
        fds, self._coming = self._coming, ()
        close_all(fds)

    def swap(self) -> None:
        """What has come is what the shard holds from now on."""
        close_all(self._swapped)
        self._coming, self._swapped = (), self._coming

    def hand_over(self) -> LentMemory:
        """Return what was swapped in, for the worker, or nothing; it is the caller's to close."""
        fds, self._swapped = self._swapped, ()
        return fds

    def close(self) -> None:
        """Close everything."""
        self.let_go()
        close_all(self.hand_over())


def close_all(fds: LentMemory) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)
