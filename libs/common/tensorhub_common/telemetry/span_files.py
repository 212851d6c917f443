"""Finished spans on disk: two generations of JSON lines in a directory of one process.

New lines are appended to `spans.jsonl`; when it is full it takes the place of `spans.1.jsonl`, and begins anew. So what
is kept is always the newest, survives a restart, and has a bound.

Always true:
- A process that was killed in the middle of a line costs that line alone: it is skipped, and the next one begins on a
  line of its own.
- Two processes that were given the same directory append whole lines in turn. Neither waits for the other's lock.
- Reading never fails because of what is in the files, and locks no writer out.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.spans import ANSWER_BYTES_MAX, FinishedSpan

NEW: Final = "spans.jsonl"
OLD: Final = "spans.1.jsonl"
MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700

SPAN_BYTES_MAX: Final = 32 * 1024
"""A longer line is not kept: some attribute in it is no attribute."""

_END: Final = b"\n"
_decode: Final = msgspec.json.Decoder(FinishedSpan).decode


class SpanFiles:
    """The files in one directory. `append` and `newest` may be called from any thread."""

    def __init__(self, directory: Path, bytes_max: int) -> None:
        """Keep at most `bytes_max` bytes, in two generations of half of it each. Nothing is made before `append`."""
        self.directory = directory
        self._generation_bytes_max = bytes_max // 2

    def append(self, spans: Iterable[bytes]) -> int | None:
        """Write spans, each a line of JSON without its end, and return how many were too long to be kept.

        None when the files are locked: try again later.

        Raises OSError when there is no room, or the directory can't be written.
        """
        lines = list(spans)
        longest = min(SPAN_BYTES_MAX, self._generation_bytes_max) - len(_END)
        fitting = [line for line in lines if len(line) <= longest]
        self.directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        locked = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for chunk in self._chunks(fitting):
                    self._append(chunk)
                return len(lines) - len(fitting)
            return None
        finally:
            os.close(locked)

    def _chunks(self, lines: list[bytes]) -> Iterator[bytes]:
        """Put lines together to what fits into one generation."""
        chunk: list[bytes] = []
        nbytes = 0
        for line in lines:
            if chunk and nbytes + len(line) + len(_END) > self._generation_bytes_max:
                yield _END.join(chunk) + _END
                chunk, nbytes = [], 0
            chunk.append(line)
            nbytes += len(line) + len(_END)
        if chunk:
            yield _END.join(chunk) + _END

    def _append(self, chunk: bytes) -> None:
        path = self.directory / NEW
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)
        try:
            size = os.fstat(fd).st_size
            if size and size + len(chunk) + len(_END) > self._generation_bytes_max:
                os.close(fd)
                fd = -1
                path.replace(self.directory / OLD)
                fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)
                size = 0
            if size and os.pread(fd, 1, size - 1) != _END:
                # The last writer was killed, or found the disk full, in the middle of its line.
                chunk = _END + chunk
            view = memoryview(chunk)
            while view:
                view = view[os.write(fd, view) :]
        finally:
            if fd >= 0:
                os.close(fd)

    def newest(
        self, about: bytes, wanted: Callable[[FinishedSpan], bool], count_max: int
    ) -> tuple[list[FinishedSpan], int]:
        """Return the wanted spans whose lines hold `about`, newest first, and how many more there are.

        They are cut to `count_max`, and to the bytes of one answer. Looking for `about` before decoding is what makes
        this fast: a few milliseconds for a full store.
        """
        found: list[FinishedSpan] = []
        left_out, nbytes = 0, 0
        for line in self._lines_newest_first():
            if about not in line:
                continue
            span = _read(line)
            if span is None or not wanted(span):
                continue
            nbytes += len(line)
            if len(found) < count_max and nbytes <= ANSWER_BYTES_MAX:
                found.append(span)
            else:
                left_out += 1
        return found, left_out

    def _lines_newest_first(self) -> Iterator[bytes]:
        for name in (NEW, OLD):
            try:
                lines = (self.directory / name).read_bytes().split(_END)
            except OSError:
                continue
            yield from reversed(lines)


def _read(line: bytes) -> FinishedSpan | None:
    """Return the span of a line; None for a torn one, or one of another version of this program."""
    try:
        return _decode(line)
    except MALFORMED:
        return None
