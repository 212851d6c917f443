"""`tensorhub pull`: a version, from its holders, into one .safetensors file.

The command joins the hub as a replica of its own for as long as it reads. It takes the same shards as the holder, so
every piece is verified against the digests that the log keeps, and puts whole tensors together from their boxes.

Always true: the file appears whole or not at all; the replica is gone afterwards, also when the pull failed.
"""

import asyncio
import importlib
import os
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from tensorhub._agent.session import OnProgress
from tensorhub._control import lost_versions
from tensorhub.aio.hub import AsyncHub
from tensorhub.aio.shard import AsyncShard
from tensorhub.cli import options
from tensorhub.cli.output import json_line, line, rate, readable
from tensorhub.cli.progress_bar import Bar
from tensorhub.cli.runner import TIDY_S, AgentTarget, CommandDeadline, door_of, hub_of, need, run
from tensorhub.cli.temporary_replica import TemporaryReplica
from tensorhub_common.errors import LayoutMismatch, VersionUnavailable
from tensorhub_common.layout.layout import TensorEntry, payload_bytes
from tensorhub_common.layout.parts import Shape
from tensorhub_common.layout.quantized import quantized_kind
from tensorhub_common.protocol.queries import ReplicaInfo, VersionInfo, VersionState

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
    out: Annotated[Path, typer.Argument(metavar="OUT.safetensors", help="The file to write.")],
    *,
    version: Annotated[
        int | None,
        typer.Option(
            help="A number, or 'latest': the newest that is available.",
            parser=options.version_or_latest,
            metavar="VERSION",
            show_default="latest",
        ),
    ] = None,
    job: options.Job = None,
    json: options.Json = False,
    timeout: options.Timeout = 120,
    agent: options.Agent = None,
    directory: options.Directory = None,
    nats: options.Nats = None,
) -> None:
    """Write a version into a file."""
    _check_writable(out)
    door = door_of(job, directory, nats, agent)
    need("pull", "torch", "safetensors", extra="torch")
    # Both take seconds to import, which is no waiting for the hub.
    importlib.import_module("tensorhub._tensors.safetensors_files")
    importlib.import_module("tensorhub._tensors.description")
    done = run(_pull(door, model, version, out, CommandDeadline(timeout)))
    if json:
        json_line(done)
    else:
        line(f"{model} version {done.version} is in {out}: {done.tensors} tensors, {rate(done.nbytes, done.seconds)}")


def _check_writable(out: Path) -> None:
    """Refuse what can be no file of weights before anything is read for it."""
    hint = "OUT.safetensors"
    if str(out) == options.STDIO:
        raise typer.BadParameter(
            "weights are not written to stdout, since a file of them appears whole or not at all: give a file's name "
            "(./- for one that is called so)",
            param_hint=hint,
        )
    folder = out.absolute().parent
    try:
        if out.is_dir():
            raise typer.BadParameter(f"{out} is a directory; give the name of a file", param_hint=hint)
        if not folder.is_dir():
            raise typer.BadParameter(f"there is no directory {folder}", param_hint=hint)
        if out.exists() and not out.is_file():
            # The file takes its place, which no device or pipe may lose.
            raise typer.BadParameter(f"{out} is no regular file; give the name of one", param_hint=hint)
    except OSError as error:
        raise typer.BadParameter(f"{out} can't be written: {error.strerror}", param_hint=hint) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"nothing may be written into {folder}", param_hint=hint)


async def _pull(door: AgentTarget, model: str, wanted: int | None, out: Path, bound: CommandDeadline) -> Pulled:
    from tensorhub._tensors.safetensors_files import save_file  # noqa: PLC0415 (it imports torch, which other commands do without)

    guest = TemporaryReplica(model, "pull")
    async with hub_of(door, bound, guest.release) as hub:
        async with bound.held():
            version, shards, seconds = await _insist(hub, guest, wanted, bound)
        tensors = await asyncio.to_thread(_assembled, shards)
        await asyncio.to_thread(save_file, out, tensors, {"model": model, "version": str(version)})
        nbytes = sum(payload_bytes(shard.layout) for shard in shards)
        return Pulled(model, version, readable(out), len(tensors), nbytes, seconds)


async def _insist(
    hub: AsyncHub, guest: TemporaryReplica, wanted: int | None, bound: CommandDeadline
) -> tuple[int, list[AsyncShard], float]:
    model = guest.model
    for attempt in range(1, ATTEMPTS_MAX + 1):
        versions = await hub.versions(model, timeout_s=bound.left_s("asking the registry for the versions"))
        replicas = await hub.replicas(model, timeout_s=bound.left_s("asking the registry for the replicas"))
        version, holders = _choose(versions, replicas, model, wanted)
        holder = next((replica for replica in replicas if replica.replica in holders), None)
        if holder is None or holder.version != version:
            # It has changed between the two questions.
            error = _unavailable(model, wanted)
        else:
            shards = await guest.register_as(hub, holder, bound)
            began = time.monotonic()
            try:
                await _replicate(shards, version, model, bound.left_s(f"reading version {version}"))
            except VersionUnavailable as why:
                error = why
                await asyncio.gather(*(shard.release(timeout_s=TIDY_S) for shard in shards))
            else:
                return version, shards, time.monotonic() - began
        if wanted is not None or attempt == ATTEMPTS_MAX:
            raise error
    raise AssertionError


def _choose(
    versions: Sequence[VersionInfo], replicas: Sequence[ReplicaInfo], model: str, wanted: int | None
) -> tuple[int, Collection[str]]:
    """Return the version to pull and the replicas that hold it: the newest available one, unless one is wanted."""
    held = {each.version: each for each in versions if each.holders}
    if wanted is not None and (found := held.get(wanted)) is not None and found.state == VersionState.RETIRED:
        raise VersionUnavailable(f"version {wanted} of {model} was retired by a rewind: pull the latest")
    latest = max((each.version for each in held.values() if each.state == VersionState.AVAILABLE), default=None)
    version = latest if wanted is None else wanted
    if version is None or version not in held:
        became = lost_versions.explain(model, versions, replicas, wanted, time.time())
        raise VersionUnavailable(became) if became else _unavailable(model, wanted)
    return version, held[version].holders


def _unavailable(model: str, wanted: int | None) -> VersionUnavailable:
    what = "no version" if wanted is None else f"no version {wanted}"
    return VersionUnavailable(
        f"{model} has {what} that anybody holds now: 'tensorhub versions {model}' shows what there was"
    )


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
    from tensorhub._tensors.description import box_of  # noqa: PLC0415 (it imports torch, which other commands do without)

    if not entry.parts:
        yield entry.name, entry.global_shape, entry.offset, tensor
    for part in entry.parts:
        if not part.is_padding:
            name, whole = part.name, part.global_shape
            if part.cast:
                # As a checkpoint in fp8 has them: values under the weight's name, and scales beside it.
                kind = quantized_kind(part.cast)
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
