"""The streams of torch on which a caller's work is queued, and which device a tensor is on.

A stream is current in a thread, so it is asked for in the caller's: by an async call before its first await, and for a
call of the sync SDK, which runs in a thread of its own, by `capture` before it goes there.
"""

from collections.abc import Iterable, Mapping
from contextvars import ContextVar, Token
from typing import Final

import torch

from tensorhub_common.devices.cuda import cuda_device
from tensorhub_common.devices.device import Device, Event, Stream
from tensorhub_common.devices.fake import FakeDevice

_captured: Final[ContextVar[dict[int, int] | None]] = ContextVar("tensorhub_streams", default=None)
_used: Final[set[int]] = set()
"""The ordinals of the devices that a shard of this process is on."""


def device_of(tensor: torch.Tensor) -> Device | None:
    """Return the GPU that a tensor is on; None for other tensors. Raises `DeviceUnavailable`."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    if local.device.type != "cuda":
        return None
    ordinal = local.device.index
    _used.add(ordinal)
    return cuda_device(ordinal)


def capture() -> "Token[dict[int, int] | None]":
    """Note the streams that are current in this thread for what is begun from here; `release` ends that."""
    return _captured.set({ordinal: torch.cuda.current_stream(ordinal).cuda_stream for ordinal in _used})


def release(token: "Token[dict[int, int] | None]") -> None:
    """Note them no longer."""
    _captured.reset(token)


def caller_stream(device: Device) -> Stream:
    """Return the stream on which the caller's work on a device is queued."""
    if isinstance(device, FakeDevice):
        return device.stream_of(0)
    captured = _captured.get()
    if captured is not None and device.ordinal in captured:
        return device.stream_of(captured[device.ordinal])
    return device.stream_of(torch.cuda.current_stream(device.ordinal).cuda_stream)


def is_on_gpu(value: object) -> bool:
    """Tell whether a registered value is a tensor on a GPU."""
    return isinstance(value, torch.Tensor) and device_of(value) is not None


def any_on_gpu(values: Mapping[str, object]) -> bool:
    """Tell whether any of the registered values is."""
    return any(map(is_on_gpu, values.values()))


def finish(values: Mapping[str, object]) -> None:
    """Wait until nothing more is queued that could write the given tensors: once, while they are registered."""
    found = {device_of(value) for value in values.values() if isinstance(value, torch.Tensor)}
    for device in found:
        if device is not None:
            device.finish()


class Queued:
    """What a caller has queued on some devices at one point in time. Make it in the caller's thread."""

    def __init__(self, devices: Iterable[Device]) -> None:
        """Take the point that the caller's streams have come to."""
        self.streams = {device: caller_stream(device) for device in devices}
        self.points: dict[Device, Event] = {device: stream.record() for device, stream in self.streams.items()}

    def wait(self) -> None:
        """Block until all of it is done."""
        for point in self.points.values():
            point.wait()
