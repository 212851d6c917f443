"""`tensorhub versions`: the versions of a model, and who holds them."""

from tensorhub.cli import options
from tensorhub.cli.output import columns, json_line, line, when
from tensorhub.cli.running import registry_of, run
from tensorhub.registry import Registry
from tensorhub_common.wire.asks import VersionInfo


def versions(
    model: options.Model,
    *,
    job: options.Job = None,
    json: options.Json = False,
    directory: options.Directory = None,
    nats: options.Nats = None,
) -> None:
    """List the versions of a model, oldest first, and the replicas that hold them."""
    found = run(_ask(registry_of(job, directory, nats), model))
    if json:
        for version in found:
            json_line(version)
    elif not found:
        line(f"{model} has no versions yet")
    else:
        rows = ((v.version, v.state, v.publisher, when(v.published_at), ", ".join(v.holders)) for v in found)
        columns(("VERSION", "STATE", "PUBLISHER", "PUBLISHED", "HOLDERS"), rows)


async def _ask(registry: Registry, model: str) -> list[VersionInfo]:
    async with registry:
        return await registry.versions(model)
