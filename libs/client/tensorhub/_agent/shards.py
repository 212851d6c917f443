"""One shard of this process as its agent knows it: where it belongs, its memory, what it holds, and what became of it.

Always true: `handle` is set exactly while the present connection to the agent has registered the shard; `segment` and
`spare` never change once a caller's tensors stand in one of them, because an attachment whose memory was replaced is
`lost`. A mapped shard has no segment of its own, and shows that of a holder, which no agent can take away.
"""

import os
import threading
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from tensorhub_common.errors import TensorHubError
from tensorhub_common.protocol.worker import ReadReport, RegisterCall


class Key(NamedTuple):
    """Names a shard within a job."""

    model: str
    replica: str
    shard: int


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a shard belongs and what it looks like. `layout` is a Layout as zstd-compressed MessagePack."""

    model: str
    replica: str
    shard: int
    shards: int
    spot: bool
    layout: bytes
    install: str = "in-place"

    @property
    def key(self) -> Key:
        """Return the shard's name."""
        return Key(self.model, self.replica, self.shard)

    @property
    def where(self) -> str:
        """Name the shard in a sentence."""
        return f"shard {self.shard} of {self.model}/{self.replica}"

    @property
    def is_mapped(self) -> bool:
        """Whether it shows the memory of others."""
        return self.install == "mapped"

    def call(self, number: int, timeout_s: float) -> RegisterCall:
        """Return the frame that registers the shard."""
        return RegisterCall(call=number, timeout_s=timeout_s, **{name: getattr(self, name) for name in _FIELDS})


_FIELDS = Place.__struct_fields__

Segment = tuple[int, int]
"""Device and inode: what tells a segment from all others while somebody has it open or mapped."""


@dataclass(slots=True, eq=False)
class Attachment:
    """The session changes it as the agent speaks; a shard reads it."""

    place: Place
    claimed: bool = True
    """A caller has it, or is about to. Without one, the next who registers the same shard takes it over."""
    registering: bool = True
    handle: int | None = None
    fd: int | None = None
    segment: Segment | None = None
    spare_fd: int | None = None
    spare: Segment | None = None
    """The other segment of a staged shard."""
    live: int = 0
    """The inode of the one in which the shard stands, as the agent said last."""
    lent: tuple[int, int] | None = None
    """What a mapped shard is to show next: a descriptor of its holder's segment, and the version there."""
    fresh: bool = False
    found: int | None = None
    """The version that stood ready in the memory when it was registered last, unless it was emptied since."""
    version: int | None = None
    report: ReadReport | None = None
    traceparent: str | None = None
    """The span that the last answer belongs to."""
    load_untold: bool = False
    """The values are in the memory, and the agent has not yet answered anything that it was told after that."""
    busy: bool = False
    releasing: bool = False
    delayed: TensorHubError | None = None
    """Why it could not be brought back yet, while that is tried again."""
    lost: TensorHubError | None = None
    _lending: threading.Lock = field(default_factory=threading.Lock)
    """The agent lends in the event loop's thread, and a shard takes in its caller's."""

    def close_fd(self) -> None:
        """Close the segments' descriptors, if they are still open."""
        fds, self.fd, self.spare_fd = (self.fd, self.spare_fd), None, None
        for fd in fds:
            if fd is not None:
                os.close(fd)

    def lend(self, lent: tuple[int, int] | None) -> None:
        """Take what a mapped shard is to show next, in place of what was not shown yet."""
        with self._lending:
            old, self.lent = self.lent, lent
        if old is not None:
            os.close(old[0])

    def take_lent(self) -> tuple[int, int] | None:
        """Return what a mapped shard is to show now; the descriptor is the caller's to close."""
        with self._lending:
            lent, self.lent = self.lent, None
        return lent

    @property
    def segments(self) -> tuple[int, int]:
        """Return the inodes of a staged shard's two segments."""
        assert self.segment is not None
        assert self.spare is not None
        return self.segment[1], self.spare[1]


def segment_of(fd: int | None) -> Segment | None:
    """Return which segment a descriptor belongs to; a shard without a byte may have none."""
    if fd is None:
        return None
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
