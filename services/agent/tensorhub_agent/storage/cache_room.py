"""Where an agent keeps a copy of a retained version: in memory while its limit allows it, then on its disk. Pure.

The log knows one number, the room in all; which of the two a copy takes is the agent's business, because only it sees
its disk. A copy that fits into neither is given up with a reason, and the log places it elsewhere.
"""

from dataclasses import dataclass
from enum import StrEnum


class Where(StrEnum):
    """What a copy stands on."""

    MEMORY = "memory"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """Bytes of copies on either: the limits, or what is taken."""

    memory_bytes: int
    disk_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both together, which is what the log is told."""
        return self.memory_bytes + self.disk_bytes


def candidates(nbytes: int, limits: CacheRoom, taken: CacheRoom) -> tuple[Where, ...]:
    """Return where a copy of so many bytes may be tried, the best first."""
    left = (
        (Where.MEMORY, limits.memory_bytes - taken.memory_bytes),
        (Where.DISK, limits.disk_bytes - taken.disk_bytes),
    )
    return tuple(where for where, room in left if room >= nbytes)


def no_room(nbytes: int, limits: CacheRoom, taken: CacheRoom) -> str:
    """Say why there is no candidate, and what to do."""
    return (
        f"a copy of {nbytes} bytes fits neither into memory ({taken.memory_bytes} of {limits.memory_bytes} bytes are "
        f"taken) nor onto the disk ({taken.disk_bytes} of {limits.disk_bytes}): raise TENSORHUB_CACHE_BYTES or "
        "TENSORHUB_CACHE_DISK_BYTES"
    )
