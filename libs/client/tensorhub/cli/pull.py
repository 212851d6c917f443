"""`tensorhub pull`: a version, from whoever holds it, into one .safetensors file.

The command joins the hub as a replica of its own for as long as it reads. It takes the same shards as the holder, so
every piece is verified against the digests that the log keeps, and puts whole tensors together from their boxes.

Always true: the file appears whole or not at all; the replica is gone afterwards, also when the pull failed.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from tensorhub.cli import options
from tensorhub.cli.bar import Bar
from tensorhub.cli.output import json_line, line, rate
from tensorhub.cli.running import hub_of, run
from tensorhub.hub import AsyncHub
from tensorhub.session import OnProgress
from tensorhub.shard import AsyncShard
from tensorhub.specs import TensorSpec
from tensorhub_common.derived import derived
from tensorhub_common.errors import LayoutMismatch, VersionUnavailable
from tensorhub_common.layout import Shape, TensorEntry, payload_bytes
from tensorhub_common.wire.asks import ReplicaInfo

if TYPE_CHECKING:
    import torch

ATTEMPTS_MAX: Final = 3
"""The latest version may go while it is being asked for; then the next one is pulled."""


class Pulled(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    model: str
    version: int
    file: str
    tensors: int
    nbytes: int
    seconds: float


def pull(
    model: options.Model,
    out: Annotated[Path, typer.Argument(metavar="OUT.safetensors", help="The file to write.", dir_okay=False)],
    *,
    version: Annotated[str, typer.Option(help="A number, or 'latest'.")] = "latest",
    job: options.Job = None,
    json: options.Json = False,
    timeout: options.Timeout = 120,
    agent: options.Agent = None,
    directory: options.Directory = None,
    nats: options.Nats = None,
) -> None:
    """Write a version into a file."""
    if version != "latest" and not (version.isascii() and version.isdecimal()):
        raise typer.BadParameter(f"{version!r} is neither a number nor 'latest'", param_hint="--version")
    if not out.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no directory {out.absolute().parent}", param_hint="OUT.safetensors")
    if out.exists() and not out.is_file():
        # The file takes its place, which no device or pipe may lose.
        raise typer.BadParameter(f"{out} is no regular file; give the name of one", param_hint="OUT.safetensors")
    wanted = None if version == "latest" else int(version)
    done = run(_pull(hub_of(job, directory, nats, agent), model, wanted, out, timeout))
    if json:
        json_line(done)
    else:
        line(f"{model} version {done.version} is in {out}: {done.tensors} tensors, {rate(done.nbytes, done.seconds)}")


async def _pull(
    connecting: Coroutine[Any, Any, AsyncHub], model: str, wanted: int | None, out: Path, timeout_s: float
) -> Pulled:
    from tensorhub.files import save_file  # noqa: PLC0415 (it imports torch, which other commands do without)

    async with await connecting as hub:
        version, shards, seconds = await _insist(hub, model, wanted, timeout_s)
        tensors = await asyncio.to_thread(_assembled, shards)
        await asyncio.to_thread(save_file, out, tensors, {"model": model, "version": str(version)})
        nbytes = sum(payload_bytes(shard.layout) for shard in shards)
        return Pulled(model, version, str(out), len(tensors), nbytes, seconds)


async def _insist(
    hub: AsyncHub, model: str, wanted: int | None, timeout_s: float
) -> tuple[int, list[AsyncShard], float]:
    for attempt in range(1, ATTEMPTS_MAX + 1):
        version, holder = _choose(await hub.replicas(model), model, wanted)
        shards = await _register(hub, model, holder)
        began = time.monotonic()
        try:
            await _replicate(shards, version, model, timeout_s)
        except VersionUnavailable:
            if wanted is not None or attempt == ATTEMPTS_MAX:
                raise
            await asyncio.gather(*(shard.release() for shard in shards))
        else:
            return version, shards, time.monotonic() - began
    raise AssertionError


def _choose(replicas: Sequence[ReplicaInfo], model: str, wanted: int | None) -> tuple[int, ReplicaInfo]:
    """Return the version to pull and a replica that holds it."""
    holders = {replica.version: replica for replica in reversed(replicas) if replica.version is not None}
    version = max(holders, default=None) if wanted is None else wanted
    if version is None or version not in holders:
        what = "no version" if wanted is None else f"no version {wanted}"
        raise VersionUnavailable(
            f"{model} has {what} that anybody holds now: 'tensorhub versions {model}' shows what there was"
        )
    return version, holders[version]


async def _register(hub: AsyncHub, model: str, holder: ReplicaInfo) -> list[AsyncShard]:
    """Bring the same shards as the holder's, without values."""
    name = f"pull-{token_hex(6)}"
    shards: list[AsyncShard] = []
    for member in holder.members:
        layout = await hub.registry.layout(member.layout)
        specs = {
            entry.name: TensorSpec(entry.shape, entry.dtype, entry.global_shape, entry.offset, entry.parts)
            for entry in layout.tensors
        }
        shards.append(
            await hub.register(model, specs, replica=name, shard=member.shard, shards=holder.shards, spot=True)
        )
    return shards


