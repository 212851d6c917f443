"""The event loop behind the sync SDK: one daemon thread for each hub object.

Always true: a call from any thread returns what its coroutine returned, or raises; Ctrl-C ends the waiting at once;
the end of the interpreter waits for no call and for at most `END_S`; a child of `fork`, which has no such thread, is
told to connect again instead of waiting for ever.
"""

import asyncio
import atexit
import concurrent.futures
import os
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from tensorhub.link import closed_error
from tensorhub_common.errors import AgentUnavailable

END_S: Final = 1.0

Result = TypeVar("Result")


class Background:
    """A thread that runs an event loop until `stop`."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._ending = threading.Lock()
        self._ended = False
        self._exiting = False
        self._thread = threading.Thread(target=self._serve, name="tensorhub", daemon=True)
        self._thread.start()
        _running.add(self)

    @property
    def is_ended(self) -> bool:
        """Whether `stop` was called."""
        return self._ended

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child of the one that made the thread, which it then lacks."""
        return os.getpid() != self._pid

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine to its end and return its result. Interrupted, it is cancelled and not waited for."""
        try:
            future = self._submit(work)
        except BaseException:
            work.close()
            self._end_silently_at_exit()
            raise
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            self._end_silently_at_exit()
            raise closed_error() from None
        except BaseException:
            self._end_silently_at_exit()
            future.cancel()
            raise

    def _end_silently_at_exit(self) -> None:
        """Let a daemon thread wait for its end, which is near: an error would only be a traceback on stderr."""
        if self._exiting and threading.current_thread().daemon:
            threading.Event().wait()

    def _submit(self, work: Coroutine[Any, Any, Result]) -> "concurrent.futures.Future[Result]":
        if self.is_forked:
            raise AgentUnavailable(
                "this process was forked off after connect(), and a connection can't be shared: call "
                "tensorhub.connect() again in the child"
            )
        if threading.current_thread() is self._thread:
            raise RuntimeError("a hub's own callback can't wait for the hub: hand the work to another thread")
        with self._ending:
            if self._ended:
                raise closed_error()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self) -> None:
        """End the loop and whatever runs in it. Calls that wait are told that the hub is closed."""
        if self.is_forked or threading.current_thread() is self._thread:
            # In a child, the lock may have been copied while a thread held it that does not exist there. A callback in
            # the loop's own thread can't end what it runs in, and `run` has told it so.
            return
        with self._ending:
            if self._ended:
                return
            self._ended = True
            asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
        self._thread.join(END_S)

    def stop_at_exit(self) -> None:
        """End the loop with the interpreter: threads that still wait are told nothing, and end as daemon threads do."""
        self._exiting = True
        self.stop()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=END_S)
        await self._loop.shutdown_asyncgens()
        self._loop.stop()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


_running: "weakref.WeakSet[Background]" = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for background in list(_running):
        background.stop_at_exit()
