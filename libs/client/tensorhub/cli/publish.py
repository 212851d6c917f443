"""`tensorhub publish`: the weights in files become a version, held by an agent after the command has ended.

The replica's shard stays with the agent. Publishing a newer version comes back to it: the old version is unpublished,
the memory overwritten, the new version published.

Always true: a version that is published already is left as it is unless the new number is newer; a shard that this
command brought is taken away again if it can't be published.
"""

import asyncio
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from tensorhub.cli import options
from tensorhub.cli.bar import Bar
from tensorhub.cli.output import json_line, line, rate
from tensorhub.cli.running import hub_of, run
from tensorhub.hub import AsyncHub
from tensorhub.shard import AsyncShard
from tensorhub.specs import TensorSpec
from tensorhub_common.errors import TensorHubError, VersionConflict
from tensorhub_common.layout import payload_bytes

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
        typer.Argument(metavar="FILE...", help="One or more .safetensors files.", exists=True, dir_okay=False),
    ],
    *,
    version: Annotated[int | None, typer.Option(help="Its number; without one, the last and one more.", min=0)] = None,
    replica: Annotated[str, typer.Option(help="The replica that holds it.")] = "published",
    job: options.Job = None,
    json: options.Json = False,
    timeout: options.Timeout = 60,
    agent: options.Agent = None,
    directory: options.Directory = None,
    nats: options.Nats = None,
) -> None:
    """Publish the weights in files. The agent goes on holding them."""
    from tensorhub.files import load_files  # noqa: PLC0415 (it imports torch, which other commands do without)

    tensors = load_files(files)
    done = run(_publish(hub_of(job, directory, nats, agent), model, version, replica, tensors, timeout))
    if json:
        json_line(done)
    else:
        line(
            f"{model} version {done.version} is published by replica {replica}: {done.tensors} tensors, "
            f"{rate(done.nbytes, done.seconds)}"
        )


async def _publish(
    connecting: Coroutine[Any, Any, AsyncHub],
    model: str,
    version: int | None,
    replica: str,
    tensors: "Mapping[str, torch.Tensor]",
    timeout_s: float,
) -> Published:
    began = time.monotonic()
    hub = await connecting
    shard: AsyncShard | None = None
    try:
        specs = {name: TensorSpec(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        shard = await hub.register(model, specs, replica=replica, timeout_s=timeout_s)
        number = await _bring_in(hub, shard, version, tensors, timeout_s)
    except BaseException:
        if shard is not None and shard.is_new:
            with suppress(TensorHubError):
                await shard.release()
        raise
    finally:
        await hub.close(release=False)
    nbytes = payload_bytes(shard.layout)
    return Published(model, number, replica, len(tensors), nbytes, time.monotonic() - began)


async def _bring_in(
    hub: AsyncHub, shard: AsyncShard, version: int | None, tensors: "Mapping[str, torch.Tensor]", timeout_s: float
) -> int:
    if shard.version is not None:
        if shard.version == version:
            return await asyncio.to_thread(_check_same, shard, version, tensors)
        await _check_newer(hub, shard.model, version)
        await shard.unpublish(timeout_s=timeout_s)
    with Bar(f"{shard.model}: copying", payload_bytes(shard.layout)) as bar:
        await asyncio.to_thread(_copy, shard, tensors, bar)
    shard.mark_loaded()
    return await shard.publish(version, timeout_s=timeout_s)


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


async def _check_newer(hub: AsyncHub, model: str, version: int | None) -> None:
    """Refuse an old number before anything is unpublished for it."""
    models = (await hub.registry.status()).models
    last = next((info.last for info in models if info.model == model), None)
    if version is not None and last is not None and version <= last:
        raise VersionConflict(
            f"version {version} of {model} is not newer than the last published one, {last}: give a higher number"
        )
