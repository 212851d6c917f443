"""What finished spans cost this process: processor time, counted where it is spent.

All of it is spent after those who waited have been answered, so no latency shows it. Always true: counting is one
reading of the thread's clock before and after some stories or one batch, never one for each span.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

NS_PER_S: Final = 1_000_000_000


class CpuAccount:
    """The processor time of several threads together."""

    def __init__(self) -> None:
        """Begin with none."""
        self._ns = 0
        self._adding = threading.Lock()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Add what this thread uses within. It must not be entered again within itself."""
        began_ns = time.thread_time_ns()
        try:
            yield
        finally:
            with self._adding:
                self._ns += time.thread_time_ns() - began_ns

    @property
    def spent_s(self) -> float:
        """What was used up to now, in s."""
        return self._ns / NS_PER_S


SPAN_CPU: Final = CpuAccount()
"""Of this process's finished spans: to be made, handed over, and kept. An exporter's own thread is not among it."""
