"""Work that nobody waits for, in the threads of the copy pool: it begins only when no job has a turn there.

Always true: `over` is done only when no thread does the work any more, so what it reads may change or go from then on;
by then the chore keeps nothing of what the work reads.
"""

import asyncio
import contextlib
from collections.abc import Callable


class Chore:
    """One such work. `CopyPool.background` has it done."""

    def __init__(self, work: Callable[[], None], others: Callable[[], bool]) -> None:
        """Prepare; `others` tells whether jobs have turns."""
        self._loop = asyncio.get_running_loop()
        self._work: Callable[[], None] | None = work
        self._others = others
        self._stopped = False
        self._failure: Exception | None = None
        self.over: asyncio.Future[None] = self._loop.create_future()

    def stop(self) -> None:
        """Don't begin any more."""
        self._stopped = True

    def run_task(self, _: object) -> bool:
        """Do the work, in a thread of the pool. True: jobs have turns, so it wants another one behind them."""
        if not self._stopped and self._others():
            return True
        work, self._work = self._work, None
        try:
            if not self._stopped and work is not None:
                work()
        except Exception as why:  # noqa: BLE001 (whatever it is, the waiting task must hear it)
            self._failure = why
        del work
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            self._loop.call_soon_threadsafe(self._tell)
        return False

    def _tell(self) -> None:
        if self.over.done():
            return
        if self._failure is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(self._failure)
