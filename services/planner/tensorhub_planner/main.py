"""`tensorhub-planner`: a planner as a process. Settings come from the environment; SIGTERM or SIGINT ends it.

Always true: it ends within two seconds of the signal, whatever NATS or a collector of traces do; and when it ends by
itself, it says in one line why and exits with 1 (2: it was started wrongly).
"""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from typing import Final

import uvloop

from tensorhub_common import telemetry
from tensorhub_common.bus.address import shown
from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.bus.traces import answer_traces
from tensorhub_common.errors import RegistryUnavailable, TensorHubError
from tensorhub_common.settings import InvalidSetting, Settings, load
from tensorhub_planner import metrics
from tensorhub_planner.limits import Limits
from tensorhub_planner.service import Planner

PROGRAM: Final = "tensorhub-planner"
FAILED: Final = 1
WRONG_USAGE: Final = 2
CONNECT_AGAIN_S: Final = 0.2
CLOSE_S_MAX: Final = 1.2
EXPORT_S_MAX: Final = 0.4
"""Together with `CLOSE_S_MAX` this stays below the two seconds that a process is given to end."""

_log: Final = telemetry.logger(__name__)


def main() -> None:
    """Run a planner until a signal ends it, or a log that it can't trust."""
    try:
        settings = load(os.environ)
    except InvalidSetting as why:
        sys.exit(_told(str(why), WRONG_USAGE))
    if settings.nats is None:
        why_not = "TENSORHUB_NATS is not set: say where NATS is, as in TENSORHUB_NATS=nats://127.0.0.1:4222"
        sys.exit(_told(why_not, WRONG_USAGE))
    telemetry.start(PROGRAM, settings.planner_id, settings, settings.dir / "state" / settings.planner_id)
    code = 0
    try:
        uvloop.run(_run(settings, settings.nats))
    except TensorHubError as why:
        code = _told(str(why), FAILED)
    telemetry.shutdown(EXPORT_S_MAX)
    sys.exit(code)


def _told(why: str, code: int) -> int:
    sys.stderr.write(f"{PROGRAM}: {why}\n")
    return code


async def _run(settings: Settings, url: str) -> None:
    serving = asyncio.create_task(_serve(settings, url))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.cancel)
    with suppress(asyncio.CancelledError):
        await serving


async def _serve(settings: Settings, url: str) -> None:
    bus = await _connect(settings, url)
    planner = Planner(bus, Limits(), settings.planner_id)
    try:
        metrics.watch(planner.counts)
        await answer_traces(bus, settings.planner_id)
        await planner.run()
    finally:
        try:
            async with asyncio.timeout(CLOSE_S_MAX):
                await planner.close()
                await bus.close()
        except TimeoutError:
            _log.warning("not everything could be closed in time")
        _log.info("ended")


async def _connect(settings: Settings, url: str) -> Bus:
    """Connect to NATS, trying for ever: the planner may well be up before NATS is."""
    told = ""
    while True:
        try:
            return await connect(url, name=f"planner {settings.planner_id}", credentials=settings.credentials)
        except RegistryUnavailable as why:
            if str(why) != told:
                told = str(why)
                _log.warning("waiting for NATS", nats=shown(url), why=told)
        await asyncio.sleep(CONNECT_AGAIN_S)
