"""The tensors of a staged shard show one of its two memories; those of a mapped shard show a holder's memory.

A read of a `Staged` shard fills the memory that the tensors do not show. The swap then moves every tensor to the other
memory. The objects stay the same (parameters, buffers and the values of `shard.tensors`) and only the memory behind
them changes, so nothing is copied, and some hundred tensors take less than a millisecond. If readers map the memory of
a version that is unpublished, the agent copies it into the other memory, and the tensors are there from then on.

The tensors of a `Mapped` shard show the memory of a holder on this host and can't be written. Nothing is copied. The
agent hands over a read-only descriptor whose open file description carries a shared lock. The mapping keeps that
description, so the lock is held exactly as long as the memory is mapped: by this process, also after the end of its
agents, and by children that it forks. While the lock is held, the holder overwrites nothing there. A holder that has to
wait says so by a lock of its own, and an engine that can do without weights for a moment lets go of them.

Of a GPU's memory the lock has a descriptor of its own, which this process keeps until it has unmapped the memory
(device_memory.py). Before the first read, and after it has let go, the tensors are zeros in memory of the host: as much
of the GPU's would be what mapping is to save.

Invariants:
- All tensors of a staged shard show one memory, except in the moment of the swap. The agent may write the other one. So
  a view, a numpy array or a pointer that a caller took from a tensor before the swap shows the old version until the
  next read begins, and after that bytes that change.
- All tensors of a mapped shard show one version, except in the moment of the swap. A view, a numpy array or a tensor's
  storage that a caller keeps of an older version keeps that version's mapping, and with it the lock.
- A write to a mapped shard is SIGSEGV; on a GPU it is a fault, after which the process can't use that GPU any more.
"""

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from tensorhub._tensors.description import bind, rebind
from tensorhub._tensors.segment_mapping import map_readonly, map_segment, populate, private_memory, tensors_at
from tensorhub_common.runtime import segment_locks

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from tensorhub._tensors.description import Description


class Registration(Protocol):
    """How a shard was registered."""

    @property
    def device(self) -> str: ...


class RegisteredShard(Protocol):
    """What these need of a shard that the agent has registered."""

    @property
    def spec(self) -> Registration: ...

    fd: int | None
    spare_fd: int | None
    live: int
    found: int | None
    version: int | None

    @property
    def segments(self) -> tuple[int, int]: ...

    @property
    def lent(self) -> tuple[tuple[int, ...], int] | None: ...

    def take_lent(self) -> tuple[tuple[int, ...], int] | None: ...


class Staged:
    """`shown` is which segment `tensors` are in."""

    def __init__(self, described: "Description", attachment: "RegisteredShard") -> None:
        """Map both segments of a shard that was just registered, and bind what was described to the live one."""
        assert attachment.fd is not None
        assert attachment.spare_fd is not None
        layout = described.layout
        first, second = attachment.segments
        # An unpublish within `register` may have moved the shard to the other one.
        fds = attachment.fd, attachment.spare_fd
        live_fd, spare_fd = fds if attachment.live == first else reversed(fds)
        device = attachment.spec.device
        live, spare = map_segment(live_fd, layout, device), map_segment(spare_fd, layout, device)
        # Now, while no caller waits: the first forward pass after a swap would pay for it.
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
        """Whether the shard is in memory that the tensors do not show yet."""
        return self.shown != self._attachment.live

    def show(self) -> None:
        """Let the tensors show the shard's present memory."""
        with self._swapping:
            if self.is_due:
                self.shown = self._attachment.live
                rebind(self._described, self.tensors, self._standing[self.shown])
            self._version = self._attachment.version


class Mapped:
    """The tensors of one mapped shard, and what they show. Before the first read that is private memory."""

    def __init__(self, described: "Description", attachment: "RegisteredShard") -> None:
        """Bind what was described to memory of this process alone, which the first swap replaces."""
        self._attachment = attachment
        self._layout = described.layout
        self.tensors = bind(described, private_memory(described.layout))
        self.version: int | None = None
        self.has_let_go = False
        """Whether the tensors show nothing since they showed a version."""
        self._described = described.without_values()
        self._swapping = threading.Lock()
        self._shown_fd: int | None = None
        """The segment that is shown, by a description that has no lock."""
        self._close_shown: Callable[[], object] = lambda: None

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
            fds, version = lent
            try:
                memory = map_readonly(fds, self._layout, self._attachment.spec.device)
                rebind(self._described, self.tensors, tensors_at(self._layout, memory))
                self.version, self.has_let_go = version, False
                self._watch(fds[-1])
            finally:
                for fd in fds:
                    os.close(fd)

    def _watch(self, fd: int) -> None:
        """Keep a description without a lock of what has it. Without a descriptor to spare it is not asked back."""
        self._close_shown()
        self._shown_fd, self._close_shown = None, lambda: None
        with suppress(OSError):
            shown_fd = segment_locks.reopened(fd, os.O_RDONLY)
            self._shown_fd, self._close_shown = shown_fd, weakref.finalize(self, os.close, shown_fd)

    @property
    def is_asked_back(self) -> bool:
        """Whether the holder of what is shown waits until no process maps it."""
        with self._swapping:
            return self._shown_fd is not None and segment_locks.is_asked_back(self._shown_fd)

    def let_go(self) -> None:
        """Let the tensors show zeros in private memory, as before the first read."""
        with self._swapping:
            if self.version is None:
                return
            rebind(self._described, self.tensors, tensors_at(self._layout, private_memory(self._layout)))
            self._close_shown()
            self.version, self.has_let_go, self._shown_fd = None, True, None
