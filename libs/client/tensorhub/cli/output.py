"""What commands print: columns for people, one JSON object a line for programs."""

import os
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tensorhub_common.errors import TensorHubError

_KIB = 1024


def json_line(value: object) -> None:
    """Print one object, at once: the reader of a pipe waits for it."""
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


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Collection[str] = (),
    optional: Collection[str] = (),
) -> None:
    """Print a table: on a terminal as wide as that is, elsewhere plain, so that it may go through grep and awk.

    None and the empty text are shown as "-". Columns in `right` hold numbers; those in `optional` are left out on a
    terminal where they are empty.
    """
    cells = [list(row) for row in rows]
    if not sys.stdout.isatty():
        _columns(head, cells)
        return
    shown = [
        number
        for number, name in enumerate(head)
        if name not in optional or any(_is_there(row[number]) for row in cells)
    ]
    drawn = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for number in shown:
        last = number == shown[-1]
        drawn.add_column(
            head[number],
            justify="right" if head[number] in right else "left",
            no_wrap=not last,
            overflow="fold" if last else "ellipsis",
        )
    for row in cells:
        drawn.add_row(*(_cell(row[number]) for number in shown))
    _print(drawn)


def paragraph(text: str, style: str) -> None:
    """Print a sentence: on a terminal in a style, and folded between words."""
    if sys.stdout.isatty():
        _print(Text(text, style=style))
    else:
        line(text)


def _print(drawn: RenderableType) -> None:
    console = Console(highlight=False)
    with console.capture() as capture:
        console.print(drawn)
    for each in capture.get().splitlines():
        line(each.rstrip())


def _columns(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table without borders, as wide as it needs to be."""
    plain = [list(head), *([str(_cell(cell)) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in plain) for column in range(len(head))]
    for row in plain:
        line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _is_there(value: object) -> bool:
    return value is not None and value != ""


def _cell(value: object) -> Text:
    if isinstance(value, Text):
        return value
    return Text(str(value) if _is_there(value) else "-")


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
