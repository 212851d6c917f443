"""How far the runs are: a bar on a terminal, a line now and then elsewhere, on stderr."""

import sys
import threading
import time
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LINE_EVERY_S: Final = 10.0


class Bar:
    """Progress of many runs. `done` may be called from any thread."""

    def __init__(self, what: str, total: int) -> None:
        """Begin with none done."""
        self._what, self._total, self._done = what, total, 0
        self._lock = threading.Lock()
        self._said_at = time.monotonic()
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task(what, total=total)

    def done(self) -> None:
        """One more has ended."""
        with self._lock:
            self._done += 1
            if self._progress is not None:
                self._progress.update(self._task, completed=self._done)
            elif time.monotonic() - self._said_at >= LINE_EVERY_S:
                self._said_at = time.monotonic()
                sys.stderr.write(f"{self._what}: {self._done} of {self._total}\n")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
