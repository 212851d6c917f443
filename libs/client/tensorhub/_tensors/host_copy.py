"""A shard whose tensors are on a GPU and whose hub memory is the host's: the way that works wherever CUDA does.

The tensors stay where they are, and the segment has a copy of them. It is pinned, so the GPU copies at the full speed
of its bus, on a stream of its own of the lowest priority: the trainer's and the engine's work goes on meanwhile.

Always true:
- What `publish` hands over is what the tensors hold behind all work that was queued on the caller's stream: the copy
  waits for that on the GPU, and the agent is told only when the copy is done.
- A read changes the tensors only once every byte has come and was verified. The copy waits for what is queued on the
  caller's stream, and what the caller queues afterwards waits for the copy. Until then they show the old version.
- The addresses of the tensors never change, so a CUDA graph goes on with them. Where a caller has given a tensor other
  memory, publishing is refused (residency.py).
- With `stages` a version comes over the bus into other memory of the GPU first, beside what the tensors show. They
  are overwritten from there, at the speed of the GPU's own memory.
- One of the two copies is under way at a time: the caller has no other call on the shard meanwhile.
- The segment is not written while a version in it is published, nor while the agent reads into it.
"""

import mmap
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import torch

from tensorhub._tensors import fsdp, streams
from tensorhub._tensors.adoption import adopt
from tensorhub._tensors.streams import Queued
from tensorhub_common.devices.device import Device, DeviceError, Event, PinnedMemory, Stream
from tensorhub_common.devices.fake import FakeStream, Span
from tensorhub_common.errors import MemoryExhausted
from tensorhub_common.layout.layout import placements, segment_bytes
from tensorhub_common.observability import logs

if TYPE_CHECKING:
    from tensorhub._tensors.description import Description
    from tensorhub._tensors.segment_mapping import Memory

COPIED_BYTES: Final = 128 * 1024 * 1024
"""The agent is told how far a copy to the host has come at the end of the first tensor after this number of bytes. It
hashes them while the rest comes."""

log = logs.logger(__name__)


class ShardName(Protocol):
    """How a shard was registered."""

    @property
    def where(self) -> str: ...


class RegisteredShard(Protocol):
    """What this needs of a shard that the agent has registered."""

    @property
    def spec(self) -> ShardName: ...

    found: int | None
    version: int | None
    fresh: bool


@dataclass(frozen=True, slots=True)
class _Copied:
    """A tensor on a GPU, and where hub memory has its bytes."""

    device: Device
    tensor: torch.Tensor
    host: torch.Tensor
    end: int
    """Where these bytes end in hub memory."""
    stage: torch.Tensor | None = None
    """Memory of the GPU for the next version; None: it comes straight from the host."""


