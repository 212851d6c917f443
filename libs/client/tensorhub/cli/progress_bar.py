"""How far a copy or a read is: a bar with GB/s and the time left on a terminal, a plain line now and then elsewhere.

It goes to stderr, so that stdout holds the result alone. Always true: `to` may be called as often as one likes.
"""

import sys
import time
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from tensorhub.cli.output import size

LINE_EVERY_S: Final = 5.0


class _Speed(ProgressColumn):
    """Gigabytes a second."""

    def render(self, task: Task) -> Text:
        """Return the speed of the last moments."""
        speed = task.finished_speed or task.speed
        return Text("  -  GB/s" if speed is None else f"{speed / 1e9:5.2f} GB/s")


class Bar:
    """Progress of one thing."""

    def __init__(self, what: str, total_bytes: int = 0) -> None:
        self._what = what
        self._total = total_bytes
        self._said_at = time.monotonic()
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"))
            console = Console(stderr=True)
            self._progress = Progress(*columns, _Speed(), TimeRemainingColumn(), console=console, transient=True)
            self._task = self._progress.add_task(what, total=total_bytes or None)

    def to(self, done_bytes: int, total_bytes: int) -> None:
        """Say how far it is."""
        self._total = total_bytes
        if self._progress is not None:
            self._progress.update(self._task, completed=done_bytes, total=total_bytes)
        elif time.monotonic() - self._said_at >= LINE_EVERY_S:
            self._said_at = time.monotonic()
            sys.stderr.write(f"{self._what}: {size(done_bytes)} of {size(total_bytes)}\n")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
