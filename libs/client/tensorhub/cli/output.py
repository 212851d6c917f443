"""What commands print: columns for people, one JSON object a line for programs."""

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from tensorhub_common.errors import TensorHubError

_KIB = 1024


def json_line(value: object) -> None:
    """Print one object, at once: whoever reads a pipe waits for it."""
    line(msgspec.json.encode(value).decode())


def line(text: str) -> None:
    """Print one line, at once. Raises `TensorHubError` when it can't be written; who reads no further is no error."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        read_no_further()
        raise TensorHubError(f"what it says can't be written: {error.strerror}") from None


def read_no_further() -> None:
    """Let what is still to be written go nowhere: it would fail once more at the exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def columns(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table without borders, as wide as it needs to be: it may go through grep and awk."""
    table = [list(head), *([_cell(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row in table:
        line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _cell(value: object) -> str:
    return "-" if value is None or value == "" else str(value)


def readable(path: Path) -> str:
    """Return a path as JSON can have it: a name on disk may be any bytes."""
    return os.fsencode(path).decode(errors="replace")


def when(seconds: float) -> str:
    """Return a time since the epoch as people of this machine's time zone read it."""
    return datetime.fromtimestamp(seconds, tz=UTC).astimezone().isoformat(sep=" ", timespec="seconds")


def size(nbytes: float) -> str:
    """Return a number of bytes as people read it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < _KIB:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= _KIB
    return f"{nbytes:.1f} TiB"


def rate(nbytes: int, seconds: float) -> str:
    """Return how many bytes in how many seconds, and gigabytes a second."""
    return f"{size(nbytes)} in {seconds:.2f} s, {nbytes / 1e9 / max(seconds, 1e-9):.2f} GB/s"
