"""Segments: named shared memory with the tensors of shards.

A segment is a file in a memory file system, so it outlives the worker that writes it and the agent that owns it, and
any process of the host that is handed its descriptor can map it. The agent alone creates and removes segments.

Invariants:
- Every byte of a segment is reserved before anybody maps it, so a full file system is `MemoryExhausted`, never SIGBUS.
- A segment never shrinks. Removing it takes away its name only: a process that has it mapped keeps valid memory.
- Who is lent a segment to map it holds a lock on it until the mapping is gone; what is lent must not be written.
- A failed `create` leaves no file, no mapping and no byte on the account behind.
- What was set aside counts on the account, and is removed by `remove_aside` alone.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from tensorhub_agent.devices.pinnable_mapping import PinnableMapping
from tensorhub_agent.storage.byte_account import ByteAccount
from tensorhub_common.config.segment_names import segment_beginning
from tensorhub_common.config.settings import InvalidSetting
from tensorhub_common.errors import MemoryExhausted, TensorHubError
from tensorhub_common.layout.layout import Layout
from tensorhub_common.protocol.subjects import check_name
from tensorhub_common.runtime import segment_locks

SEGMENT_MODE: Final = 0o600
SEGMENT_SUFFIX: Final = ".seg"
MANIFEST_SUFFIX: Final = ".json"
TEMPORARY_SUFFIX: Final = ".tmp"
RANDOM_BYTES: Final = 4

RESERVE_STEP_BYTES: Final = 256 * 1024 * 1024
"""Memory is reserved in steps: a signal undoes one step of `fallocate`, not the whole of a segment of many GiB."""

MEMORY_SPARED_BYTES: Final = 256 * 1024 * 1024
"""So much of the machine's memory is left to others, because reserving the last page wakes the kernel's OOM killer."""

SHARE_OF_FILE_SYSTEM: Final = 0.8

_MADV_POPULATE_WRITE: Final = 23
_MEMINFO: Final = Path("/proc/meminfo")
_MOUNTINFO: Final = Path("/proc/self/mountinfo")
_NOT_SUPPORTED: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.EPERM})
_FULL: Final = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG})
_PASSING: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EINTR, errno.EACCES})
"""What keeps a file from being opened and says nothing of its contents."""

# ctypes lets go of the GIL; `mmap` with MAP_POPULATE and `mmap.madvise` of CPython 3.11 do not, and so they would stop
# the whole agent, its beat too, for about a second a GiB.
_libc: Final = ctypes.CDLL(None, use_errno=True)
_madvise: Final = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise.restype = ctypes.c_int


class ForeignSegment(TensorHubError):
    """A file that should be a segment is not one of ours."""


class SegmentBusy(TensorHubError):
    """A file that may well be a segment of ours can't be opened now."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One region of agent-owned memory. `nbytes` is what is allocated: whole pages, and at least one.

    `path` is the file, now or later; `origin` is where in the file its bytes begin.
    """

    name: str
    path: Path
    nbytes: int
    fd: int
    view: memoryview
    """All of the segment, writable. It keeps the mapping alive, also after the segment was removed."""
    origin: int = 0

    @property
    def file_bytes(self) -> int:
        """What its file takes."""
        return self.origin + self.nbytes

    device: ClassVar[str] = ""
    """It is the host's memory."""
    told: ClassVar[int] = 0
    """A worker reads off the descriptor which segment it is."""

    @property
    def inode(self) -> int:
        """What a worker tells it from others by."""
        return os.fstat(self.fd).st_ino

    def open_writable(self, *, keeps: bool = False) -> tuple[int, ...]:  # noqa: ARG002 (a GPU's may be)
        """Return a new descriptor that may write, for the worker that owns the shard. The caller closes it."""
        return (segment_locks.reopened(self.fd, os.O_RDWR),)

    def open_readonly(self) -> int:
        """Return a new descriptor that can't be mapped writable, for readers. The caller closes it."""
        return segment_locks.reopened(self.fd, os.O_RDONLY)

    def open_lent(self) -> tuple[int, ...]:
        """Return a new read-only descriptor for a worker that maps the segment. The caller closes it.

        Its open file description holds a shared lock, which goes with the description wherever that goes: to other
        processes, and into mappings, which keep it when all descriptors are closed. So `is_lent` is true until the last
        process that maps it has unmapped it or has ended, however, and whatever agents were restarted meanwhile.
        What is lent is published, so it is not waited for: a fill that was given up may have asked for it.
        """
        self.ask_back(is_wanted=False)
        return (segment_locks.lent(self.fd),)

    def is_lent(self) -> bool:
        """Tell whether anybody has a descriptor of `open_lent`, or a mapping of it."""
        return segment_locks.is_lent(self.fd)

    def ask_back(self, *, is_wanted: bool) -> None:
        """Have processes that map it see that it is to be written, or is no more. Some kernels can't."""
        with contextlib.suppress(OSError):
            segment_locks.ask_back(self.fd, is_wanted=is_wanted)


