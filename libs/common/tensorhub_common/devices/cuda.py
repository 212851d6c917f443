"""GPUs by CUDA's driver: memory that processes share by file descriptors, and copies on streams of one's own.

Memory is made by `cuMemCreate` and exported as a POSIX file descriptor. That needs neither a shared namespace nor
CUDA's own IPC handles, can be mapped read-only, and outlives the process that made it for as long as anybody has a
descriptor or a mapping. Everything goes through the device's primary context, which torch and cupy use too, so streams
and addresses of all three are of one space.

The driver's calls are used and not the runtime's: a failed call of the runtime stays pending, and surfaces in some
later call of torch.
"""

import contextlib
import ctypes
import os
import threading
from typing import Any, Final

from tensorhub_common.devices.device import (
    DeviceError,
    DeviceLost,
    DeviceMemoryExhausted,
    DeviceUnavailable,
    Event,
)

CAPABILITY_MIN: Final = (8, 0)
"""Of GPUs that agents compute on: older ones have no barriers in shared memory."""

PCI_CHARS_MAX: Final = 32
"""The driver writes an address of the PCI bus into so many characters at most."""

LOST: Final = frozenset(
    f"CUDA_ERROR_{each}"
    for each in (
        "ASSERT",
        "CONTEXT_IS_DESTROYED",
        "ECC_UNCORRECTABLE",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_ADDRESS",
        "ILLEGAL_INSTRUCTION",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "LAUNCH_TIMEOUT",
        "MISALIGNED_ADDRESS",
        "MPS_CLIENT_TERMINATED",
        "NVLINK_UNCORRECTABLE",
    )
)
"""After one of these each further call of the process answers the same."""

PIN_BYTES_MAX: Final = 32 * 1024 * 1024 * 1024
"""Memory is registered in chunks of at most this: one call for 512 GiB and more fails."""

ADDRESS_MIN: Final = 1 << 32
"""No memory of a device begins below this."""

_PACKAGE: Final = "pip install 'tensorhub[cuda]'"


class _Driver:
    """The package that binds the driver, loaded with the first device of the process."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver  # noqa: PLC0415 (of the extra `cuda`; hosts without GPUs lack it)
        except ImportError as why:
            raise DeviceUnavailable(f"CUDA needs cuda-bindings, not installed here: {_PACKAGE}") from why
        self.api: Any = driver
        self._success = driver.CUresult.CUDA_SUCCESS
        self.out_of_memory = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        self.not_ready = driver.CUresult.CUDA_ERROR_NOT_READY
        try:
            self("cuInit", 0)
        except DeviceError as why:
            raise DeviceUnavailable(f"CUDA can't be used here: {why}") from why
        except Exception as why:
            # What the package raises where there is no driver's library differs between its releases.
            raise DeviceUnavailable("there is no NVIDIA driver on this machine") from why

    def __call__(self, name: str, *arguments: object) -> Any:  # noqa: ANN401 (each call returns something else)
        """Call the driver; return what it returns behind its status. Raises `DeviceError`."""
        status, *values = getattr(self.api, name)(*arguments)
        if status != self._success:
            raise self.failure(name, status)
        return values[0] if len(values) == 1 else values or None

    def failure(self, name: str, status: object) -> Exception:
        """Return the error for what a call has answered."""
        return _failure(name, status, self.words(status), self.out_of_memory)

    def words(self, status: object) -> str:
        """Return the driver's words for a status."""
        _, text = self.api.cuGetErrorString(status)
        return text.decode() if isinstance(text, bytes) else str(status)


def _failure(name: str, status: Any, words: str, out_of_memory: object) -> Exception:  # noqa: ANN401 (an enum)
    if status == out_of_memory and name == "cuMemCreate":
        return DeviceMemoryExhausted(f"{name}: {words}")
    status_name = getattr(status, "name", str(status))
    if status_name in LOST:
        return DeviceLost(f"{name} failed: {words} ({status_name}); this process can't use the GPU any more")
    return DeviceError(f"{name} failed: {words} ({status_name})")


_lock: Final = threading.Lock()
_loaded: list[_Driver] = []
_thread: Final = threading.local()
"""`device`: whose context is current in this thread for good."""

_devices: "Final[dict[int, CudaDevice]]" = {}


def _driver() -> _Driver:
    if not _loaded:
        _loaded.append(_Driver())
    return _loaded[0]


