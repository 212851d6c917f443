"""What every kind of device does: the promises that `cuda` and `fake` keep, and the errors that both raise.

Addresses are of one space: a copy takes those of host and of device memory alike, as CUDA's unified addressing does.
Work is asynchronous: a method of a stream returns at once, and its work is done in the order of the stream. Work of two
streams is ordered by events alone; a host thread knows that work is done once it has waited for an event behind it.

Every method may be called from any thread, and leaves the context that is current in that thread as it was. What waits
(`Event.wait`, `pin`, `allocate`, closing) lets go of the GIL.
"""

from typing import Protocol

from tensorhub_common.errors import MemoryExhausted, TensorHubError


class DeviceError(TensorHubError):
    """The driver has refused or failed; the message names the call and says what to do where that is known."""


class DeviceLost(DeviceError):
    """A kernel or the device's memory has failed: no work of this process can be done there any more."""


class DeviceUnavailable(DeviceError):
    """There is no such device here, no driver, or not the package that speaks to it."""


class DeviceMemoryExhausted(MemoryExhausted):
    """The device has not so much free memory."""


class Event(Protocol):
    """A point in the work of one stream."""

    def is_done(self) -> bool:
        """Whether all work before it is done. Raises `DeviceError` where that work has failed."""

    def wait(self) -> None:
        """Return once all work before it is done. Raises `DeviceError` where that work has failed."""


class Stream(Protocol):
    """Work of one device that is done in its order."""

    @property
    def handle(self) -> int:
        """What the driver and other libraries know it by (a `CUstream`)."""

    def copy(self, to: int, origin: int, nbytes: int) -> None:
        """Copy bytes from one address to another. Both must stay valid until an event behind it is done."""

    def fill(self, to: int, nbytes: int, value: int = 0) -> None:
        """Set each of the bytes at an address of the device to `value`."""

    def record(self) -> Event:
        """Return the point behind all work that was given so far."""

    def wait_for(self, event: Event) -> None:
        """Do what is given from now on after the event, which may be another stream's of this device."""

    def close(self) -> None:
        """Let go of it once its work is done; a stream of `Device.stream_of` stays its owner's."""


class DeviceMemory(Protocol):
    """Memory of a device, mapped into this process.

    All work on it must be done before it is closed. The last reference closes it too, so what has work under way keeps
    one.
    """

    @property
    def address(self) -> int:
        """Where it begins, as the device sees it. Host code must not follow it."""

    @property
    def nbytes(self) -> int:
        """How many bytes were asked for; what is taken of the device is whole granules (`Device.granule_bytes`)."""

    @property
    def readonly(self) -> bool:
        """Whether work that writes it fails."""

    def export(self) -> int:
        """Return a new file descriptor, by which other processes of this host import the memory. The caller closes it.

        The memory stands for as long as any descriptor or mapping of it is left, in any process. Raises `DeviceError`
        for memory that was imported.
        """

    def close(self) -> None:
        """Unmap it. Once more is harmless."""


class PinnedMemory(Protocol):
    """Host memory that a device copies at full speed, and asynchronously."""

    def close(self) -> None:
        """Give it back to the host. No work on it may be under way. Once more is harmless."""


class Device(Protocol):
    """One GPU, as this process sees it."""

    @property
    def ordinal(self) -> int:
        """Its number in this process, which CUDA_VISIBLE_DEVICES changes."""

    @property
    def uuid(self) -> str:
        """What every process knows it by, as `GPU-…` in lower case."""

    @property
    def granule_bytes(self) -> int:
        """Memory is allocated in multiples of this."""

    def free_bytes(self) -> int:
        """Return how many bytes of the device are free."""

    def total_bytes(self) -> int:
        """Return how much memory the device has."""

    def finish(self) -> None:
        """Return once all work of this process on the device is done. Never on the way of a read: it stops engines."""

    def stream(self) -> Stream:
        """Make a stream of the lowest priority, which waits for no other stream by itself."""

    def stream_of(self, handle: int) -> Stream:
        """Return a stream that somebody else has made, such as torch's current one."""

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Allocate memory that can be exported, and map it; its bytes are undefined.

        Raises:
            DeviceMemoryExhausted: The device has not so much free.
        """

    def import_memory(self, fd: int, nbytes: int, *, readonly: bool) -> DeviceMemory:
        """Map memory that another process has exported. The descriptor stays the caller's.

        Raises:
            DeviceError: It is no memory of this device, or shorter.
        """

    def pin(self, address: int, nbytes: int, *, readonly: bool = False) -> PinnedMemory:
        """Register a mapped range of host memory, in whole pages. It takes about 0.1 s a GB.

        Raises:
            DeviceError: The driver refuses, for example because a part of it is pinned already.
        """