def segment_prefix(hub: str, agent: str) -> str:
    """Return how the names of an agent's segments begin. `hub` has no '-', so that no two agents share a beginning."""
    check_name("agent", agent)
    if "-" in check_name("hub", hub):
        raise ValueError(f"the hub's id {hub!r} has a '-'")
    return f"tensorhub-{hub}-{agent}-"


class SegmentStore:
    """All segments of one agent. Its methods may be called from any thread; `create` takes about 0.6 s a GiB."""

    suffix: str = SEGMENT_SUFFIX
    unsettled: str = ""
    """The suffix of a segment's file for as long as only the agent is to believe it."""

    def __init__(self, shm_dir: Path, prefix: str, bytes_max: int) -> None:
        """Keep segments named `prefix…` in `shm_dir`, at most `bytes_max` bytes of them together."""
        self.shm_dir = shm_dir
        self.prefix = prefix
        self.account = ByteAccount(bytes_max, self._refuse)
        self._ours = re.compile(re.escape(prefix) + rf"[0-9a-f]{{{2 * RANDOM_BYTES}}}" + re.escape(self.suffix))
        self._segments: dict[str, Segment] = {}
        self._aside: dict[str, int] = {}
        """The bytes of files that are left where they are, by the segment's name."""
        self._lock = threading.Lock()

    @classmethod
    def of(cls, shm_dir: Path, hub_dir: Path, agent: str, bytes_max: int) -> "SegmentStore":
        """Return the store of one agent of the hub that keeps its state in `hub_dir`.

        `bytes_max` 0 means `SHARE_OF_FILE_SYSTEM` of the memory file system. Raises `InvalidSetting`.
        """
        check_name("agent", agent)
        if not os.access(shm_dir, os.W_OK | os.X_OK) or not shm_dir.is_dir():
            raise InvalidSetting(
                f"TENSORHUB_SHM_DIR={str(shm_dir)!r} is no folder that can be written, for example "
                "TENSORHUB_SHM_DIR=/dev/shm"
            )
        if not bytes_max:
            about = os.statvfs(shm_dir)
            bytes_max = int(about.f_blocks * about.f_frsize * SHARE_OF_FILE_SYSTEM)
        return cls(shm_dir, f"{segment_beginning(hub_dir)}{agent}-", bytes_max)

    def head_of(self, layout: Layout) -> bytes:  # noqa: ARG002 (what a file on a disk begins with)
        """Return what the file of a segment with this layout begins with, in whole pages."""
        return b""

    def check_head(self, segment: Segment, layout: Layout) -> None:
        """Raise `ForeignSegment` when the file does not begin as one with this layout does."""

    def create(self, nbytes: int, head: bytes = b"") -> Segment:
        """Make a segment of at least `nbytes` zero bytes, populated, behind a head. Raises `MemoryExhausted`."""
        whole = whole_pages(nbytes)
        with self.account.charged(len(head) + whole):
            name = f"{self.prefix}{secrets.token_hex(RANDOM_BYTES)}{self.suffix}"
            path = self.shm_dir / f"{name}{self.unsettled}"
            with self._full_is_exhausted(len(head) + whole), _removed_on_error(path):
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, SEGMENT_MODE)
                with _closed_on_error(fd):
                    self._reserve(fd, len(head) + whole)
                    view = _map(fd, len(head) + whole)
                    view[: len(head)] = head
                    view = view[len(head) :]
                    self._populate(view)
        segment = Segment(name, self.shm_dir / name, whole, fd, view, len(head))
        with self._lock:
            self._segments[name] = segment
        return segment

    def open(self, name: str) -> Segment:
        """Take over a segment that an earlier run of this agent left.

        It counts on the account but is not refused for the limit: it may have a version's last copy.
        Raises `ForeignSegment` when the file is not a segment of this agent, and `SegmentBusy` or `MemoryExhausted`
        when it may be one that can't be had now.
        """
        if self._ours.fullmatch(name) is None:
            raise ForeignSegment(f"{name!r} is not named like a segment of this agent; leave it to its owner")
        with self._lock:
            if name in self._segments:
                return self._segments[name]
        path = self.shm_dir / name
        if self.unsettled and not path.exists():
            path = self.shm_dir / f"{name}{self.unsettled}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as why:
            if why.errno in _PASSING:
                raise SegmentBusy(f"segment {path} can't be opened just now ({why.strerror})") from why
            raise ForeignSegment(f"segment {path} can't be opened ({why.strerror}); remove it") from why
        with _closed_on_error(fd):
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
                raise ForeignSegment(f"{path} is not a file that only this user may open; remove it")
            if about.st_size == 0 or about.st_size != whole_pages(about.st_size):
                raise ForeignSegment(f"{path} has {about.st_size} bytes, which are not whole pages; remove it")
            origin = self._origin_of(fd, about.st_size)
            with self._full_is_exhausted(about.st_size):
                # A run that was killed while it reserved may have left holes; filling them now keeps SIGBUS out.
                self._reserve(fd, about.st_size)
                view = _map(fd, about.st_size)[origin:]
        segment = Segment(name, self.shm_dir / name, about.st_size - origin, fd, view, origin)
        with self._lock:
            self._segments[name] = segment
            self.account.add(segment.file_bytes)
        return segment

    def remove(self, segment: Segment) -> None:
        """Take a segment's name away and close its descriptor. What is mapped stays valid; once more is harmless."""
        with self._lock:
            if self._segments.pop(segment.name, None) is None:
                return
            self.account.take_off(segment.file_bytes)
            for ending in {"", self.unsettled}:
                segment.path.with_name(segment.name + ending).unlink(missing_ok=True)
            os.close(segment.fd)

    def let_go(self, segment: Segment) -> None:
        """Close a segment's descriptor and leave its file where it is."""
        with self._lock:
            if self._segments.pop(segment.name, None) is not None:
                self.account.take_off(segment.file_bytes)
                os.close(segment.fd)

    def set_aside(self, name: str) -> None:
        """Leave a segment's file that an earlier run left, with its manifest, where it is."""
        nbytes = 0
        for ending in {"", self.unsettled}:
            with contextlib.suppress(OSError):
                nbytes = (self.shm_dir / f"{name}{ending}").stat().st_size
        with self._lock:
            if name not in self._aside:
                self._aside[name] = nbytes
                self.account.add(nbytes)

    def remove_aside(self, name: str) -> None:
        """Remove the file of a segment that was set aside."""
        with self._lock:
            self.account.take_off(self._aside.pop(name, 0))
        for ending in {"", self.unsettled}:
            (self.shm_dir / f"{name}{ending}").unlink(missing_ok=True)

    def close(self) -> None:
        """Close all descriptors and leave the segments where they are, for the next run to adopt."""
        with self._lock:
            left, self._segments, self._aside = self._segments, {}, {}
            self.account.clear()
        for segment in left.values():
            os.close(segment.fd)

    def held(self, name: str) -> bool:
        """Tell whether the segment was created, opened or set aside here and not removed."""
        return name in self._segments or name in self._aside

    def stray(self) -> list[str]:
        """Return this agent's files that belong to no segment in use: segments, manifests and temporary files."""
        suffixes = [MANIFEST_SUFFIX + TEMPORARY_SUFFIX, MANIFEST_SUFFIX] + [self.unsettled] * bool(self.unsettled)
        found = []
        with os.scandir(self.shm_dir) as entries:
            names = sorted(entry.name for entry in entries if not entry.is_dir(follow_symlinks=False))
        for name in names:
            segment = next((name.removesuffix(end) for end in suffixes if name.endswith(end)), name)
            if self._ours.fullmatch(segment) is not None and not self.held(segment):
                found.append(name)
        return found

    def left(self) -> list[str]:
        """Return the names of the segments among `stray()`."""
        names = (name.removesuffix(self.unsettled) for name in self.stray())
        return sorted({name for name in names if name.endswith(self.suffix)})

    def remove_stray(self, name: str) -> None:
        """Remove one of `stray()`."""
        (self.shm_dir / name).unlink(missing_ok=True)

    def _refuse(self, nbytes: int, total_bytes: int, bytes_max: int) -> MemoryExhausted:
        """Return the error for what is over the limit."""
        return MemoryExhausted(
            f"a segment of {nbytes} bytes does not fit: this agent's segments take {total_bytes} of at most "
            f"{bytes_max} bytes; raise TENSORHUB_MEMORY_BYTES_MAX or release a shard"
        )

    def _origin_of(self, fd: int, nbytes: int) -> int:  # noqa: ARG002 (a file on a disk has a head)
        """Return where in a file that an earlier run left the bytes begin."""
        return 0

    def _populate(self, view: memoryview) -> None:
        _populate(view)

    def _reserve(self, fd: int, nbytes: int) -> None:
        """Reserve every byte; what is reserved already costs nothing."""
        missing = nbytes - os.fstat(fd).st_blocks * 512
        spare = _memory_spare(fd)
        if spare is not None and missing > max(0, spare):
            raise self._exhausted(nbytes, f"the machine has {max(0, spare)} bytes of memory to spare")
        for at in range(0, nbytes, RESERVE_STEP_BYTES):
            os.posix_fallocate(fd, at, min(RESERVE_STEP_BYTES, nbytes - at))

    @contextlib.contextmanager
    def _full_is_exhausted(self, nbytes: int) -> Iterator[None]:
        try:
            yield
        except OSError as why:
            if why.errno not in _FULL:
                raise
            raise self._exhausted(nbytes, os.strerror(why.errno or errno.ENOSPC)) from why

    def _exhausted(self, nbytes: int, why: str) -> MemoryExhausted:
        about = os.statvfs(self.shm_dir)
        return MemoryExhausted(
            f"a segment of {nbytes} bytes does not fit into {self.shm_dir} ({why}): it has "
            f"{about.f_bavail * about.f_frsize} of {about.f_blocks * about.f_frsize} bytes free; release a shard, "
            "remount it larger (containers: --shm-size), or use more shards on more hosts"
        )


