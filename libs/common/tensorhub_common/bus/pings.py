"""Whether a process of the hub lives, by its id: each answers `subjects.ping(id)`."""

import os
from typing import Final

import msgspec

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.failures import NoAnswer, NoBus, NoResponder
from tensorhub_common.bus.message import Message
from tensorhub_common.bus.subscription import Service
from tensorhub_common.subjects import ping as ping_subject
from tensorhub_common.wire.asks import Pong
from tensorhub_common.wire.commands import PROTOCOL

PING_TIMEOUT_S: Final = 1.0


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
    except (NoBus, NoAnswer, NoResponder, msgspec.MsgspecError):
        return None
