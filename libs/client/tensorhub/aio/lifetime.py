"""The end of a hub object that is dropped without `close`, and work in threads beside the event loop.

The connections of a dropped hub object end, and its shards stay with the agent, as they do when a process ends. A
program that makes hub objects in a loop must not run out of threads and descriptors. Garbage is collected in any
thread, so the remaining work is handed to the hub's own event loop, and no thread waits for it.

`shielded_in_thread` runs work that may take long, beside the event loop.
"""

import asyncio
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NoReturn, Protocol, SupportsIndex, TypeVar

from tensorhub_common.errors import TensorHubError


class NotCopyable:
    """What belongs to one process and its connection: a copy of it would be no object that works."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled."""
        raise TypeError(
            f"{self!r} can't be copied or sent to another process, for it is a connection of this one: call "
            "tensorhub.connect() where it is wanted"
        )


class Leaving(Protocol):
    """What a hub object holds that must end with it."""

    async def close(self) -> None:
        """End it."""


class Closable(Leaving, Protocol):
    """The connection to the agent, which can also be ended where no event loop runs any more."""

    def drop(self) -> None:
        """Close the socket."""


_tasks: Final[set["asyncio.Task[None]"]] = set()
"""The event loop alone would not keep them."""


async def leave(session: Closable, registry: Leaving) -> None:
    """End the connections, and leave the shards with the agent. What is closed already stays so."""
    with suppress(TensorHubError, OSError):
        await session.close()
    with suppress(TensorHubError, OSError):
        await registry.close()


def leave_when_dropped(hub: object, session: Closable, registry: Leaving) -> Callable[[], object]:
    """End a hub's connections once nothing refers to the hub any more; return what calls this off.

    Called in the event loop that the hub belongs to.
    """
    loop = asyncio.get_running_loop()
    finalizer = weakref.finalize(hub, _leave_soon, os.getpid(), loop, session, registry)
    finalizer.atexit = False
    return finalizer.detach


def _leave_soon(pid: int, loop: asyncio.AbstractEventLoop, session: Closable, registry: Leaving) -> None:
    if os.getpid() != pid:
        # The parent's; what this child had of the socket it has closed.
        return

    def begin() -> None:
        task = loop.create_task(leave(session, registry))
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)

    try:
        loop.call_soon_threadsafe(begin)
    except RuntimeError:
        session.drop()


Result = TypeVar("Result")


async def shielded_in_thread(work: Callable[[], Result]) -> Result:
    """Do what may take long in a thread. When cancelled, wait for its end all the same: it looks at memory."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
