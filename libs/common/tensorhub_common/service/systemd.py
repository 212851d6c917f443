"""What a service tells the service manager that started it: that it is ready, that it lives, that it ends.

The manager is systemd, or whatever speaks its notify protocol: one datagram of `KEY=value` lines to the socket that
`NOTIFY_SOCKET` names. A library for that would be longer than this module.

Always true: the sign of life is given by the event loop that serves, so a loop that hangs gives none and the manager
ends the process; without a manager nothing is sent; a manager that is gone or busy never holds a service up.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Final

from tensorhub_common.runtime.supervision import Supervisor

US_PER_S: Final = 1e6
SIGNS_PER_WINDOW: Final = 2
"""So often within the manager's window a sign of life is given, as its manual asks for."""


class ServiceManager:
    """The way to the manager that the environment names, if there is one."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self.window_s = _window_s(environ)
        """Without a sign of life for so long, the manager ends this process. None: it doesn't watch."""

    def tell(self, *lines: str) -> None:
        """Send lines such as `READY=1`, together and without waiting."""
        if not self._address.startswith(("/", "@")):
            return
        # Linux's abstract sockets begin with a zero byte, which an environment can't hold.
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
            to.setblocking(False)  # noqa: FBT003 (the library's own form)
            to.sendto("\n".join(lines).encode(), address)

    async def give_signs(self) -> None:
        """Give signs of life until cancelled; return at once where no watchdog is set."""
        while self.window_s is not None:
            self.tell("WATCHDOG=1")
            await asyncio.sleep(self.window_s / SIGNS_PER_WINDOW)


@asynccontextmanager
async def serving(status: str, environ: Mapping[str, str] = os.environ) -> AsyncGenerator[None, None]:
    """Tell that this process is ready, give signs of life within, and tell at the end that it stops.

    `status` is one line for people: `systemctl status` shows it.
    """
    manager = ServiceManager(environ)
    manager.tell("READY=1", f"STATUS={status}")
    # Without its signs the manager would take the process for stuck, so a fault here ends it.
    work = Supervisor("the service manager's watchdog")
    work.start(manager.give_signs(), "giving signs of life")
    try:
        yield
    finally:
        manager.tell("STOPPING=1", "STATUS=stopping")
        await work.close()


def _window_s(environ: Mapping[str, str]) -> float | None:
    """Read how long the manager waits for a sign of this process. What it says to another process is not for us."""
    text, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not text.isdecimal() or int(text) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(text) / US_PER_S
