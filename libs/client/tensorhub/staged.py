"""The two memories of a staged shard, and the tensors that show one of them.

A read fills the memory that the tensors do not show. The swap then lets every tensor stand in the other one: objects
stay what they were (parameters, buffers and the values of `shard.tensors`), only what stands behind them changes, so
nothing is copied, and some hundred tensors take less than a millisecond.

Always true: all tensors show one memory, but for the moment of the swap; the other one may be written by the agent. So
what a caller has taken from a tensor that outlives the swap (a view, a numpy array, a pointer) shows the old version
until the next read begins, and then bytes that change.
"""

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from tensorhub.memory import map_segment, populate, tensors_at
from tensorhub.module import adopt
from tensorhub.tensors import bind

if TYPE_CHECKING:
    from tensorhub.attachment import Attachment
    from tensorhub.tensors import Described


class Staged:
    """`shown` is the inode of the segment that `tensors` stand in."""

    def __init__(self, described: "Described", attachment: "Attachment") -> None:
        """Map both segments of a shard that was just registered, and let what was described stand in the live one."""
        assert attachment.fd is not None
        assert attachment.spare_fd is not None
        layout = described.layout
        live, spare = map_segment(attachment.fd, layout), map_segment(attachment.spare_fd, layout)
        # Now, while nobody waits: the first forward pass after a swap would pay for it.
        populate(spare)
        self.shown = attachment.live
        self.tensors = bind(described, live, memory_wins=attachment.version is not None)
        self.version = attachment.version
        self._names, self._members = described.names, described.members
        first, second = attachment.segments
        other = second if attachment.live == first else first
        self._standing = {self.shown: tensors_at(layout, live), other: tensors_at(layout, spare)}
        self._swapping = threading.Lock()

    def show(self, segment: int, version: int | None) -> None:
        """Let the tensors show this segment, which holds this version now."""
        with self._swapping:
            if segment != self.shown:
                self._swap(self._standing[segment])
                self.shown = segment
            self.version = version

    def _swap(self, standing: Mapping[str, torch.Tensor]) -> None:
        with torch.inference_mode(mode=False), torch.no_grad():
            adopt(self._members, standing)
            for name, tensor in self.tensors.items():
                tensor.data = standing[self._names[name]]
