"""Copies of retained versions on the agent's disk: each a safetensors file that is mapped as any segment is.

The file is filled under a temporary name, brought to the disk once it is whole, and renamed then, so a file under its
name can be read with any safetensors library. Its manifest, with its digests, is beside it.

Invariants:
- A name promises nothing, nor does a manifest: what is found is believed once its bytes hash to the root that the log
  knows. So it does not matter at which moment an agent or its host has died.
- Every byte of a file is reserved before it is mapped, so a full disk is `MemoryExhausted`, never SIGBUS. A file that
  the disk can't give back is found out by reading it, before anybody touches its mapping.
"""

import json
import mmap
import os
from pathlib import Path
from typing import Any, Final

from tensorhub_agent.storage.segments import MANIFEST_SUFFIX, ForeignSegment, Segment, SegmentStore, whole_pages
from tensorhub_common.errors import LayoutMismatch, MemoryExhausted
from tensorhub_common.layout.layout import Layout, placements, segment_bytes

FOLDER: Final = "copies"
"""Of an agent's state folder."""

PREFIX: Final = "copy-"
HEAD_BYTES_MAX: Final = 100_000_000
"""The format's own limit on what describes the tensors."""

READ_BYTES: Final = 4 * 1024 * 1024

_LENGTH_BYTES: Final = 8

_DTYPES: Final = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}
"""The format's names. Other dtypes are written as bytes, and the metadata tells what they are."""


class DiskSegmentStore(SegmentStore):
    """The files of one agent's copies. `create` reserves disk and touches none of it."""

    suffix = ".safetensors"
    unsettled = ".part"

    @classmethod
    def in_state(cls, state_dir: Path, bytes_max: int) -> "DiskSegmentStore | None":
        """Return the store in an agent's state folder; None when it may take nothing in, and nothing is left there."""
        folder = state_dir / FOLDER
        if bytes_max:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return cls(folder, PREFIX, bytes_max) if folder.is_dir() else None

    def head_of(self, layout: Layout) -> bytes:
        """Return what describes the tensors, in whole pages. Raises `LayoutMismatch` over the format's limit."""
        text = json.dumps(described(layout), separators=(",", ":"), ensure_ascii=False).encode()
        whole = whole_pages(_LENGTH_BYTES + len(text))
        if whole > HEAD_BYTES_MAX:
            raise LayoutMismatch(
                f"what describes its tensors takes {len(text)} bytes, more than safetensors files hold"
            )
        text = text.ljust(whole - _LENGTH_BYTES)
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text

    def check_head(self, segment: Segment, layout: Layout) -> None:
        """Raise `ForeignSegment` when the file does not begin as one with this layout does."""
        if os.pread(segment.fd, segment.origin, 0) != self.head_of(layout):
            raise ForeignSegment(f"{segment.path} does not begin as a file of its tensors does")

    def _refuse(self, nbytes: int, total_bytes: int, bytes_max: int) -> MemoryExhausted:
        return MemoryExhausted(
            f"a copy of {nbytes} bytes does not fit: this agent's copies on disk take {total_bytes} of at most "
            f"{bytes_max} bytes; raise TENSORHUB_CACHE_DISK_BYTES or retain fewer versions"
        )

    def make_durable(self, segment: Segment) -> None:
        """Bring a whole file and its manifest to the disk, and give it its name. Raises `OSError`; may take long."""
        with self._lock:
            if segment.name not in self._segments:
                return
            fd = os.dup(segment.fd)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        _sync(self.shm_dir / f"{segment.name}{MANIFEST_SUFFIX}")
        with self._lock:
            # It may have been let go while the disk was busy.
            part = self.shm_dir / f"{segment.name}{self.unsettled}"
            if segment.name in self._segments and part.exists():
                part.replace(segment.path)
        _sync(self.shm_dir)

    def _populate(self, view: memoryview) -> None:
        """Leave pages to come in when they are written: the disk has as many as memory has not."""

    def _origin_of(self, fd: int, nbytes: int) -> int:
        head = int.from_bytes(os.pread(fd, _LENGTH_BYTES, 0), "little") + _LENGTH_BYTES
        if head >= nbytes or head % mmap.PAGESIZE:
            raise ForeignSegment("its file does not begin as a safetensors file of this agent does; remove it")
        _read_all(fd, nbytes)
        return head

    def _exhausted(self, nbytes: int, why: str) -> MemoryExhausted:
        about = os.statvfs(self.shm_dir)
        return MemoryExhausted(
            f"a copy of {nbytes} bytes does not fit into {self.shm_dir} ({why}): the disk has "
            f"{about.f_bavail * about.f_frsize} bytes free; make room there, or lower TENSORHUB_CACHE_DISK_BYTES"
        )


def described(layout: Layout) -> dict[str, Any]:
    """Return the head as the format has it. What no tensor covers is named too, since it wants no byte left out."""
    names = {entry.name for entry in layout.tensors} | {"__metadata__"}
    metadata = {"format": "pt"}
    head: dict[str, Any] = {"__metadata__": metadata}
    end = 0

    def cover(begin: int, stop: int) -> None:
        if begin < stop:
            gap = _free_name(f"_gap.{begin}", names)
            head[gap] = {"dtype": "U8", "shape": [stop - begin], "data_offsets": [begin, stop]}

    for entry, begin in zip(layout.tensors, placements(layout), strict=True):
        cover(end, begin)
        end = begin + entry.nbytes
        name = entry.name if entry.name != "__metadata__" else _free_name(entry.name, names)
        dtype, itemsize = _DTYPES.get(entry.dtype, ("", 0))
        if itemsize == entry.itemsize:
            shape = list(entry.shape)
        else:
            metadata[f"dtype of {name}"] = f"{entry.dtype} {list(entry.shape)}"
            dtype, shape = "U8", [entry.nbytes]
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    cover(end, whole_pages(segment_bytes(layout)))
    return head


def _free_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _read_all(fd: int, nbytes: int) -> None:
    """Read a file to its end: what the disk can't give back is an error here, and a signal in a mapping."""
    scratch = bytearray(min(READ_BYTES, nbytes))
    try:
        for at in range(0, nbytes, READ_BYTES):
            os.preadv(fd, [scratch], at)
    except OSError as why:
        raise ForeignSegment(f"its file can't be read ({why.strerror}): look at the disk") from why


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
