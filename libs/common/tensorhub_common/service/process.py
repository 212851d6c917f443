"""How a registry or a planner runs as a process: from its settings to a signal, or to what it can't go on with.

Invariants:
- It ends within two seconds of SIGTERM or SIGINT, whatever NATS or a collector of traces do.
- When it ends by itself, it says in one line why and exits with 1 (2: it was started wrongly, and a restart would not
  help). An error that escapes and that no owner handles ends it so: systemd, Docker and `tensorhub up` start it anew.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Final, NoReturn, Protocol

import uvloop

from tensorhub_common.bus.address import shown
from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.bus.keepalive import ping_every_s
from tensorhub_common.config.settings import InvalidSetting, Settings, load, unknown_variables
from tensorhub_common.errors import RegistryUnavailable, TensorHubError
from tensorhub_common.introspection.activity import answer_activity
from tensorhub_common.introspection.span_answers import answer_traces
from tensorhub_common.observability import logs
from tensorhub_common.runtime.supervision import Fault, Supervisor, set_last_resort, watch_loop
from tensorhub_common.telemetry import process

FAILED: Final = 1
WRONG_USAGE: Final = 2
CONNECT_S_MAX: Final = 1.0
CONNECT_AGAIN_S: Final = 0.2
CLOSE_S_MAX: Final = 1.2
EXPORT_S_MAX: Final = 0.4
"""Together with `CLOSE_S_MAX` this stays below the two seconds that a process is given to end."""

_log: Final = logs.logger(__name__)


class Faulted(TensorHubError):
    """An error escaped, and no owner could go on without what failed."""


class RunnableService(Protocol):
    """What the process is there for."""

    async def run(self) -> None:
        """Serve until cancelled. Raises `TensorHubError` when it can't go on."""

    async def close(self) -> None:
        """Let go of what it has."""


def run(kind: str, id_of: Callable[[Settings], str], make: Callable[[Bus, Settings], RunnableService]) -> NoReturn:
    """Be the process `tensorhub-<kind>`, as the environment describes it. `make` is called once NATS is there."""
    program = f"tensorhub-{kind}"
    try:
        settings = load(os.environ)
    except InvalidSetting as why:
        sys.exit(_exit_line(program, str(why), WRONG_USAGE))
    if settings.nats is None:
        why_not = "TENSORHUB_NATS is not set: say where NATS is, as in TENSORHUB_NATS=nats://127.0.0.1:4222"
        sys.exit(_exit_line(program, why_not, WRONG_USAGE))
    name = id_of(settings)
    process.start(program, name, settings, settings.dir / "state" / name)
    for sentence in unknown_variables(os.environ):
        _log.warning(sentence)
    code = 0
    try:
        uvloop.run(_until_signalled(_serve(settings, settings.nats, kind, name, make)))
    except TensorHubError as why:
        code = _exit_line(program, str(why), FAILED)
    except Exception as why:  # noqa: BLE001 (whatever ends a process, its last line says so)
        _log.exception("the process ends")
        code = _exit_line(program, f"{why!r}. This is a fault of TensorHub: report it with the log", FAILED)
    process.shutdown(EXPORT_S_MAX)
    sys.exit(code)


def _exit_line(program: str, why: str, code: int) -> int:
    sys.stderr.write(f"{program}: {why}\n")
    return code


async def _until_signalled(work: Coroutine[None, None, None]) -> None:
    """Run until a signal comes, or an error escapes that no owner handles. Raises `Faulted` then."""
    working = Supervisor("the process").start(work, "serving", awaited=True)
    loop = asyncio.get_running_loop()
    faults: list[Fault] = []

    def end(fault: Fault) -> None:
        faults.append(fault)
        working.cancel()

    watch_loop(loop)
    set_last_resort(end)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, working.cancel)
    try:
        with suppress(asyncio.CancelledError):
            await working
    finally:
        set_last_resort(None)
    if faults:
        error = faults[0].error
        why = (
            str(error) if isinstance(error, TensorHubError) else f"{faults[0]}. This is a fault of TensorHub: report it"
        )
        raise Faulted(why)


async def _serve(
    settings: Settings, url: str, kind: str, name: str, make: Callable[[Bus, Settings], RunnableService]
) -> None:
    bus = await _connect(settings, url, f"{kind} {name}")
    service = make(bus, settings)
    try:
        await answer_traces(bus, name)
        await answer_activity(bus, name, kind)
        await service.run()
    finally:
        try:
            async with asyncio.timeout(CLOSE_S_MAX):
                await service.close()
                await bus.close()
        except TimeoutError:
            _log.warning("not everything could be closed in time")
        _log.info("ended")


async def _connect(settings: Settings, url: str, name: str) -> Bus:
    """Connect to NATS, trying for ever: the process may well be up before NATS is."""
    last_reason = ""
    while True:
        try:
            return await connect(
                url,
                name=name,
                credentials=settings.credentials,
                tls=settings.tls,
                timeout_s=CONNECT_S_MAX,
                ping_every_s=ping_every_s(settings.lost_after_s),
            )
        except RegistryUnavailable as why:
            if str(why) != last_reason:
                last_reason = str(why)
                _log.warning("waiting for NATS", nats=shown(url), why=last_reason)
        await asyncio.sleep(CONNECT_AGAIN_S)
