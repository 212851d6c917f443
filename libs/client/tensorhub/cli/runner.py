"""How a command runs: its settings, its event loop, and what its end means to the shell.

Always true: the exit code is 0 when it is done (also where its output is read no further), 1 when the hub said no, 2
for wrong usage, and 128 + N when signal N broke it off: 130 for Ctrl-C. What went wrong is one line on stderr, never a
traceback. The first signal lets what has begun be tidied up, within a bound; a second one ends the process at once.
"""

import asyncio
import dataclasses
import importlib.util
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import typer
from typer.core import TyperGroup

from tensorhub._control.discovery import find_agent, find_nats
from tensorhub._control.registry_client import RegistryClient
from tensorhub.aio.hub import CONNECT_S, AsyncHub, connect_async
from tensorhub.cli.output import read_no_further
from tensorhub_common.bus import permission_errors
from tensorhub_common.config import settings as settings_module
from tensorhub_common.config.settings import InvalidSetting, Settings
from tensorhub_common.errors import InvalidName, ReplicaConflict, TensorHubError
from tensorhub_common.protocol.subjects import check_job
from tensorhub_common.runtime import extras
from tensorhub_common.runtime.supervision import Supervisor
from tensorhub_common.telemetry import log_output
from tensorhub_launcher import BY_SIGNAL, end_at_once

DONE: Final = 0
SAID_NO: Final = 1
WRONG_USAGE: Final = 2

MARGIN_S: Final = 0.25
MARGIN_SHARE: Final = 0.1
"""The last of a bound in which the agent or the registry can still say why it has given up: at most this share."""

OWN_ERROR_S: Final = 0.05
"""A call whose bound is over has this long to raise its own error."""

TIDY_S: Final = 2.0
"""How long a command that has failed or was interrupted tries to take back what it has begun."""

END_S: Final = 10.0
"""How long one that is done waits until its shards are released."""

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

UsageError: Final[type[Exception]] = typer.BadParameter.__bases__[0]
"""Typer has had it from click and of its own; what it shows of it is this."""

Result = TypeVar("Result")


class Interrupted(KeyboardInterrupt):
    """A signal has ended the command, and what it had begun is tidied up."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class ErrorHandlingGroup(TyperGroup):
    """The group of all commands, which turns errors into lines and exit codes."""

    def main(self, *arguments: Any, **more: Any) -> Any:  # noqa: ANN401 (typer's own, whose options are many)
        """Run what the arguments name, and end the process."""
        try:
            code = super().main(*arguments, **(more | {"standalone_mode": False})) or DONE
        except SystemExit as end:
            # So typer ends where help goes into a pipe that is read no further; all else comes as an error.
            code = DONE if isinstance(end.__context__, BrokenPipeError) else end.code
        except Exception as error:  # noqa: BLE001 (reading the arguments may raise any error)
            code = _code_of(error)
        if not more.get("standalone_mode", True):
            return code
        try:
            # What could not be written before can't be at the exit either, where Python would complain in its own way.
            sys.stdout.flush()
        except OSError as error:
            code = code or _code_of(error)
        sys.exit(code)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 (typer carries its own click, whose types it doesn't show)
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 (a traceback helps no user of a command)
            raise typer.Exit(_code_of(error)) from None


def _code_of(error: BaseException) -> int:
    """Say in a line what went wrong, and return what that means to the shell."""
    error = _meant(error)
    match error:
        case KeyboardInterrupt():
            print_error("interrupted")
            return BY_SIGNAL + (error.number if isinstance(error, Interrupted) else signal.SIGINT)
        case InvalidName() | InvalidSetting():
            print_error(str(error))
            return WRONG_USAGE
        case TensorHubError():
            print_error(str(error))
            return SAID_NO
        case BrokenPipeError():
            read_no_further()
            return DONE
        case UsageError():
            return _misused(error)
        case OSError() if error.filename is None:
            read_no_further()
            print_error(f"what it says can't be written: {error.strerror or error}")
            return SAID_NO
        case OSError():
            print_error(str(error))
            return SAID_NO
    if os.environ.get("TENSORHUB_LOG_LEVEL") == "debug":
        traceback.print_exception(error)
    print_error(
        f"a fault of TensorHub itself, which is worth a report: {type(error).__name__}: {error} "
        "(TENSORHUB_LOG_LEVEL=debug shows where)"
    )
    return SAID_NO


def _meant(error: BaseException) -> BaseException:
    """Return the error that is to be shown: one of a group, or what has ended a question to the user."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, typer.Abort):
        cause = error.__context__
        return cause if isinstance(cause, KeyboardInterrupt) else TensorHubError("nothing is done without a yes")
    return error


def _misused(error: Any) -> int:  # noqa: ANN401 (see UsageError)
    """Print wrong usage as one line; without any arguments, print the help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return WRONG_USAGE
    sentence = str(error.format_message()).rstrip(".").removeprefix("Invalid value: ")
    name = error.ctx.command_path if error.ctx is not None else "tensorhub"
    print_error(f"{sentence[:1].lower()}{sentence[1:]}; '{name} --help' says what there is")
    return WRONG_USAGE


def print_error(sentence: str) -> None:
    """Say on stderr what was wrong, in one line."""
    try:
        sys.stderr.write(f"tensorhub: {' '.join(sentence.split())}\n")
        sys.stderr.flush()
    except OSError:
        return  # No other place is left to print to.


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a command's coroutine to its end. Raises `Interrupted` where a signal has ended it, once it has tidied up."""
    told: list[int] = []
    with _as_before():
        try:
            return asyncio.run(_until_signalled(work, told))
        except asyncio.CancelledError:
            if not told:
                raise
            raise Interrupted(told[0]) from None


