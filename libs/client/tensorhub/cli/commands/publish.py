"""`tensorhub publish`: the weights in files become a version, held by an agent after the command has ended.

The replica's shard stays with the agent. Publishing a newer version comes back to it: the old version is unpublished,
the memory overwritten, the new version published.

Always true: a version that is published already is left as it is unless the new number is newer; a shard that this
command brought is taken away again if it can't be published.
"""

import asyncio
import importlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tensorhub.aio.hub import CONNECT_S, AsyncHub
from tensorhub.aio.shard import AsyncShard
from tensorhub.cli import options
from tensorhub.cli.output import json_line, line, rate
from tensorhub.cli.progress_bar import Bar
from tensorhub.cli.runner import AgentTarget, CommandDeadline, door_of, hub_of, need, run
from tensorhub.specs import TensorSpec
from tensorhub_common.errors import VersionConflict
from tensorhub_common.layout.layout import payload_bytes

if TYPE_CHECKING:
    import torch


class Published(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    model: str
    version: int
    replica: str
    tensors: int
    nbytes: int
    seconds: float


def publish(
    model: options.Model,
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="One or more .safetensors files."),
    ],
    *,
    version: Annotated[
        int | None,
        typer.Option(
            help="Its number; without one, the last and one more.", parser=options.version_number, metavar="NUMBER"
        ),
    ] = None,
    replica: Annotated[
        str, typer.Option(help="The replica that holds it.", parser=options.name_of("replica"), metavar="NAME")
    ] = "published",
    job: options.Job = None,
    json: options.Json = False,
    timeout: options.Timeout = 60,
    agent: options.Agent = None,
    directory: options.Directory = None,
    nats: options.Nats = None,
) -> None:
    """Publish the weights in files. The agent goes on holding them."""
    for file in files:
        _check_readable(file)
    door = door_of(job, directory, nats, agent)
    need("publish", "torch", "safetensors", extra="torch")
    from tensorhub._tensors.safetensors_files import load_files  # noqa: PLC0415 (it imports torch, which other commands do without)

    importlib.import_module("tensorhub._tensors.description")
    tensors = load_files(files)
    done = run(_publish(door, model, version, replica, tensors, CommandDeadline(timeout)))
    if json:
        json_line(done)
    else:
        line(
            f"{model} version {done.version} is published by replica {replica}: {done.tensors} tensors, "
            f"{rate(done.nbytes, done.seconds)}"
        )


def _check_readable(file: Path) -> None:
    """Refuse what can be no file of weights before the hub is asked for anything."""
    hint = "FILE..."
    if str(file) == options.STDIO:
        raise typer.BadParameter("weights are not read from stdin, since they are mapped: name a file", param_hint=hint)
    try:
        # A pipe must not even be opened: that waits for a writer.
        if file.exists() and not file.is_file():
            raise typer.BadParameter(f"{file} is no regular file; give the name of one", param_hint=hint)
        with file.open("rb"):
            pass
    except OSError as error:
        raise typer.BadParameter(f"{file} can't be read: {error.strerror}", param_hint=hint) from None


async def _publish(
    door: AgentTarget,
    model: str,
    version: int | None,
    replica: str,
    tensors: "Mapping[str, torch.Tensor]",
    bound: CommandDeadline,
) -> Published:
    began = time.monotonic()
    async with hub_of(door, bound) as hub:
        shard: AsyncShard | None = None
        try:
            specs = {name: TensorSpec(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
            async with bound.held():
                # Without it nothing can be published, and it says so in its own name.
                await hub.registry.open_job(min(bound.left_s("asking the registry"), CONNECT_S))
                left_s = bound.left_s("registering the shard")
                shard = await hub.register(model, specs, replica=replica, timeout_s=left_s)
            number = await _bring_in(hub, shard, version, tensors, bound)
        finally:
            if shard is None or not shard.is_new or shard.version is not None:
                # It stays with the agent. What this command has brought, and could not publish, goes.
                await hub.close(release=False)
    nbytes = payload_bytes(shard.layout)
    return Published(model, number, replica, len(tensors), nbytes, time.monotonic() - began)


async def _bring_in(
    hub: AsyncHub, shard: AsyncShard, version: int | None, tensors: "Mapping[str, torch.Tensor]", bound: CommandDeadline
) -> int:
    if shard.version is not None:
        if shard.version == version:
            return await asyncio.to_thread(_check_same, shard, version, tensors)
        async with bound.held():
            await _check_newer(hub, shard.model, version, bound)
            await shard.unpublish(timeout_s=bound.left_s(f"unpublishing version {shard.version}"))
    with Bar(f"{shard.model}: copying", payload_bytes(shard.layout)) as bar:
        await asyncio.to_thread(_copy, shard, tensors, bar)
    shard.mark_loaded()
    async with bound.held():
        return await shard.publish(version, timeout_s=bound.left_s("publishing"))


def _copy(shard: AsyncShard, tensors: "Mapping[str, torch.Tensor]", bar: Bar) -> None:
    done, total = 0, payload_bytes(shard.layout)
    for name, tensor in tensors.items():
        shard.tensors[name].copy_(tensor)
        done += tensor.nbytes
        bar.to(done, total)


def _check_same(shard: AsyncShard, version: int, tensors: "Mapping[str, torch.Tensor]") -> int:
    """Publishing again what is published is no error, if it is the same."""
    import torch  # noqa: PLC0415 (other commands do without)

    for name, tensor in tensors.items():
        standing = shard.tensors[name]
        # Compared as bytes: NaN is not equal to itself, and float8 can't be compared at all.
        if not torch.equal(_bytes(standing), _bytes(tensor)):
            raise VersionConflict(
                f"version {version} of {shard.model} is published with other values of tensor {name!r}: publish these "
                "under a newer number"
            )
    return version


def _bytes(tensor: "torch.Tensor") -> "torch.Tensor":
    import torch  # noqa: PLC0415

    return tensor.contiguous().view(-1).view(torch.uint8)


async def _check_newer(hub: AsyncHub, model: str, version: int | None, bound: CommandDeadline) -> None:
    """Refuse an old number before anything is unpublished for it."""
    models = (await hub.registry.status(bound.left_s("asking the registry for the last version"))).models
    last = next((info.last for info in models if info.model == model), None)
    if version is not None and last is not None and version <= last:
        raise VersionConflict(
            f"version {version} of {model} is not newer than the last published one, {last}: give a higher number"
        )
