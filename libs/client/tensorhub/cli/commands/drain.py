"""`tensorhub drain`: take an agent out for maintenance without losing what is retained."""

import asyncio
from typing import Annotated, Final

import msgspec
import typer

from tensorhub._control.registry_client import RegistryClient
from tensorhub.cli import options
from tensorhub.cli.output import json_line, line
from tensorhub.cli.runner import CommandDeadline, registry_of, run
from tensorhub_common.errors import RetentionFull
from tensorhub_common.protocol.log.commands import DrainAgent

LOOK_S: Final = 0.2

RULE_S: Final = 10.0
"""One question to the registry takes no longer, however long the copies may."""


class Drained(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    agent: str
    draining: bool
    may_stop: bool


def drain(
    agent: Annotated[
        str,
        typer.Argument(metavar="AGENT", help="The agent's id.", show_default=False, parser=options.name_of("agent")),
    ],
    *,
    end: Annotated[bool, typer.Option("--end", help="The maintenance is over: let it take part again.")] = False,
    job: options.Job = None,
    json: options.Json = False,
    timeout: options.Timeout = 600,
    directory: options.Directory = None,
    nats: options.Nats = None,
) -> None:
    """Let an agent take no new shard, and wait until the last copies of what is retained are elsewhere."""
    done = run(_drain(registry_of(job, directory, nats), agent, on=not end, bound=CommandDeadline(timeout)))
    if json:
        json_line(done)
    elif end:
        line(f"agent {agent} takes part again")
    else:
        line(f"agent {agent} may stop: no retained version has its last copy there")


async def _drain(registry: RegistryClient, agent: str, *, on: bool, bound: CommandDeadline) -> Drained:
    async with registry, bound.held():
        await registry.rule(
            DrainAgent(agent=agent, on=on), min(bound.left_s("waiting for the registry's word"), RULE_S)
        )
        is_last_holder = False
        while True:
            if is_last_holder and bound.ends_within(LOOK_S):
                raise RetentionFull(
                    f"agent {agent!r} still holds the last copy of a retained version after {bound.timeout_s:g} s: "
                    "give others more TENSORHUB_CACHE_BYTES, retain fewer versions, or wait longer; it goes on "
                    f"draining until 'tensorhub drain {agent} --end'"
                )
            left_s = bound.left_s("waiting for copies elsewhere")
            found = next(
                (each for each in (await registry.status(min(left_s, RULE_S))).agents if each.agent == agent), None
            )
            if not on or (found is not None and found.may_stop):
                return Drained(agent, draining=on, may_stop=on)
            is_last_holder = True
            await asyncio.sleep(LOOK_S)
