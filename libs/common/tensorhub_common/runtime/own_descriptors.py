"""File descriptors that a child of `fork` must not keep: memory or a lock would last as long as the child.

Children such as a data loader's workers have copies of all descriptors of their parent. What stands for as long as
somebody has a descriptor, as memory of a GPU and the locks on it do, would stay when the parent has let go of it.
"""

import os
import threading
import weakref
from collections.abc import Iterable


class OwnDescriptors:
    """Descriptors of this process alone: a child closes its copies as soon as it is forked."""

    def __init__(self, fds: Iterable[int]) -> None:
        """Take them over."""
        self._fds = tuple(fds)
        self._closing = threading.Lock()
        _all.add(self)

    @property
    def fds(self) -> tuple[int, ...]:
        """Return them; none once they are closed."""
        return self._fds

    def close(self) -> None:
        """Close them; once more is harmless."""
        with self._closing:
            fds, self._fds = self._fds, ()
        for fd in fds:
            os.close(fd)

    def forked(self) -> None:
        """Close the copies of a child, in which no other thread runs and a lock of the parent's may be taken."""
        self._closing = threading.Lock()
        self.close()


_all: "weakref.WeakSet[OwnDescriptors]" = weakref.WeakSet()


def _close_in_child() -> None:
    for each in list(_all):
        each.forked()


os.register_at_fork(after_in_child=_close_in_child)
