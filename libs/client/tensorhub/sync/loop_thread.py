"""The event loop behind the sync SDK: one daemon thread for each hub object.

Always true: a call from any thread returns what its coroutine returned, or raises; Ctrl-C ends the waiting at once;
the end of the interpreter waits for no call and for at most `END_S`; a child of `fork`, which has no such thread, gets
an error that says to connect again. An object without references ends its thread as `stop` does.
"""

import asyncio
import atexit
import concurrent.futures
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

# It registers its end with the interpreter, which is to come after the end that is registered here.
import tensorhub._agent.call_spans  # noqa: F401
from tensorhub._agent.process_end import at_child_end
from tensorhub.errors import closed_error
from tensorhub_common.errors import AgentUnavailable

END_S: Final = 1.0

Result = TypeVar("Result")


class LoopThread:
    """A thread that runs an event loop until `stop`."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._leaves: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._loop = asyncio.new_event_loop()
        self._ending = threading.Lock()
        self._ended = False
        self._exiting = False
        # The thread knows the loop alone, so that an object without references is collected, and ends it.
        self._thread = threading.Thread(target=_serve, args=(self._loop,), name="tensorhub", daemon=True)
        self._thread.start()
        _running.add(self)
        at_child_end(_stop_all, order=1)
        weakref.finalize(self, _end_soon, self._pid, self._loop, self._leaves, self._thread).atexit = False

    @property
    def is_ended(self) -> bool:
        """Whether `stop` was called."""
        return self._ended

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child of the one that made the thread, which it then lacks."""
        return os.getpid() != self._pid

    def before_its_end(self, leave: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have this done in the loop where nothing refers to this object any more, and `stop` was not called."""
        self._leaves.append(leave)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine to its end and return its result. Interrupted, it is cancelled and not waited for."""
        try:
            future = self._submit_from_here(work)
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

    def _submit_from_here(self, work: Coroutine[Any, Any, Result]) -> "concurrent.futures.Future[Result]":
        """Submit with the streams that are current in this thread, once a shard is on a GPU."""
        streams = sys.modules.get("tensorhub._tensors.streams")
        if streams is None:
            return self._submit(work)
        # A task takes over the context variables of the thread that has submitted it.
        token = streams.capture()
        try:
            return self._submit(work)
        finally:
            streams.release(token)

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
        """End the loop and its tasks. Calls that wait raise that the hub is closed."""
        if self.is_forked or threading.current_thread() is self._thread:
            # In a child, the lock may have been copied while a thread held it that does not exist there. A callback in
            # the loop's own thread can't end what it runs in, and `run` has raised for it.
            return
        with self._ending:
            if self._ended:
                return
            self._ended = True
            self._leaves.clear()
            asyncio.run_coroutine_threadsafe(_cancel_all(self._loop), self._loop)
        self._thread.join(END_S)

    def stop_at_exit(self) -> None:
        """End the loop with the interpreter: threads that still wait get no error, and end as daemon threads do."""
        self._exiting = True
        self.stop()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=END_S)
    await loop.shutdown_asyncgens()
    loop.stop()


def _end_soon(
    pid: int,
    loop: asyncio.AbstractEventLoop,
    leaves: list[Callable[[], Coroutine[Any, Any, None]]],
    thread: threading.Thread,
) -> None:
    """End the loop of an object that was dropped: in the loop's own thread, for garbage is collected in any."""
    if os.getpid() != pid or loop.is_closed():
        return

    async def end() -> None:
        for leave in leaves:
            await leave()
        await _cancel_all(loop)

    ending = end()
    try:
        asyncio.run_coroutine_threadsafe(ending, loop)
        _ending.add(thread)
    except RuntimeError:
        ending.close()


_running: "weakref.WeakSet[LoopThread]" = weakref.WeakSet()

_ending: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()
"""Threads of objects that were dropped: a program that ends with the function which had its hub waits for them."""


@atexit.register
def _stop_all() -> None:
    for background in list(_running):
        background.stop_at_exit()
    until = time.monotonic() + END_S
    for thread in list(_ending):
        thread.join(max(until - time.monotonic(), 0.0))
