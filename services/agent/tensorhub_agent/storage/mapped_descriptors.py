"""Memory of holders that workers of this agent map: descriptors, between the holder and the worker.

Invariant: a descriptor carries its holder's lock, so it is kept here no longer than a read lasts; what is not handed
to a worker by then is closed.
"""

import os


class MappedDescriptors:
    """What one mapped shard's reads have taken: at most what is coming, and what was swapped in and not handed over."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._coming: int | None = None
        self._swapped: int | None = None

    def take(self, fd: int) -> None:
        """Take what a read has brought, in place of what it had brought before."""
        self.let_go()
        self._coming = fd

    def let_go(self) -> None:
        """Close what is coming: it is not wanted any more."""
        fd, self._coming = self._coming, None
        _close(fd)

    def swap(self) -> None:
        """What has come is what the shard holds from now on."""
        _close(self._swapped)
        self._coming, self._swapped = None, self._coming

    def hand_over(self) -> int | None:
        """Return what was swapped in, for the worker; it is the caller's to close."""
        fd, self._swapped = self._swapped, None
        return fd

    def close(self) -> None:
        """Close everything."""
        self.let_go()
        _close(self.hand_over())


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
