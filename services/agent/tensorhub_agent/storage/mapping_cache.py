"""Mappings of other agents' segments, kept so that the next read of a segment pays nothing for them.

Mapping 1 GiB, touching it for the first time and unmapping it costs half of what copying it does. A segment is known by
its name and inode, so one that was made anew under a name is another one.

Invariants:
- Nothing is unmapped while a session uses it.
- At most `mappings_max` unused mappings are kept, the last used ones.
- A segment that its owner has removed is not kept alive by an unused mapping for longer than until the next `sweep`.
"""

import asyncio
import contextlib
import mmap
import os
import stat
from dataclasses import dataclass
from typing import Final

from tensorhub_agent.devices.pinnable_mapping import PinnableMapping
from tensorhub_agent.devices.region import DeviceRegion
from tensorhub_agent.storage.device_segments import imported
from tensorhub_agent.storage.segments import ForeignSegment
from tensorhub_common.devices.device import DeviceMemory
from tensorhub_common.runtime.supervision import Supervisor

MAPPINGS_MAX: Final = 32

MappingKey = tuple[str, int, int]


@dataclass(slots=True)
class Mapping:
    """A segment of another agent, mapped for reading only."""

    key: MappingKey
    view: memoryview
    users: int
    _memory: mmap.mmap
    _fd: int

    def is_stale(self) -> bool:
        """Tell whether the owner has removed the segment."""
        return os.fstat(self._fd).st_nlink == 0

    def unmap(self) -> None:
        """Let go of the memory. It takes about 15 ms a GiB."""
        with contextlib.suppress(BufferError):  # A view that is still in use keeps it alive, safely.
            self.view.release()
            self._memory.close()
        os.close(self._fd)


@dataclass(slots=True)
class DeviceMapping:
    """A segment of another agent in the memory of a GPU, mapped for reading only."""

    key: MappingKey
    view: DeviceRegion
    users: int
    _memory: DeviceMemory

    def is_stale(self) -> bool:
        """Keep none that is unused: nothing tells whether the owner has removed the segment."""
        return True

    def unmap(self) -> None:
        """Let go of the memory."""
        self._memory.close()


class MappingCache:
    """All mappings of one agent, the least recently used first."""

    def __init__(self, mappings_max: int = MAPPINGS_MAX) -> None:
        """Keep at most `mappings_max` unused ones."""
        self._mappings_max = mappings_max
        self._mappings: dict[MappingKey, Mapping | DeviceMapping] = {}
        # What can't be unmapped stays mapped, which costs memory and nothing else.
        self._work = Supervisor("mappings of other agents' segments", on_fault=lambda _: None)

    def __len__(self) -> int:
        """Return how many mappings there are, used or not."""
        return len(self._mappings)

    def acquire(self, name: str, fd: int, nbytes: int, origin: int = 0) -> Mapping:
        """Map the segment behind a descriptor, which is taken over. Raises `ForeignSegment` when it is none.

        `origin` is where in the file the segment begins.
        """
        try:
            about = os.fstat(fd)
            key = (name, about.st_dev, about.st_ino)
            known = self._mappings.pop(key, None)
            if not isinstance(known, Mapping):
                _check(name, about, nbytes, origin)
                # Not populated: a read touches what it wants, and does so on all cores.
                memory = PinnableMapping(fd, about.st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ).prepare()
                known = Mapping(key, memoryview(memory)[origin:], 0, memory, fd)
                fd = -1
        except (OSError, ValueError) as why:
            raise ForeignSegment(f"segment {name} can't be mapped: {why}") from why
        finally:
            if fd >= 0:
                os.close(fd)
        known.users += 1
        self._mappings[key] = known
        return known

    def acquire_any(self, name: str, fd: int, nbytes: int, origin: int, device: str) -> Mapping | DeviceMapping:
        """Map a segment in the host's memory, or of the GPU with a UUID. Raises `ForeignSegment`, `DeviceError`."""
        if device:
            return self._acquire_device(name, fd, nbytes, device)
        return self.acquire(name, fd, nbytes, origin)

    def _acquire_device(self, name: str, fd: int, nbytes: int, uuid: str) -> DeviceMapping:
        key = (name, 0, 0)
        try:
            known = self._mappings.pop(key, None)
            if not isinstance(known, DeviceMapping):
                view, memory = imported(uuid, fd, nbytes)
                known = DeviceMapping(key, view, 0, memory)
        finally:
            os.close(fd)
        known.users += 1
        self._mappings[key] = known
        return known

    def release(self, mapping: Mapping | DeviceMapping) -> None:
        """A session needs the mapping no more."""
        mapping.users -= 1
        self.sweep()

    def sweep(self) -> None:
        """Unmap what is unused and will stay so: removed segments, and the least recently used above the bound."""
        unused = [mapping for mapping in self._mappings.values() if not mapping.users]
        surplus = len(unused) - self._mappings_max
        for number, mapping in enumerate(unused):
            if number < surplus or mapping.is_stale():
                del self._mappings[mapping.key]
                # In a thread, because unmapping a large segment would hold up the event loop.
                self._work.start(asyncio.to_thread(mapping.unmap), "unmapping")

    def close(self) -> None:
        """Unmap all that is unused."""
        for mapping in [mapping for mapping in self._mappings.values() if not mapping.users]:
            del self._mappings[mapping.key]
            mapping.unmap()


def _check(name: str, about: os.stat_result, nbytes: int, origin: int) -> None:
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
        raise ForeignSegment(f"what came as segment {name} is no file of this user")
    # A mapping that is longer than its file would be SIGBUS. Segments never shrink, so once is enough.
    if nbytes <= 0 or not 0 <= origin <= about.st_size - nbytes:
        raise ForeignSegment(f"segment {name} has {about.st_size} bytes, and its agent says {nbytes} from {origin}")
