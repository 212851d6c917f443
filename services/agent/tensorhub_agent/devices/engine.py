"""What a GPU computes for the agent. The calls block, and are made in the threads of the pool.

An engine is a device's; `engine_of` returns it, the same one each time. Every thread has a stream of its own there, so
that one thread's next work is given while another's is being done.
"""

import threading
from collections.abc import Sequence
from typing import Final, Protocol

from tensorhub_agent.devices.boxes import DeviceBox
from tensorhub_agent.devices.columns import Columns
from tensorhub_common.devices.cuda import CudaDevice
from tensorhub_common.devices.device import Device
from tensorhub_common.devices.fake import FakeDevice


class DeviceEngine(Protocol):
    """The work of one device. Addresses are of host and device memory alike."""

    def copy(self, to: Sequence[int], origin: Sequence[int], nbytes: Sequence[int]) -> None:
        """Copy `nbytes[i]` bytes from address `origin[i]` to address `to[i]`; return when all are there."""

    def copy_and_digest(self, to: Columns, origin: Columns | None, nbytes: Columns) -> bytes:
        """Copy pieces, and return the digest of each, of 16 bytes, one after another.

        At least one end is memory of the device. Bytes are loaded once, to be digested and to be stored. On their way
        to the host they are stored in memory of the engine's own, which is then sent. Without `origin` the pieces are
        only hashed where they are, in memory of the device.
        """

    def copy_boxes(self, boxes: Sequence[DeviceBox]) -> None:
        """Copy strided boxes that it `takes` within the device's memory; return when all are there."""

    def takes(self, box: DeviceBox) -> bool:
        """Whether the device copies a box as it is. What it does not take is to be converted on the host."""


_engines: Final[dict[Device, DeviceEngine]] = {}
_lock: Final = threading.Lock()


def engine_of(device: Device) -> DeviceEngine:
    """Return the engine of a device. Raises `DeviceUnavailable` where its packages are missing."""
    with _lock:
        if device not in _engines:
            _engines[device] = _made(device)
        return _engines[device]


def _made(device: Device) -> DeviceEngine:
    if isinstance(device, FakeDevice):
        from tensorhub_agent.devices.fake_engine import FakeEngine  # noqa: PLC0415 (each needs packages of its own)

        return FakeEngine(device)
    from tensorhub_agent.devices.cuda_engine import CudaEngine  # noqa: PLC0415

    assert isinstance(device, CudaDevice)
    return CudaEngine(device)