def cuda_device(ordinal: int) -> "CudaDevice":
    """Return a device of this process. Raises `DeviceUnavailable`."""
    with _lock:
        if ordinal not in _devices:
            driver = _driver()
            count = int(driver("cuDeviceGetCount"))
            if not 0 <= ordinal < count:
                raise DeviceUnavailable(f"there is no CUDA device {ordinal} here: {count} can be seen")
            _devices[ordinal] = CudaDevice(driver, ordinal)
        return _devices[ordinal]


def cuda_devices() -> "list[CudaDevice]":
    """Return all devices of this process. Raises `DeviceUnavailable` where CUDA can't be used."""
    with _lock:
        count = int(_driver()("cuDeviceGetCount"))
    return [cuda_device(ordinal) for ordinal in range(count)]


def cuda_device_of(uuid: str) -> "CudaDevice":
    """Return the device of this process that has a UUID (`GPU-…`). Raises `DeviceUnavailable`."""
    devices = cuda_devices()
    found = [each for each in devices if each.uuid == uuid]
    if not found:
        raise DeviceUnavailable(f"no GPU here is {uuid}: {len(devices)} can be seen, see CUDA_VISIBLE_DEVICES")
    return found[0]


class _Current:
    """Pushes a context and pops it; in a thread that has it current anyway it does nothing."""

    def __init__(self, device: "CudaDevice", context: Any) -> None:  # noqa: ANN401 (a CUcontext)
        self._device, self._context = device, context

    def __enter__(self) -> None:
        if getattr(_thread, "device", None) is not self._device:
            self._device.driver("cuCtxPushCurrent", self._context)

    def __exit__(self, *_: object) -> None:
        if getattr(_thread, "device", None) is not self._device:
            self._device.driver("cuCtxPopCurrent")


class CudaEvent:
    """See `Event`. A thread that waits for it sleeps."""

    def __init__(self, device: "CudaDevice", handle: Any) -> None:  # noqa: ANN401 (a CUevent)
        self._device, self.handle = device, handle

    def is_done(self) -> bool:
        """See `Event.is_done`."""
        driver = self._device.driver
        with self._device.current():
            (status,) = driver.api.cuEventQuery(self.handle)
        if status == driver.not_ready:
            return False
        if status != driver.api.CUresult.CUDA_SUCCESS:
            raise driver.failure("cuEventQuery", status)
        return True

    def wait(self) -> None:
        """See `Event.wait`."""
        with self._device.current():
            self._device.driver("cuEventSynchronize", self.handle)

    def __del__(self) -> None:
        """Destroy it; the driver does so once its work is done."""
        with contextlib.suppress(Exception):
            self._device.driver("cuEventDestroy", self.handle)


class CudaStream:
    """See `Stream`."""

    def __init__(self, device: "CudaDevice", handle: Any, *, owned: bool) -> None:  # noqa: ANN401 (a CUstream)
        self._device, self._stream, self._owned = device, handle, owned
        api = device.driver.api
        # A thread sleeps until it is done; its time is never read.
        self._flags = api.CUevent_flags.CU_EVENT_BLOCKING_SYNC | api.CUevent_flags.CU_EVENT_DISABLE_TIMING

    @property
    def handle(self) -> int:
        """See `Stream.handle`."""
        return int(self._stream)

    def copy(self, to: int, origin: int, nbytes: int) -> None:
        """See `Stream.copy`."""
        with self._device.current():
            self._device.driver("cuMemcpyAsync", to, origin, nbytes, self._stream)

    def fill(self, to: int, nbytes: int, value: int = 0) -> None:
        """See `Stream.fill`."""
        with self._device.current():
            self._device.driver("cuMemsetD8Async", to, value, nbytes, self._stream)

    def launch(self, kernel: int, grid: tuple[int, int], threads: int, arguments: tuple[int, ...]) -> None:
        """Run a kernel, by the driver's handle of it, over a grid of blocks of `threads` threads.

        An argument is an address, or a number below 2^32 (`unsigned int`), by its size.
        """
        kinds = tuple(ctypes.c_uint32 if each < ADDRESS_MIN else ctypes.c_void_p for each in arguments)
        driver = self._device.driver
        with self._device.current():
            function = driver.api.CUfunction(kernel)
            driver("cuLaunchKernel", function, *grid, 1, threads, 1, 1, 0, self._stream, (arguments, kinds), 0)

    def record(self) -> CudaEvent:
        """See `Stream.record`."""
        driver = self._device.driver
        with self._device.current():
            event = CudaEvent(self._device, driver("cuEventCreate", int(self._flags)))
            driver("cuEventRecord", event.handle, self._stream)
        return event

    def wait_for(self, event: Event) -> None:
        """See `Stream.wait_for`."""
        if not isinstance(event, CudaEvent):
            raise TypeError(f"{type(event).__name__} is no event of a CUDA device")
        with self._device.current():
            self._device.driver("cuStreamWaitEvent", self._stream, event.handle, 0)

    def close(self) -> None:
        """See `Stream.close`."""
        if self._owned:
            self._owned = False
            with self._device.current():
                self._device.driver("cuStreamDestroy", self._stream)