class HostCopy:
    """The tensors of one shard on GPUs, and their copy in hub memory."""

    def __init__(
        self, described: "Description", memory: "Memory", attachment: "RegisteredShard", *, stages: bool = False
    ) -> None:
        """Bind what was described to the memory of a shard that was just registered. It blocks while it pins.

        Where the shard was found with a version, the tensors show it afterwards.
        """
        self._stages = stages
        self._staged: int | None = None
        """The version that the stages have, and the tensors don't yet."""
        from tensorhub._tensors.segment_mapping import tensors_at  # noqa: PLC0415 (a circle)

        self._attachment = attachment
        found = attachment.found is not None
        with torch.inference_mode(mode=False), torch.no_grad():
            host = tensors_at(described.layout, memory)
            own = {name: value for name, value in described.values.items() if not streams.is_on_gpu(value)}
            if not found:
                described.copy_in(host, own)
            here = tuple(member for member in described.members if not streams.is_on_gpu(member.tensor))
            adopt(here, host)
        for member in described.members:
            if member.books is not None and member not in here:
                fsdp.settle(member.books)
        given = {name: value for name, value in described.values.items() if isinstance(value, torch.Tensor)}
        standing = {name: _local(given[name]) if name in given and name not in own else host[name] for name in host}
        self.tensors = described.shown(standing)
        values = described.shown(host)
        entries = {entry.name: entry for entry in described.layout.tensors}
        self._nbytes = segment_bytes(described.layout)
        self._copied = tuple(
            _Copied(device, standing[name], values[name], start + entry.nbytes)
            for (name, entry), start in zip(entries.items(), placements(described.layout), strict=True)
            if standing[name].numel() and (device := streams.device_of(standing[name])) is not None
        )
        self.given = {name: given[of] for name, of in described.names.items() if of in given and of not in own}
        """What the caller has given on a GPU, by every name."""
        self.devices = {each.device for each in self._copied}
        self._streams: dict[Device, Stream] = {device: device.stream() for device in self.devices}
        self._pinned = self._pin(memory)
        self._shown: int | None = None
        self._reads = found
        """The segment has what a read has brought, or may be being written by one; not what the tensors held."""
        self._is_free = attachment.fresh
        """The agent has said that no process reads or writes the segment, and nothing was begun since."""
        if found:
            self.bring_to_gpu(self.queued())

    def _pin(self, memory: "Memory") -> PinnedMemory | None:
        """Pin the mapping for as long as this object is there. Without that copies take several times as long."""
        device = next(iter(self.devices), None)
        if device is None or not len(memory):
            # There is not a byte.
            return None
        assert isinstance(memory, mmap.mmap)
        address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        try:
            pinned = device.pin(address, len(memory))
        except DeviceError as why:
            log.warning(
                "hub memory could not be pinned, so copies from and to the GPU are slow",
                shard=self._attachment.spec.where,
                why=str(why),
            )
            return None
        # The finalizer holds on to the mapping: it is there until the driver has let go of it.
        weakref.finalize(self, _unpin, device, pinned, memory).atexit = False
        return pinned

    @property
    def version(self) -> int | None:
        """What the tensors show."""
        return self._shown if self.is_due else self._attachment.version

    @property
    def is_due(self) -> bool:
        """Whether a read has brought a version that the tensors do not show yet."""
        held = self._attachment.version
        return self._reads and held is not None and held != self._shown

    @property
    def wants_stage(self) -> bool:
        """Whether what the tensors are to show is to be staged before."""
        return self._stages and self.is_due and self._staged != self._attachment.version

    @property
    def is_free(self) -> bool:
        """Whether the segment may be written without asking the agent."""
        return self._is_free

    def read_begins(self) -> None:
        """The agent may write the segment from now on."""
        self._reads, self._is_free = True, False

    def freed(self) -> None:
        """The agent has said that no process reads or writes the segment."""
        self._is_free = True

    def published(self, version: int) -> None:
        """The tensors' values have become a version."""
        self._shown, self._is_free = version, False

    def queued(self) -> Queued:
        """Take what the caller has queued up to now. Call it in the caller's thread."""
        return Queued(self.devices)

    def bring_to_host(self, queued: Queued, came: Callable[[int], None] | None = None) -> None:
        """Copy all tensors to hub memory, behind what was queued; return when that is done.

        `came` is told meanwhile, in this thread, how many of the memory's first bytes are there.
        """
        self._reads = False
        self._wait_for(queued)
        marks: list[tuple[int, list[Event]]] = []
        begun = 0
        for each in self._copied:
            copy_tensor(self._streams[each.device], each.host, each.tensor)
            if each.end - begun >= COPIED_BYTES:
                marks.append((each.end, [stream.record() for stream in self._streams.values()]))
                begun = each.end
        marks.append((self._nbytes, [stream.record() for stream in self._streams.values()]))
        for nbytes, ends in marks:
            for end in ends:
                end.wait()
            if came is not None:
                came(nbytes)

    def stage(self) -> None:
        """Copy hub memory to other memory of the GPU; return when that is done. Raises `MemoryExhausted`."""
        version = self._attachment.version
        if any(each.stage is None for each in self._copied):
            streams_of = self._streams
            self._copied = tuple(
                replace(each, stage=_room_for(each.tensor, streams_of[each.device])) for each in self._copied
            )
        for each in self._copied:
            assert each.stage is not None
            copy_tensor(self._streams[each.device], each.stage, each.host)
        for end in [stream.record() for stream in self._streams.values()]:
            end.wait()
        self._staged = version

    def bring_to_gpu(self, queued: Queued) -> None:
        """Have all tensors show the version, behind what was queued and before what will be; return when that is done.

        It comes from where it was staged, or from hub memory.
        """
        version = self._attachment.version
        is_staged = self._staged is not None and self._staged == version
        self._wait_for(queued)
        for each in self._copied:
            origin = each.stage if is_staged and each.stage is not None else each.host
            copy_tensor(self._streams[each.device], each.tensor, origin)
        ends = {device: stream.record() for device, stream in self._streams.items()}
        for device, end in ends.items():
            queued.streams[device].wait_for(end)
        for end in ends.values():
            end.wait()
        self._shown, self._staged = version, None

    def _wait_for(self, queued: Queued) -> None:
        for device, stream in self._streams.items():
            stream.wait_for(queued.points[device])


def _room_for(tensor: torch.Tensor, stream: Stream) -> torch.Tensor:
    """Return memory beside a tensor for its values, packed. Work of this stream alone may touch it.

    Torch gives memory out again in the order of the stream that it was taken on.
    """
    is_fake = isinstance(stream, FakeStream)
    own = nullcontext() if is_fake else torch.cuda.stream(torch.cuda.ExternalStream(stream.handle, tensor.device))
    try:
        with own:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    except torch.OutOfMemoryError as why:
        raise MemoryExhausted(
            f"a version can't be staged on the GPU beside the tensors ({why}); install='in-place' takes no memory more"
        ) from why


def copy_tensor(stream: Stream, to: torch.Tensor, origin: torch.Tensor) -> None:
    """Have a stream copy the values of one tensor to another of its dtype and shape, however they lie."""
    if to.is_contiguous() and origin.is_contiguous() and not origin.is_conj() and not origin.is_neg():
        stream.copy(to.data_ptr(), origin.data_ptr(), to.numel() * to.element_size())
        return
    if isinstance(stream, FakeStream):
        spans = (_span(to, writes=True), _span(origin, writes=False))
        stream.run("a strided copy", lambda: _copy_values(to, origin), spans)
        return
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle)), torch.no_grad():
        to.copy_(origin, non_blocking=True)


def _copy_values(to: torch.Tensor, origin: torch.Tensor) -> None:
    with torch.no_grad():
        to.copy_(origin)


def _span(tensor: torch.Tensor, *, writes: bool) -> Span:
    """Return all that a strided tensor may touch."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return Span(tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size(), writes)


def _local(value: torch.Tensor) -> torch.Tensor:
    """Return a given tensor without its gradient: the same memory."""
    local: torch.Tensor = getattr(value, "_local_tensor", value)
    return local.detach()


def _unpin(device: Device, pinned: PinnedMemory, memory: "Memory") -> None:
    """Give the pages back once all copies are done: a shard may be dropped while some are queued."""
    device.finish()
    pinned.close()
    del memory
