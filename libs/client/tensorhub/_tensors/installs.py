"""The two memories of a staged shard, and the tensors that show one of them.

A read fills the memory that the tensors do not show. The swap then lets every tensor stand in the other one: objects
stay what they were (parameters, buffers and the values of `shard.tensors`), only what stands behind them changes, so
nothing is copied, and some hundred tensors take less than a millisecond. Where readers map the memory of a version that
is unpublished, the agent copies it into the other one, and the tensors stand there from then on.

Always true: all tensors show one memory, but for the moment of the swap; the other one may be written by the agent. So
what a caller has taken from a tensor that outlives the swap (a view, a numpy array, a pointer) shows the old version
until the next read begins, and then bytes that change.
"""

import threading
from typing import TYPE_CHECKING

from tensorhub._tensors.description import bind, stand
from tensorhub._tensors.segment_mapping import map_segment, populate, tensors_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from tensorhub._agent.shards import Attachment
    from tensorhub._tensors.description import Described


class Staged:
    """`shown` is the inode of the segment that `tensors` stand in."""

    def __init__(self, described: "Described", attachment: "Attachment") -> None:
        """Map both segments of a shard that was just registered, and let what was described stand in the live one."""
        assert attachment.fd is not None
        assert attachment.spare_fd is not None
        layout = described.layout
        first, second = attachment.segments
        # An unpublish within `register` may have moved the shard to the other one.
        fds = attachment.fd, attachment.spare_fd
        live_fd, spare_fd = fds if attachment.live == first else reversed(fds)
        live, spare = map_segment(live_fd, layout), map_segment(spare_fd, layout)
        # Now, while nobody waits: the first forward pass after a swap would pay for it.
        populate(spare)
        self._attachment = attachment
        self.shown = attachment.live
        self.tensors = bind(described, live, memory_wins=attachment.found is not None)
        self._version = attachment.version
        self._described = described.without_values()
        other = second if attachment.live == first else first
        self._standing = {self.shown: tensors_at(layout, live), other: tensors_at(layout, spare)}
        self._homes = {inode: self._described.shown(standing) for inode, standing in self._standing.items()}
        self._swapping = threading.Lock()

    def home(self) -> "Mapping[str, torch.Tensor]":
        """Return the tensors, by every name, as they lie in the memory that is shown."""
        return self._homes[self.shown]

    @property
    def version(self) -> int | None:
        """What the tensors show."""
        return self._version if self.is_due else self._attachment.version

    @property
    def is_due(self) -> bool:
        """Whether the shard stands in the memory that the tensors do not show."""
        return self.shown != self._attachment.live

    def show(self) -> None:
        """Let the tensors show the memory in which the shard stands now."""
        with self._swapping:
            if self.is_due:
                self.shown = self._attachment.live
                stand(self._described, self.tensors, self._standing[self.shown])
            self._version = self._attachment.version