class CudaMemory:
    """See `DeviceMemory`."""

    def __init__(self, device: "CudaDevice", physical: Any, nbytes: int, whole: int, *, readonly: bool) -> None:  # noqa: ANN401
        """Map physical memory of `whole` bytes, and take it over."""
        self._device, self._physical, self._whole = device, physical, whole
        self.nbytes, self.readonly = nbytes, readonly
        self._lock = threading.Lock()
        driver = device.driver
        self.address = 0
        try:
            at = driver("cuMemAddressReserve", whole, 0, 0, 0)
            try:
                driver("cuMemMap", at, whole, 0, physical, 0)
                try:
                    driver("cuMemSetAccess", at, whole, [device.access(readonly=readonly)], 1)
                except DeviceError:
                    driver("cuMemUnmap", at, whole)
                    raise
            except DeviceError:
                driver("cuMemAddressFree", at, whole)
                raise
        except BaseException:
            driver("cuMemRelease", physical)
            raise
        self.address = int(at)

    def export(self) -> int:
        """See `DeviceMemory.export`. The driver exports nothing that was imported: keep the descriptor for that."""
        return int(self._device.driver("cuMemExportToShareableHandle", self._physical, self._device.posix_handle, 0))

    def close(self) -> None:
        """See `DeviceMemory.close`."""
        with self._lock:
            if not self.address:
                return
            address, self.address = self.address, 0
        driver = self._device.driver
        with self._device.current():
            driver("cuMemUnmap", address, self._whole)
            driver("cuMemAddressFree", address, self._whole)
            driver("cuMemRelease", self._physical)

    def __del__(self) -> None:
        """Unmap it with the last reference: what has work on it under way keeps one."""
        with contextlib.suppress(Exception):
            self.close()


class CudaPinned:
    """See `PinnedMemory`."""

    def __init__(self, device: "CudaDevice", address: int, nbytes: int, flags: int) -> None:
        self._device = device
        self._chunks: list[int] = []
        try:
            with device.current():
                for at in range(address, address + nbytes, PIN_BYTES_MAX):
                    size = min(PIN_BYTES_MAX, address + nbytes - at)
                    device.driver("cuMemHostRegister", at, size, flags)
                    self._chunks.append(at)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """See `PinnedMemory.close`."""
        chunks, self._chunks = self._chunks, []
        with self._device.current():
            for at in chunks:
                self._device.driver("cuMemHostUnregister", at)


