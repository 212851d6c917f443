"""`tensorhub delete`: a model without holders, or a whole job.

Always true: a job is deleted only where `--job` names it and somebody has agreed; settings alone delete nothing.
"""

import sys
from typing import Annotated

import typer

from tensorhub._control.registry_client import RegistryClient
from tensorhub.cli import options
from tensorhub.cli.commands.retention import print_outcome, send_command
from tensorhub.cli.output import json_line, line
from tensorhub.cli.runner import CommandDeadline, raising_sigint, registry_of, run
from tensorhub_common.protocol.log.commands import Delete
from tensorhub_common.protocol.queries import Status

OptionalModel = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="The model's name; without it the whole job.",
        show_default=False,
        parser=options.name_of("model"),
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Delete a whole job without asking.")]
Forget = Annotated[
    bool, typer.Option("--forget", help="The job is deleted already: let its name be used anew, at once.")
]


def delete(
    model: OptionalModel = None,
    *,
    yes: Yes = False,
    forget: Forget = False,
    job: options.Job = None,
    json: options.Json = False,
    timeout: options.Timeout = 10,
    directory: options.Directory = None,
    nats: options.Nats = None,
) -> None:
    """Delete a model without holders, with the copies of its versions; or a whole job.

    A job goes with all its shards, on every agent: trainers and engines of it get an error from then on. Its
    name is refused for a week, so that a process that was forgotten doesn't bring it back.
    """
    if model is None and job is None:
        raise typer.BadParameter("name a MODEL, or with --job a whole job")
    if model is not None and forget:
        raise typer.BadParameter("--forget is about a deleted job: leave MODEL out")
    registry = registry_of(job, directory, nats)
    if model is not None:
        print_outcome(send_command(registry, Delete(model=model), timeout), f"{model} is deleted", json)
    elif forget:
        run(_forget(registry, CommandDeadline(timeout)))
        _tell(registry, "forgotten", f"job {registry.job} is forgotten: its name may be used anew", json)
    else:
        status = run(_status(registry, CommandDeadline(timeout)))
        if not yes:
            _ask(status)
        run(_delete_job(registry, CommandDeadline(timeout)))
        _tell(registry, "deleted", f"job {registry.job} is deleted", json)


async def _forget(registry: RegistryClient, bound: CommandDeadline) -> None:
    async with registry, bound.held():
        await registry.forget_job(bound.left_s("waiting for the registry's word"))


async def _status(registry: RegistryClient, bound: CommandDeadline) -> Status:
    async with registry, bound.held():
        return await registry.status(bound.left_s("asking the registry for the job"))


async def _delete_job(registry: RegistryClient, bound: CommandDeadline) -> None:
    async with registry, bound.held():
        await registry.delete_job(bound.left_s("waiting for the registry's word"))


def _ask(status: Status) -> None:
    """Ask the user. Raises where there is no terminal, or the answer is no."""
    live = [agent for agent in status.agents if agent.live]
    shards = sum(agent.shards for agent in live)
    if not sys.stdin.isatty():
        raise typer.BadParameter(
            f"job {status.job!r} has {shards} shards on {len(live)} live agents: say --yes to delete it"
        )
    models = ", ".join(model.model for model in status.models) or "none"
    with raising_sigint():
        typer.confirm(
            f"Delete job {status.job} for everybody? Models: {models}; {shards} shards on {len(live)} live agents",
            abort=True,
            err=True,
        )


def _tell(registry: RegistryClient, what: str, sentence: str, json: bool) -> None:  # noqa: FBT001 (the option as it came)
    if json:
        json_line({"job": registry.job, "state": what})
    else:
        line(sentence)
