"""How a command runs: its settings, its event loop, and what its end means to the shell.

Always true: the exit code is 0 when it is done, 1 when the hub said no, 2 for wrong usage; what went wrong is one
line on stderr, never a traceback.
"""

import asyncio
import dataclasses
import os
import sys
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import typer
from typer.core import TyperGroup

from tensorhub.find import find_agent, find_nats
from tensorhub.hub import AsyncHub, connect_async
from tensorhub.registry import Registry
from tensorhub_common import settings as settings_module
from tensorhub_common import telemetry
from tensorhub_common.errors import InvalidName, TensorHubError
from tensorhub_common.settings import InvalidSetting, Settings
from tensorhub_common.subjects import check_job

SAID_NO: Final = 1
WRONG_USAGE: Final = 2

Result = TypeVar("Result")


class Commands(TyperGroup):
    """The group of all commands, which turns errors into lines and exit codes."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 (typer carries its own click, whose types it doesn't show)
        """Run the command."""
        try:
            return super().invoke(ctx)
        except TensorHubError as error:
            complain(str(error))
            raise typer.Exit(WRONG_USAGE if isinstance(error, InvalidName | InvalidSetting) else SAID_NO) from None
        except KeyboardInterrupt:
            complain("interrupted")
            raise typer.Exit(SAID_NO) from None


def complain(sentence: str) -> None:
    """Say on stderr what was wrong, in one line."""
    sys.stderr.write(f"tensorhub: {' '.join(sentence.split())}\n")


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a command's coroutine to its end."""
    return asyncio.run(work)


def settings_of(directory: Path | None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings, with `--dir` in place of `TENSORHUB_DIR`, and start the log lines of this process."""
    given = dict(environ) if directory is None else {**environ, "TENSORHUB_DIR": str(directory)}
    settings = settings_module.load(given)
    quiet = settings if environ.get("TENSORHUB_LOG_LEVEL") else dataclasses.replace(settings, log_level="error")
    telemetry.start_logs("tensorhub", "cli", quiet)
    return settings


def job_of(job: str | None, settings: Settings) -> str:
    """Return the job that the command speaks of."""
    return check_job(settings.job if job is None else job)


def registry_of(job: str | None, directory: Path | None, nats: str | None) -> Registry:
    """Return where questions about the job are asked."""
    settings = settings_of(directory)
    return Registry(job_of(job, settings), find_nats(nats, settings))


async def hub_of(job: str | None, directory: Path | None, nats: str | None, agent: str | None) -> AsyncHub:
    """Connect to an agent of this host."""
    settings = settings_of(directory)
    name = job_of(job, settings)
    return await connect_async(name, agent=find_agent(agent, settings, os.environ), nats=nats)