class CudaDevice:
    """See `Device`; `cuda_device` returns it. It keeps the primary context for the process's life."""

    def __init__(self, driver: _Driver, ordinal: int) -> None:
        self.driver, self.ordinal = driver, ordinal
        api = driver.api
        self._device = driver("cuDeviceGet", ordinal)
        self.uuid = _uuid_text(driver("cuDeviceGetUuid", self._device).bytes)
        self.posix_handle = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._location = api.CUmemLocation()
        self._location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._location.id = ordinal
        self._properties = api.CUmemAllocationProp()
        self._properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.requestedHandleTypes = self.posix_handle
        self._properties.location = self._location
        if self.attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"):
            self._properties.allocFlags.gpuDirectRDMACapable = 1
        self._context = driver("cuDevicePrimaryCtxRetain", self._device)
        self._current = _Current(self, self._context)
        granularity = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granule_bytes = int(driver("cuMemGetAllocationGranularity", self._properties, granularity))

    def attribute(self, name: str) -> int:
        """Return an attribute of the device by its name behind `CU_DEVICE_ATTRIBUTE_`."""
        which = getattr(self.driver.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.driver("cuDeviceGetAttribute", which, self._device))

    @property
    def capability(self) -> tuple[int, int]:
        """Its compute capability."""
        return self.attribute("COMPUTE_CAPABILITY_MAJOR"), self.attribute("COMPUTE_CAPABILITY_MINOR")

    def pci_address(self) -> str:
        """Return where it is on the PCI bus, as the kernel writes it: "0000:1b:00.0"."""
        told = self.driver("cuDeviceGetPCIBusId", PCI_CHARS_MAX, self._device)
        text = told.decode() if isinstance(told, bytes) else str(told)
        return text.rstrip("\0").lower()

    def reaches(self, other: "CudaDevice") -> bool:
        """Whether its kernels can read another device's memory."""
        return bool(self.driver("cuDeviceCanAccessPeer", self._device, other._device))  # noqa: SLF001 (of the same class)

    def current(self) -> "_Current":
        """Return a block within which the device's context is current in this thread."""
        return self._current

    def adopt_thread(self) -> None:
        """Have the context current in this thread from now on, which so pays for that no more.

        For threads of our own. One that is another device's already stays so.
        """
        if getattr(_thread, "device", None) is None:
            self.driver("cuCtxSetCurrent", self._context)
            _thread.device = self

    def access(self, *, readonly: bool) -> Any:  # noqa: ANN401 (a CUmemAccessDesc)
        """Return the description of this device's access to memory."""
        api = self.driver.api
        description = api.CUmemAccessDesc()
        description.location = self._location
        flags = api.CUmemAccess_flags
        description.flags = (
            flags.CU_MEM_ACCESS_FLAGS_PROT_READ if readonly else flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        )
        return description

    def free_bytes(self) -> int:
        """See `Device.free_bytes`."""
        with self.current():
            free, _ = self.driver("cuMemGetInfo")
        return int(free)

    def total_bytes(self) -> int:
        """See `Device.total_bytes`."""
        return int(self.driver("cuDeviceTotalMem", self._device))

    def finish(self) -> None:
        """See `Device.finish`."""
        with self.current():
            self.driver("cuCtxSynchronize")

    def stream(self) -> CudaStream:
        """See `Device.stream`."""
        with self.current():
            least, _ = self.driver("cuCtxGetStreamPriorityRange")
            flags = int(self.driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
            return CudaStream(self, self.driver("cuStreamCreateWithPriority", flags, least), owned=True)

    def stream_of(self, handle: int) -> CudaStream:
        """See `Device.stream_of`."""
        return CudaStream(self, self.driver.api.CUstream(handle), owned=False)

    def allocate(self, nbytes: int) -> CudaMemory:
        """See `Device.allocate`."""
        whole = self._whole(nbytes)
        try:
            physical = self.driver("cuMemCreate", whole, self._properties, 0)
        except DeviceMemoryExhausted:
            raise DeviceMemoryExhausted(
                f"{nbytes} bytes do not fit on {self.uuid}: it has {self.free_bytes()} of {self.total_bytes()} bytes "
                "free"
            ) from None
        with self.current():
            return CudaMemory(self, physical, nbytes, whole, readonly=False)

    def import_memory(self, fd: int, nbytes: int, *, readonly: bool) -> CudaMemory:
        """See `Device.import_memory`."""
        # The driver takes a descriptor's number and not its ownership.
        own = os.dup(fd)
        try:
            physical = self.driver("cuMemImportFromShareableHandle", own, self.posix_handle)
        finally:
            os.close(own)
        with self.current():
            return CudaMemory(self, physical, nbytes, self._whole(nbytes), readonly=readonly)

    def pin(self, address: int, nbytes: int, *, readonly: bool = False) -> CudaPinned:
        """See `Device.pin`."""
        api = self.driver.api
        flags = int(api.CU_MEMHOSTREGISTER_PORTABLE)
        if readonly:
            flags |= int(api.CU_MEMHOSTREGISTER_READ_ONLY)
        return CudaPinned(self, address, nbytes, flags)

    def _whole(self, nbytes: int) -> int:
        return max(1, -(-nbytes // self.granule_bytes)) * self.granule_bytes


def _uuid_text(raw: bytes) -> str:
    text = raw.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:32]}"
