"""A mapped shard: its tensors show the memory of a holder on this host, and can't be written.

Nothing is copied. The agent hands over a read-only descriptor whose open file description carries a shared lock; the
mapping keeps that description, so the lock is held exactly as long as the memory is mapped: by this process, whatever
becomes of its agents, and by children that it forks. While it is held the holder overwrites nothing there.

Always true: all tensors show one version, but for the moment of the swap; what a caller keeps of an older one (a view,
a numpy array, the tensor's storage) keeps that version's mapping, and with it the lock. A write is SIGSEGV.
"""

import os
import threading
from typing import TYPE_CHECKING

from tensorhub._tensors.description import bind, stand
from tensorhub._tensors.segment_mapping import map_readonly, private_memory, tensors_at

if TYPE_CHECKING:
    from tensorhub._agent.shards import Attachment
    from tensorhub._tensors.description import Described


class Mapped:
    """The tensors of one mapped shard, and what they show. Before the first read that is private memory."""

    def __init__(self, described: "Described", attachment: "Attachment") -> None:
        """Let what was described stand in memory of this process alone, which goes at the first swap."""
        self._attachment = attachment
        self._layout = described.layout
        self.tensors = bind(described, private_memory(described.layout))
        self.version: int | None = None
        self._described = described.without_values()
        self._swapping = threading.Lock()

    @property
    def is_due(self) -> bool:
        """Whether a read has brought what the tensors do not show yet."""
        return self._attachment.lent is not None

    def show(self) -> None:
        """Let the tensors show what the last read has brought."""
        with self._swapping:
            lent = self._attachment.take_lent()
            if lent is None:
                return
            fd, version = lent
            try:
                memory = map_readonly(fd, self._layout)
            finally:
                os.close(fd)
            stand(self._described, self.tensors, tensors_at(self._layout, memory))
            self.version = version
