"""What a GPU computes for the agent. The calls block, and are made in the threads of the pool.

An engine is a device's; `engine_of` returns it, the same one each time. Every thread has a stream of its own there, so
that one thread's next work is given while another's is being done.
"""

import threading
from collections.abc import Sequence
from typing import Final, Protocol

from tensorhub_agent.devices.boxes import DeviceBox
from tensorhub_agent.devices.changes import Changes
from tensorhub_agent.devices.columns import Columns
from tensorhub_common.devices.cuda import CudaDevice
from tensorhub_common.devices.device import Device
from tensorhub_common.devices.fake import FakeDevice


class DeviceEngine(Protocol):
    """The work of one device. Kernels reach its own memory alone; `copy` reaches the host's and all devices'."""

    def copy(self, to: Sequence[int], origin: Sequence[int], nbytes: Sequence[int]) -> None:
        """Copy `nbytes[i]` bytes from address `origin[i]` to address `to[i]`; return when all are there."""

    def digest(self, at: Columns, nbytes: Columns) -> bytes:
        """Return the digest of each piece in the device's memory, of 16 bytes, one after another."""

    def copy_and_digest(self, to: Columns, origin: Columns, nbytes: Columns) -> bytes:
        """Copy pieces within the device's memory, and return their digests: bytes are loaded once for both."""

    def receive(self, to: Columns, origin: Columns, nbytes: Columns) -> bytes:
        """Copy pieces of the host, or of another device, into the device's memory; return their digests there."""

    def send(self, to: Columns, origin: Columns, nbytes: Columns) -> bytes:
        """Copy pieces of the device's memory to the host, and return their digests.

        They are taken of memory of the engine's own, which the pieces are copied to and sent from.
        """

    def copy_boxes(self, boxes: Sequence[DeviceBox]) -> None:
        """Copy strided boxes that it `takes` within the device's memory; return when all are there."""

    def changes(self, old: Columns, new: Columns, nbytes: Columns, units: Columns) -> "Sequence[Changes | None]":
        """Compare pieces of the device's memory, at `new`, with what they were, at `old` in any memory.

        Return what changed of each, in units of `units[i]` bytes; None where that is too much to be told by itself.
        """

    def overwrite(
        self, at: Columns, nbytes: Columns, units: Columns, patches: Sequence[Sequence[Changes]]
    ) -> "tuple[bytes, Sequence[bool]]":
        """Overwrite pieces of the device's memory, each by its patches one after another.

        Return the digests of all pieces as they are then, and which were overwritten. One that was not is as it was:
        the positions of a patch are not those of as many units of the piece.
        """

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
