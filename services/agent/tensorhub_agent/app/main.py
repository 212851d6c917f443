"""`tensorhub-agent`: one agent, until SIGTERM or SIGINT."""

import asyncio
import contextlib
import os
import resource
import signal
import sys
from typing import Final

import uvloop

from tensorhub_agent.app.service import FAILED, AgentService
from tensorhub_common.config import settings as settings_of
from tensorhub_common.errors import TensorHubError
from tensorhub_common.observability import logs
from tensorhub_common.runtime.supervision import set_last_resort, watch_loop
from tensorhub_common.telemetry import process

WRONG_USAGE: Final = 2
"""A restart would not help: the settings would be as wrong."""

SWITCH_S = 0.0005
"""Threads that copy give up the GIL for long calls and win it back sooner with this; see copying.py."""


def main() -> None:
    """Run the agent that the environment describes."""
    sys.setswitchinterval(SWITCH_S)
    _raise_open_files()
    try:
        settings = settings_of.load(os.environ)
        process.start("tensorhub-agent", settings.agent_id, settings, settings.state_dir)
        for sentence in settings_of.unknown_variables(os.environ):
            logs.logger(__name__).warning(sentence)
        uvloop.run(_run(AgentService(settings)))
    except TensorHubError as why:
        sys.stderr.write(f"tensorhub-agent: {why}\n")
        raise SystemExit(WRONG_USAGE if isinstance(why, settings_of.InvalidSetting) else FAILED) from None
    finally:
        process.shutdown()


def _raise_open_files() -> None:
    """Take as many descriptors as this process may have: each segment holds one, and each connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _run(service: AgentService) -> None:
    loop = asyncio.get_running_loop()
    watch_loop(loop)
    set_last_resort(lambda fault: service.fault(str(fault)))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.end)
    await service.run()
