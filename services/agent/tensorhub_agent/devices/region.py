"""A region of device memory, which code that only hands it on takes for a `MemoryRegion` like any other."""

from dataclasses import dataclass

from tensorhub_common.devices.device import Device, DeviceMemory


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRegion:
    """Bytes of an allocation. It keeps the allocation, whose owner closes it when no region is in use any more."""

    device: Device
    memory: DeviceMemory
    offset: int
    nbytes: int

    @classmethod
    def of(cls, device: Device, memory: DeviceMemory) -> "DeviceRegion":
        """Return all of an allocation."""
        return cls(device, memory, 0, memory.nbytes)

    @property
    def address(self) -> int:
        """Where it begins, as the device sees it."""
        return self.memory.address + self.offset

    @property
    def readonly(self) -> bool:
        """Whether it can't be written."""
        return self.memory.readonly

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, span: slice, /) -> "DeviceRegion":
        begin, end, step = span.indices(self.nbytes)
        if step != 1:
            raise ValueError("a region is cut into runs of bytes: a step is not possible")
        return DeviceRegion(self.device, self.memory, self.offset + begin, max(0, end - begin))
