"""`tensorhub upgrade`: switches on in a job's log what a newer release does otherwise, once every folder knows it.

Always true: nothing is raised while a registry or planner answers that can't fold it; the leading registry looks once
more before it says so in the log.
"""

from typing import Annotated, Final

import msgspec
import typer

from tensorhub._control.registry_client import RegistryClient
from tensorhub.cli import options
from tensorhub.cli.output import json_line, line, table
from tensorhub.cli.runner import CommandDeadline, registry_of, run
from tensorhub_common.errors import RegistryUnavailable
from tensorhub_common.introspection import span_query
from tensorhub_common.introspection.ping import survey_log_followers
from tensorhub_common.jetstream import job_log
from tensorhub_common.protocol.queries import Pong, Status
from tensorhub_common.protocol.spans import TransfersAsk

LEVEL_MAX: Final = 1_000_000
"""No release knows a higher level; a higher number is a mistake."""


class Upgraded(msgspec.Struct, frozen=True):
    """What `--json` prints for each job."""

    job: str
    before: int
    level: int


class Folder(msgspec.Struct, frozen=True):
    """A registry or planner, as it says itself; one of a release before levels says nothing."""

    process: str
    role: str
    release: str
    level: int


def upgrade(
    *,
    everything: Annotated[bool, typer.Option("--all", help="Every job of this hub.")] = False,
    look: Annotated[bool, typer.Option("--look", help="Show who runs which release, and raise nothing.")] = False,
    level: Annotated[
        int | None,
        typer.Option(
            help="To this level; by default the newest. Each registry and planner must know it.",
            parser=options.whole(1, LEVEL_MAX),
            metavar="LEVEL",
            show_default=False,
        ),
    ] = None,
    job: options.Job = None,
    json: options.Json = False,
    timeout: options.Timeout = 10,
    directory: options.Directory = None,
    nats: options.Nats = None,
) -> None:
    """Switch on what this release folds otherwise than the one before, once every registry and planner runs it.

    There is no way back: a release that does not know the level stops the job.
    """
    registry = registry_of(job, directory, nats)
    found, done = run(_upgrade(registry, level, CommandDeadline(timeout), everything=everything, look=look))
    if json:
        for each in found if look else done:
            json_line(each)
        return
    table(("PROCESS", "ROLE", "RELEASE", "LEVEL"), ((f.process, f.role, f.release, f.level) for f in found))
    for each in done:
        line(f"job {each.job} is at level {each.level}" + ("" if each.before == each.level else f", was {each.before}"))


async def _upgrade(
    registry: RegistryClient, level: int | None, bound: CommandDeadline, *, everything: bool, look: bool
) -> tuple[list[Folder], list[Upgraded]]:
    async with registry, bound.held():
        bus = await registry.bus(bound.left_s("connecting to NATS"))
        pongs = await survey_log_followers(bus)
        jobs = await job_log.list_jobs(bus) if everything else [registry.job]
        found = {each.id: _folder(each) for each in pongs}
        done = []
        for job in jobs:
            of_job = registry if job == registry.job else RegistryClient(job, registry.address)
            async with of_job:
                status = await of_job.status(bound.left_s(f"asking the registry about job {job}"))
                before = await _silent(of_job, status, {*found})
                found |= {name: Folder(name, "", "before levels", 0) for name in before}
                if not look:
                    left_s = bound.left_s(f"raising job {job}")
                    done.append(await _raise(of_job, status, list(found.values()), level, left_s))
        return [found[name] for name in sorted(found)], done


async def _silent(registry: RegistryClient, status: Status, known: set[str]) -> frozenset[str]:
    """Return the processes that answer what every process does, and are no agents, and say nothing of levels."""
    answered = (await span_query.collect_spans(await registry.bus(), registry.job, TransfersAsk(limit=1))).processes
    return answered - known - {agent.agent for agent in status.agents}


async def _raise(
    registry: RegistryClient, status: Status, found: list[Folder], level: int | None, timeout_s: float
) -> Upgraded:
    wanted = max((each.level for each in found), default=0) if level is None else level
    behind = [each for each in found if each.level < wanted]
    if behind:
        named = ", ".join(f"{each.process} (release {each.release})" for each in behind)
        raise RegistryUnavailable(
            f"job {registry.job!r} is not raised to level {wanted}, since {named} can't fold it: upgrade that first"
        )
    if not wanted:
        raise RegistryUnavailable("no registry or planner says which level it can fold: upgrade them first")
    reached = await registry.raise_level(wanted, timeout_s)
    return Upgraded(job=registry.job, before=status.level, level=reached)


def _folder(pong: Pong) -> Folder:
    return Folder(pong.id, pong.role, pong.release, pong.level)
