"""Whether a process of the hub lives, by its id: each answers `subjects.ping(id)` once it is ready to serve."""

import asyncio
import os
import sys
from typing import Final

import msgspec

from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.bus.failures import NoAnswer, NoBus, NoResponder
from tensorhub_common.bus.message import Message
from tensorhub_common.bus.subscription import Service
from tensorhub_common.errors import TensorHubError
from tensorhub_common.malformed import MALFORMED
from tensorhub_common.names import check_name
from tensorhub_common.settings import load
from tensorhub_common.subjects import ping as ping_subject
from tensorhub_common.wire.asks import Pong
from tensorhub_common.wire.commands import PROTOCOL

PING_TIMEOUT_S: Final = 1.0
CONNECT_S_MAX: Final = 2.0
"""Of a health check, which has 5 s for all of it (docker-compose.yml): by then it must have said what is wrong."""


async def answer_pings(bus: Bus, process: str, role: str) -> Service:
    """Answer the pings of this process from now on; to be called once it is ready to serve."""
    pong = msgspec.json.encode(Pong(id=process, role=role, pid=os.getpid(), protocol=PROTOCOL))

    async def answer(_: Message) -> bytes:
        return pong

    return await bus.serve(ping_subject(process), answer)


async def ping(bus: Bus, process: str, timeout_s: float = PING_TIMEOUT_S) -> Pong | None:
    """Return what the process says of itself, or None when it doesn't answer."""
    try:
        return msgspec.json.decode(await bus.request(ping_subject(process), b"", timeout_s), type=Pong)
    except (NoBus, NoAnswer, NoResponder, *MALFORMED):
        return None


async def _main(process: str) -> str | None:
    """Ping once and return what is wrong."""
    try:
        settings = load(os.environ)
        if settings.nats is None:
            return "TENSORHUB_NATS is not set: say where NATS is, as in TENSORHUB_NATS=nats://127.0.0.1:4222"
        bus = await connect(
            settings.nats,
            name=f"ping {process}",
            credentials=settings.credentials,
            tls=settings.tls,
            timeout_s=CONNECT_S_MAX,
        )
        async with bus:
            pong = await ping(bus, check_name("process", process))
    except TensorHubError as why:
        return str(why)
    return None if pong is not None else f"{process} does not answer within {PING_TIMEOUT_S:g} s: look into its log"


if __name__ == "__main__":
    # Health checks: `python -m tensorhub_common.bus.pings agent-0` ends with 0 once that process serves.
    if len(sys.argv) != 2:  # noqa: PLR2004 (the program and one argument)
        sys.exit("name one process, as in: python -m tensorhub_common.bus.pings registry-0")
    sys.exit(asyncio.run(_main(sys.argv[1])))
