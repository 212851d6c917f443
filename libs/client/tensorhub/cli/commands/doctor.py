"""`tensorhub doctor`: is all here that a hub needs, and does it answer?"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Annotated, Final

import typer

from tensorhub.cli import options
from tensorhub.cli.doctor import transport_probes, transports
from tensorhub.cli.doctor.finding import Finding, fail
from tensorhub.cli.doctor.hub_checks import hub
from tensorhub.cli.doctor.machine_checks import machine
from tensorhub.cli.local_processes import running_agents
from tensorhub.cli.output import json_line, line
from tensorhub.cli.runner import SAID_NO, job_of, run, settings_of
from tensorhub_common.config.settings import Settings

HUB_S_MAX: Final = 20.0
"""All questions to the hub together take at most so long, however many of its processes are silent."""


def doctor(
    *,
    job: options.Job = None,
    json: options.Json = False,
    directory: options.Directory = None,
    nats: options.Nats = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Don't try the ways for bytes between hosts, which takes some seconds.")
    ] = False,
) -> None:
    """Check this machine and the hub, and say what to do about what is wrong."""
    settings = settings_of(directory)
    levels: list[str] = []

    def tell(finding: Finding) -> None:
        levels.append(finding.level)
        if json:
            json_line(finding)
        else:
            advice = f" -> {finding.advice}" if finding.advice else ""
            line(f"{finding.level:<4}  {finding.check:<13}  {finding.found}{advice}")

    for finding in machine(settings):
        tell(finding)
    for finding in () if quick else _transports(settings):
        tell(finding)
    run(_hub(settings, job_of(job, settings), nats, tell))
    if "fail" in levels:
        raise typer.Exit(SAID_NO)


def _transports(settings: Settings) -> Iterator[Finding]:
    agent = next(iter(running_agents(settings)), None)
    found = transport_probes.find(agent.environment, agent.interpreter) if agent else transport_probes.find(None, None)
    return transports.findings(found)


async def _hub(settings: Settings, job: str, nats: str | None, tell: Callable[[Finding], None]) -> None:
    last = "nothing"
    try:
        async with asyncio.timeout(HUB_S_MAX):
            async for finding in hub(settings, job, nats):
                tell(finding)
                last = finding.check
    except TimeoutError:
        found = f"its checks did not end within {HUB_S_MAX:g} s; {last} was the last that did"
        tell(fail("hub", found, "look into the logs of NATS and of the processes that are said to be silent"))
