"""How far something is: a bar with its speed and the time left on a terminal, a plain line now and then elsewhere.

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
    """Gigabytes a second, or what else is counted."""

    def __init__(self, counted: str) -> None:
        super().__init__()
        self._counted = counted

    def render(self, task: Task) -> Text:
        """Return the speed of the last moments."""
        speed = task.finished_speed or task.speed
        if self._counted:
            return Text("" if speed is None else f"{speed:,.0f} {self._counted}/s")
        return Text("  -  GB/s" if speed is None else f"{speed / 1e9:5.2f} GB/s")


class Bar:
    """Progress of one thing. What is counted is bytes, unless it has another name."""

    def __init__(self, what: str, total: int = 0, *, counted: str = "") -> None:
        self._what, self._counted = what, counted
        self._said_at = time.monotonic()
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"))
            console = Console(stderr=True)
            self._progress = Progress(*columns, _Speed(counted), TimeRemainingColumn(), console=console, transient=True)
            self._task = self._progress.add_task(what, total=total or None)

    def to(self, done: int, total: int) -> None:
        """Say how far it is."""
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=total)
        elif time.monotonic() - self._said_at >= LINE_EVERY_S:
            self._said_at = time.monotonic()
            of = f"{done} of {total} {self._counted}" if self._counted else f"{size(done)} of {size(total)}"
            sys.stderr.write(f"{self._what}: {of}\n")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
