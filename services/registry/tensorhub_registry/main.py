"""`tensorhub-registry`: a registry as a process. Settings come from the environment; SIGTERM or SIGINT ends it."""

import asyncio
import contextlib
import gc
import os
import signal
import sys
from typing import Final

import uvloop

from tensorhub_common import telemetry
from tensorhub_common.bus.address import shown
from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.bus.traces import answer_traces
from tensorhub_common.errors import RegistryUnavailable
from tensorhub_common.settings import InvalidSetting, Settings, load
from tensorhub_registry import metrics
from tensorhub_registry.service import Registry

WRONG_USAGE: Final = 2
CONNECT_S_MAX: Final = 1.0
CONNECT_AGAIN_S: Final = 0.2
CLOSE_S_MAX: Final = 1.2
EXPORT_S_MAX: Final = 0.4
"""Together with `CLOSE_S_MAX` this stays below the two seconds that a process is given to end."""

GC_YOUNG: Final = 20_000
"""The fold makes many small objects that live long: look for garbage more rarely than Python does by itself."""

_log: Final = telemetry.logger(__name__)


def main() -> None:
    """Run a registry until a signal ends it."""
    try:
        settings = load(os.environ)
    except InvalidSetting as why:
        sys.exit(_refuse(str(why)))
    if settings.nats is None:
        sys.exit(_refuse("TENSORHUB_NATS is not set: say where NATS is, as in TENSORHUB_NATS=nats://127.0.0.1:4222"))
    telemetry.start("tensorhub-registry", settings.registry_id, settings, settings.dir / "state" / settings.registry_id)
    gc.set_threshold(GC_YOUNG, 20, 20)
    uvloop.run(_run(settings, settings.nats))
    telemetry.shutdown(EXPORT_S_MAX)


def _refuse(why: str) -> int:
    sys.stderr.write(f"tensorhub-registry: {why}\n")
    return WRONG_USAGE


async def _run(settings: Settings, url: str) -> None:
    serving = asyncio.create_task(_serve(settings, url))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


async def _serve(settings: Settings, url: str) -> None:
    bus = await _connect(settings, url)
    registry = Registry(bus, settings)
    try:
        metrics.watch(registry)
        await answer_traces(bus, settings.registry_id)
        await registry.run()
    finally:
        try:
            async with asyncio.timeout(CLOSE_S_MAX):
                await registry.close()
                await bus.close()
        except TimeoutError:
            _log.warning("not everything could be closed in time")
        _log.info("ended")


async def _connect(settings: Settings, url: str) -> Bus:
    """Connect to NATS, trying for ever: the registry may well be up before NATS is."""
    told = ""
    name = f"registry {settings.registry_id}"
    while True:
        try:
            return await connect(url, name=name, credentials=settings.credentials, timeout_s=CONNECT_S_MAX)
        except RegistryUnavailable as why:
            if str(why) != told:
                told = str(why)
                _log.warning("waiting for NATS", nats=shown(url), why=told)
        await asyncio.sleep(CONNECT_AGAIN_S)
