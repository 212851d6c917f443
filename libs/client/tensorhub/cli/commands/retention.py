"""`tensorhub retain`, `pin`, `unpin`, `rewind` and `quota`: what users rule, said to the log.

Always true: the command ends when the log has decided it, or says that this is unknown; repeating it is harmless.
"""

from typing import Annotated

import typer

from tensorhub._control.registry_client import RegistryClient
from tensorhub.cli import options
from tensorhub.cli.output import json_line, line, size
from tensorhub.cli.runner import CommandDeadline, registry_of, run
from tensorhub_common.config.parsers import byte_count
from tensorhub_common.protocol.log.commands import RETAINED_MAX, Command, Pin, Quota, Retain, Rewind, Unpin
from tensorhub_common.protocol.log.events import AnyEvent, VersionRetired

Bytes = Annotated[
    int,
    typer.Argument(
        metavar="BYTES",
        help="The most bytes, as 68719476736 or 64GiB; 0: no bound.",
        show_default=False,
        parser=options.said(byte_count(0)),
    ),
]


def retain(
    model: options.Model,
    *,
    last: Annotated[
        int,
        typer.Option(
            help="How many of the last versions to keep; 0: none.", parser=options.whole(0, RETAINED_MAX), metavar="N"
        ),
    ],
    job: options.Job = None,
    json: options.Json = False,
    timeout: options.Timeout = 10,
    directory: options.Directory = None,
    nats: options.Nats = None,
) -> None:
    """Keep the last versions of a model: none of them loses its last copy by an orderly act."""
    said = send_command(registry_of(job, directory, nats), Retain(model=model, last=last), timeout)
    print_outcome(
        said, f"the last {last} versions of {model} are kept" if last else f"no version of {model} is kept", json
    )


def pin(
    model: options.Model,
    version: options.Version,
    *,
    job: options.Job = None,
    json: options.Json = False,
    timeout: options.Timeout = 10,
    directory: options.Directory = None,
    nats: options.Nats = None,
) -> None:
    """Keep one version of a model until it is unpinned."""
    said = send_command(registry_of(job, directory, nats), Pin(model=model, version=version), timeout)
    print_outcome(said, f"version {version} of {model} is pinned", json)


def unpin(
    model: options.Model,
    version: options.Version,
    *,
    job: options.Job = None,
    json: options.Json = False,
    timeout: options.Timeout = 10,
    directory: options.Directory = None,
    nats: options.Nats = None,
) -> None:
    """Keep a version no longer than 'retain' says."""
    said = send_command(registry_of(job, directory, nats), Unpin(model=model, version=version), timeout)
    print_outcome(said, f"version {version} of {model} is not pinned", json)


def rewind(
    model: options.Model,
    *,
    to: Annotated[
        int,
        typer.Option(
            help="The version that the trainer went back to.", parser=options.version_number, metavar="VERSION"
        ),
    ],
    job: options.Job = None,
    json: options.Json = False,
    timeout: options.Timeout = 10,
    directory: options.Directory = None,
    nats: options.Nats = None,
) -> None:
    """Retire all versions above a checkpoint's. Their numbers are not used again."""
    said = send_command(registry_of(job, directory, nats), Rewind(model=model, to=to), timeout)
    retired = [str(event.version) for event in said if isinstance(event, VersionRetired)]
    print_outcome(said, f"{model} is back at {to}; retired: {', '.join(retired) or 'none'}", json)


def quota(
    nbytes: Bytes,
    *,
    job: options.Job = None,
    json: options.Json = False,
    timeout: options.Timeout = 10,
    directory: options.Directory = None,
    nats: options.Nats = None,
) -> None:
    """Bound the bytes that all shards of a job take together. What is there already stays."""
    registry = registry_of(job, directory, nats)
    said = send_command(registry, Quota(nbytes=nbytes), timeout)
    bound = f"may take {size(nbytes)} ({nbytes} bytes)" if nbytes else "has no quota"
    print_outcome(said, f"job {registry.job} {bound}", json)


def send_command(registry: RegistryClient, command: Command, timeout_s: float) -> tuple[AnyEvent, ...]:
    """Have the log take a command, and return what became of it."""
    bound = CommandDeadline(timeout_s)

    async def saying() -> tuple[AnyEvent, ...]:
        async with registry, bound.held():
            return await registry.rule(command, bound.left_s("waiting for the registry's word"))

    return run(saying())


def print_outcome(events: tuple[AnyEvent, ...], sentence: str, json: bool) -> None:  # noqa: FBT001 (the option as it came)
    """Print the events for programs, or a sentence for people."""
    if json:
        for event in events:
            json_line(event)
    else:
        line(sentence)