def whole_pages(nbytes: int) -> int:
    """Return how many bytes the pages for `nbytes` take, one page at least."""
    return max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def _map(fd: int, nbytes: int) -> memoryview:
    access = mmap.PROT_READ | mmap.PROT_WRITE
    return memoryview(PinnableMapping(fd, nbytes, flags=mmap.MAP_SHARED, prot=access).prepare())


def _populate(view: memoryview) -> None:
    """Fault all pages in now, while no caller waits for a byte: MAP_POPULATE with the GIL free and errors told."""
    for at in range(0, len(view), RESERVE_STEP_BYTES):
        step = min(RESERVE_STEP_BYTES, len(view) - at)
        if _madvise(ctypes.addressof(ctypes.c_char.from_buffer(view, at)), step, _MADV_POPULATE_WRITE):
            code = ctypes.get_errno()
            if code in _NOT_SUPPORTED:  # Linux before 5.14: the pages are reserved and come in when touched.
                return
            raise OSError(code, os.strerror(code))


def _memory_spare(fd: int) -> int | None:
    """Return how many bytes of memory may still be taken, or None where the file is not in memory.

    A memory file system may be larger than the memory behind it; then the kernel kills processes instead of saying no.
    """
    device = os.fstat(fd).st_dev
    here = f"{os.major(device)}:{os.minor(device)}"
    mounts = (line.partition(" - ") for line in _MOUNTINFO.read_text().splitlines())
    if not any(mount.split()[2] == here and source.split()[0] == "tmpfs" for mount, _, source in mounts):
        return None
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 - MEMORY_SPARED_BYTES
    return None


@contextlib.contextmanager
def _removed_on_error(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _closed_on_error(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(fd)
        raise