async def _until_signalled(work: Coroutine[Any, Any, Result], told: list[int]) -> Result:
    """Cancel the work at the first signal; at the second end the process."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def stop(number: int) -> None:
        if told:
            end_at_once(number)
        told.append(number)
        task.cancel()

    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            # What was started to ignore a signal, as by nohup, goes on ignoring it.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, stop, number)
    return await work


@contextmanager
def _as_before() -> Iterator[None]:
    """Put the signal handlers back: the event loop has removed those that were there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


@contextmanager
def raising_sigint() -> Iterator[None]:
    """Let Ctrl-C raise `KeyboardInterrupt` in the block, as a question to the user needs it."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def settings_of(directory: Path | None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings, with `--dir` in place of `TENSORHUB_DIR`, and start the log lines of this process."""
    given = dict(environ) if directory is None else {**environ, "TENSORHUB_DIR": str(directory)}
    settings = settings_module.load(given)
    for sentence in settings_module.unknown_variables(given):
        print_error(sentence)
    quiet = settings if environ.get("TENSORHUB_LOG_LEVEL") else dataclasses.replace(settings, log_level="error")
    log_output.start_logs("tensorhub", "cli", quiet)
    if quiet is not settings:
        # A question that NATS does not let through is an error of the command, or of no interest to it.
        logging.getLogger(permission_errors.__name__).setLevel(logging.CRITICAL)
    return settings


def job_of(job: str | None, settings: Settings) -> str:
    """Return the job that the command speaks of."""
    return check_job(settings.job if job is None else job)


def registry_of(job: str | None, directory: Path | None, nats: str | None) -> RegistryClient:
    """Return where questions about the job are asked."""
    return registry_in(settings_of(directory), job, nats)


def registry_in(settings: Settings, job: str | None, nats: str | None) -> RegistryClient:
    """Return the same for settings that are known."""
    return RegistryClient(job_of(job, settings), find_nats(nats, settings))


class CommandDeadline:
    """A command's `--timeout`: how long it waits for the hub, from its first question to its last."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._until = time.monotonic() + timeout_s
        self._doing = "beginning"

    def left_s(self, doing: str) -> float:
        """Return how long the next call may take: a bit less than what is left, so that its own error comes first.

        Raises the bound's error where nothing is left: a call that can't wait would blame who was not asked.
        """
        self._doing = doing
        left_s = self._left_s()
        if left_s <= 0:
            raise self._over()
        # Some error will tell this number: 1.75 s, and not 1.748764 s.
        return round(left_s, 2) or left_s

    def ends_within(self, seconds: float) -> bool:
        """Tell whether no more than this is left for the next call."""
        return self._left_s() <= seconds

    def _left_s(self) -> float:
        return self._until - time.monotonic() - min(MARGIN_S, MARGIN_SHARE * self.timeout_s)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Cancel the block at the bound, and say what it waited for.

        It is broken off a moment later: where this process is late both bounds are over at once, and the call's own
        error says more.
        """
        loop, left_s = asyncio.get_running_loop(), self._until - time.monotonic()
        if left_s <= 0:
            raise self._over()
        try:
            async with asyncio.timeout(None) as last:
                work = Supervisor("a command's bound")
                over = work.call_later(
                    left_s, lambda: last.reschedule(loop.time() + OWN_ERROR_S), what="ending what is late"
                )
                try:
                    yield
                finally:
                    over.cancel()
        except TensorHubError:
            # Some of the hub's errors are a `TimeoutError` too.
            raise
        except TimeoutError:
            raise self._over() from None

    def _over(self) -> TensorHubError:
        return TensorHubError(
            f"it was not done within {self.timeout_s:g} s, and was {self._doing} then: 'tensorhub doctor' says who "
            "is silent; allow more with --timeout where all is well"
        )


class AgentTarget(NamedTuple):
    """How a command gets to an agent of this host."""

    job: str
    socket: Path
    nats: str | None


def door_of(job: str | None, directory: Path | None, nats: str | None, agent: str | None) -> AgentTarget:
    """Find the agent, without asking it yet."""
    settings = settings_of(directory)
    return AgentTarget(job_of(job, settings), find_agent(agent, settings, os.environ), nats)


@asynccontextmanager
async def hub_of(
    door: AgentTarget, bound: CommandDeadline, take_back: Callable[[AsyncHub], Awaitable[None]] | None = None
) -> AsyncIterator[AsyncHub]:
    """Connect to the agent. At the end all shards that are left are released, also where the block fails.

    Only the connecting is held to the bound; what the block asks of the hub is to be held to it there. An agent gives
    up a call that was broken off once its connection has ended, and releases nothing before: `take_back` does that then
    on another one.
    """
    async with bound.held():
        left_s = min(bound.left_s("connecting to the agent"), CONNECT_S)
        hub = await connect_async(door.job, agent=door.socket, nats=door.nats, timeout_s=left_s)
    try:
        yield hub
    except BaseException:
        with suppress(TensorHubError, TimeoutError):
            async with asyncio.timeout(TIDY_S):
                await _tidied(door, hub, take_back)
        raise
    await hub.close(timeout_s=END_S)


async def _tidied(door: AgentTarget, hub: AsyncHub, take_back: Callable[[AsyncHub], Awaitable[None]] | None) -> None:
    with suppress(ReplicaConflict):
        await hub.close(timeout_s=TIDY_S)
    if take_back is not None:
        async with await connect_async(door.job, agent=door.socket, nats=door.nats, timeout_s=TIDY_S) as again:
            await take_back(again)


def need(what: str, *modules: str, extra: str) -> None:
    """Raise unless the modules are installed, which only some commands need."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise TensorHubError(extras.missing(what, missing, extra))
