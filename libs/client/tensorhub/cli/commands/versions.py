"""`tensorhub versions`: the versions of a model, and who holds them."""

from typing import Final

from tensorhub._control.registry_client import RegistryClient
from tensorhub.cli import options
from tensorhub.cli.output import json_line, line, table, when
from tensorhub.cli.runner import CommandDeadline, registry_of, run
from tensorhub_common.errors import VersionUnavailable
from tensorhub_common.protocol.queries import VersionInfo

MODELS_TOLD: Final = 10
"""How many names are listed to a user who has mistaken one."""


def versions(
    model: options.Model,
    *,
    job: options.Job = None,
    json: options.Json = False,
    timeout: options.Timeout = 5,
    directory: options.Directory = None,
    nats: options.Nats = None,
) -> None:
    """List the versions of a model, oldest first, and the replicas that hold them."""
    found = run(_ask(registry_of(job, directory, nats), model, CommandDeadline(timeout)))
    if json:
        for version in found:
            json_line(version)
    elif not found:
        line(f"{model} has no versions yet")
    else:
        rows = ((v.version, v.state, v.publisher, when(v.published_at), ", ".join(v.holders)) for v in found)
        table(("VERSION", "STATE", "PUBLISHER", "PUBLISHED", "HOLDERS"), rows)


async def _ask(registry: RegistryClient, model: str, bound: CommandDeadline) -> list[VersionInfo]:
    async with registry, bound.held():
        found = await registry.versions(model, bound.left_s("asking the registry for the versions"))
        if not found:
            models = (await registry.status(bound.left_s("asking the registry for the models"))).models
            if all(each.model != model for each in models):
                known = f"it has {', '.join(each.model for each in models[:MODELS_TOLD])}" if models else "it has none"
                raise VersionUnavailable(f"there is no model {model!r} in job {registry.job!r}: {known}")
        return found
