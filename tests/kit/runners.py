"""Runners that can be cut off from NATS, hear what is long past, or come back at once when they are killed.

    python -m tests.kit.runners KIND[+KIND]

- `cuttable`: between the runner and NATS is a process of its own, the only child of the runner's. While that is stopped
  the runner is cut off; once it is woken, what was said meanwhile arrives.
- `echoing`: each assign and abort comes a second time, ECHO_S later.
- `respawning`: the runner is the only child of this process. When it dies another one begins within milliseconds, as
  everything is imported already.

Of the tests over processes this file alone knows the runner's inner names.
"""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Final
from urllib.parse import urlsplit

from tensorhub.local.tether import PR_SET_PDEATHSIG

CHUNK_BYTES: Final = 1 << 16

OnMessage = Callable[..., Awaitable[bytes]]


def _dies_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _cuttable() -> None:
    reader, writer = os.pipe()
    nats = urlsplit(os.environ["TENSORHUB_NATS"])
    if not os.fork():
        _dies_with_parent()
        os.close(reader)
        asyncio.run(_relay(nats.hostname or "", nats.port or 0, writer))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        os.environ["TENSORHUB_NATS"] = f"nats://127.0.0.1:{int(told.read())}"


async def _relay(host: str, port: int, told: int) -> None:
    """Relay connections to NATS; say on `told` at which port."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(CHUNK_BYTES):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_nats, to_nats = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, to_nats), copy(from_nats, writer))

    server = await asyncio.start_server(on_connection, "127.0.0.1")
    os.write(told, str(server.sockets[0].getsockname()[1]).encode())
    os.close(told)
    await server.serve_forever()


def _echoing() -> None:
    from tensorhub_runner.app.leader_link import LeaderLink  # noqa: PLC0415 (a relay that forks first needs it not)

    wait_s = float(os.environ["ECHO_S"])

    def echoing(works: OnMessage) -> OnMessage:
        async def twice(self: LeaderLink, message: object) -> bytes:
            async def again() -> None:
                await asyncio.sleep(wait_s)
                await works(self, message)

            self._work.start(again(), "hearing it again")
            return await works(self, message)

        return twice

    LeaderLink._on_assign = echoing(LeaderLink._on_assign)  # type: ignore[assignment, method-assign]
    LeaderLink._on_abort = echoing(LeaderLink._on_abort)  # type: ignore[assignment, method-assign]


def _respawning() -> None:
    """Return in each runner; this process ends when it is told to."""
    import torch  # noqa: F401, PLC0415 (the runners find it imported)

    import tensorhub_runner.app.main  # noqa: F401, PLC0415

    is_ending = False
    child = 0

    def end(*_: object) -> None:
        nonlocal is_ending
        is_ending = True
        if child:
            os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    while not is_ending:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _dies_with_parent()
            return
        os.waitpid(child, 0)
    os._exit(0)


KINDS: Final[dict[str, Callable[[], None]]] = {
    "cuttable": _cuttable,
    "echoing": _echoing,
    "respawning": _respawning,
}

if __name__ == "__main__":
    # The runner reads its own command line. What forks comes first.
    for kind in sorted(sys.argv.pop(1).split("+")):
        KINDS[kind]()
    from tensorhub_runner.app.main import main

    main()
