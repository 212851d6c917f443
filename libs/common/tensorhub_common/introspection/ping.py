"""Whether a process of the hub lives, by its id: each answers `subjects.ping(id)` once it is ready to serve.

Registries and planners fold logs, and answer `subjects.folders()` too: so an upgrade can check which releases fold a
job.
"""

import asyncio
import contextlib
import os
import sys
from typing import Final

import msgspec

from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.bus.errors import NoAnswer, NoBus, NoResponder
from tensorhub_common.bus.message import Message
from tensorhub_common.bus.request_server import RequestService
from tensorhub_common.config.settings import load
from tensorhub_common.errors import TensorHubError
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.log.commands import PROTOCOL
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL
from tensorhub_common.protocol.queries import Pong
from tensorhub_common.protocol.subjects import check_name
from tensorhub_common.protocol.subjects import log_followers as folders_subject
from tensorhub_common.protocol.subjects import ping as ping_subject
from tensorhub_common.runtime.release import release

PING_TIMEOUT_S: Final = 1.0
FOLDERS_S_MAX: Final = 2.0
"""A registry or planner that has not answered within this is left out."""
QUIET_S: Final = 0.3
"""After so long without another answer, all have answered."""
FOLDERS_MAX: Final = 1_000
CONNECT_S_MAX: Final = 2.0
"""Of a health check, which has 5 s for all of it (docker-compose.yml): by then it must have said what is wrong."""


async def answer_pings(bus: Bus, process: str, role: str) -> RequestService:
    """Answer the pings of this process from now on; to be called once it is ready to serve."""
    pong = _pong(process, role)

    async def answer(_: Message) -> bytes:
        return pong

    return await bus.serve(ping_subject(process), answer)


async def answer_follower_survey(bus: Bus, process: str, role: str) -> RequestService:
    """Answer who asks which registries and planners there are, from before this one folds its first entry."""
    pong = _pong(process, role, NEWEST_LEVEL)

    async def answer(_: Message) -> bytes:
        return pong

    return await bus.serve(folders_subject(), answer)


def _pong(process: str, role: str, level: int = 0) -> bytes:
    pong = Pong(id=process, role=role, pid=os.getpid(), protocol=PROTOCOL, release=release(), level=level)
    return msgspec.json.encode(pong)


async def survey_log_followers(bus: Bus, timeout_s: float = FOLDERS_S_MAX) -> list[Pong]:
    """Return what every registry and planner says of itself, by their names; those that are quiet are left out.

    A release before levels does not answer. Raises `NoBus` without a connection.
    """
    inbox, found, came = bus.new_inbox(), dict[str, Pong](), asyncio.Event()

    def take(message: Message) -> None:
        with contextlib.suppress(*MALFORMED):
            pong = msgspec.json.decode(message.data, type=Pong)
            if len(found) < FOLDERS_MAX:
                found[pong.id] = pong
        came.set()

    subscription = await bus.subscribe(inbox, take)
    try:
        await bus.publish(folders_subject(), reply=inbox)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    came.clear()
                    async with asyncio.timeout(QUIET_S if found else timeout_s):
                        await came.wait()
    finally:
        await subscription.close()
    return [found[name] for name in sorted(found)]


async def ping(bus: Bus, process: str, timeout_s: float = PING_TIMEOUT_S) -> Pong | None:
    """Return what the process says of itself, or None when it doesn't answer."""
    try:
        return msgspec.json.decode(await bus.request(ping_subject(process), b"", timeout_s), type=Pong)
    except (NoBus, NoAnswer, NoResponder, *MALFORMED):
        return None


async def is_known(bus: Bus, process: str) -> bool:
    """Tell whether NATS has a connection of the process, which may be stopped, or too busy to answer."""
    try:
        await bus.request(ping_subject(process), b"", PING_TIMEOUT_S)
    except NoResponder:
        return False
    except NoAnswer:
        pass
    return True


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
    # Health checks: `python -m tensorhub_common.introspection.ping agent-0` ends with 0 once that process serves.
    if len(sys.argv) != 2:  # noqa: PLR2004 (the program and one argument)
        sys.exit("name one process, as in: python -m tensorhub_common.introspection.ping registry-0")
    sys.exit(asyncio.run(_main(sys.argv[1])))