async def _replicate(shards: Sequence[AsyncShard], version: int, model: str, timeout_s: float) -> None:
    total = sum(payload_bytes(shard.layout) for shard in shards)
    done = [0] * len(shards)
    with Bar(f"{model} version {version}", total) as bar:

        def progress_of(number: int) -> OnProgress:
            def progress(done_bytes: int, _: int) -> None:
                done[number] = done_bytes
                bar.to(sum(done), total)

            return progress

        reads = [
            shard.replicate(version, timeout_s=timeout_s, on_progress=progress_of(number))
            for number, shard in enumerate(shards)
        ]
        outcomes = await asyncio.gather(*reads, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


def _assembled(shards: Sequence[AsyncShard]) -> "dict[str, torch.Tensor]":
    """Put whole tensors together from the shards' boxes, and from the parts of fused ones."""
    wholes: dict[str, Shape] = {}
    boxes: dict[str, dict[tuple[Shape, Shape], torch.Tensor]] = {}
    for shard in shards:
        for entry in shard.layout.tensors:
            for name, whole, offset, box in _boxes(entry, shard.tensors[entry.name]):
                wholes[name] = whole
                boxes.setdefault(name, {})[offset, tuple(box.shape)] = box
    return {name: _whole(name, wholes[name], standing) for name, standing in boxes.items()}


def _boxes(entry: TensorEntry, tensor: "torch.Tensor") -> "Iterator[tuple[str, Shape, Shape, torch.Tensor]]":
    """Yield the boxes of global tensors that a registered one has: name, global shape, offset, values."""
    from tensorhub.tensors import box_of  # noqa: PLC0415 (it imports torch, which other commands do without)

    if not entry.parts:
        yield entry.name, entry.global_shape, entry.offset, tensor
    for part in entry.parts:
        if not part.is_padding:
            name, whole = part.name, part.global_shape
            if part.cast:
                # As a checkpoint in fp8 has them: values under the weight's name, and scales beside it.
                kind = derived(part.cast)
                name, whole = name + (kind.scheme.suffix if kind.is_scales else ""), kind.shape(whole)
            yield name, whole, part.offset, box_of(part, tensor).reshape(part.extent)


def _whole(name: str, shape: Shape, boxes: "dict[tuple[Shape, Shape], torch.Tensor]") -> "torch.Tensor":
    import torch  # noqa: PLC0415 (other commands do without)

    for tensor in boxes.values():
        if tensor.shape == shape:
            return tensor.contiguous()
    if not _cover(list(boxes), shape):
        raise LayoutMismatch(
            f"the holder's shards have only a part of tensor {name!r}, so no whole file can be written"
        )
    whole = torch.empty(shape, dtype=next(iter(boxes.values())).dtype)
    for (offset, size), tensor in boxes.items():
        whole[tuple(slice(at, at + length) for at, length in zip(offset, size, strict=True))] = tensor
    return whole


def _cover(boxes: Sequence[tuple[Shape, Shape]], shape: Shape) -> bool:
    """Tell whether boxes, which may overlap, have every element of a tensor: (offset, shape) each.

    Their edges cut the tensor into cells, of which each lies in a box or outside of it.
    """
    import torch  # noqa: PLC0415 (other commands do without)

    edges = [
        sorted({0, size, *(at for offset, length in boxes for at in (offset[dim], offset[dim] + length[dim]))})
        for dim, size in enumerate(shape)
    ]
    numbers = [{at: number for number, at in enumerate(along)} for along in edges]
    covered = torch.zeros([len(along) - 1 for along in edges], dtype=torch.bool)
    for offset, length in boxes:
        cells = zip(numbers, offset, length, strict=True)
        covered[tuple(slice(number[at], number[at + size]) for number, at, size in cells)] = True
    return bool(covered.all())
