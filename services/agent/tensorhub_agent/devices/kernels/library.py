"""The compiled kernels of one GPU, by name."""

import threading
from pathlib import Path
from typing import Any, Final

from tensorhub_common.devices.cuda import CAPABILITY_MIN, CudaDevice
from tensorhub_common.devices.device import DeviceUnavailable
from tensorhub_common.runtime.extras import missing

FOLDER: Final = Path(__file__).parent
"""Where the sources are."""

_OPTIONS: Final = ("-std=c++17", f"-I{FOLDER}")


class KernelLibrary:
    """Compiles a source with the first kernel that is wanted of it: about a second, or at once where cupy has it."""

    def __init__(self, device: CudaDevice) -> None:
        """Compile for a device. Raises `DeviceUnavailable` without cupy, and for a GPU that is too old."""
        try:
            import cupy  # noqa: PLC0415 (of the extra `cuda`; hosts without GPUs lack it)
        except ImportError as why:
            raise DeviceUnavailable(missing("memory on a GPU", ["cupy"], "cuda")) from why
        if device.capability < CAPABILITY_MIN:
            has, needs = (".".join(map(str, each)) for each in (device.capability, CAPABILITY_MIN))
            raise DeviceUnavailable(
                f"{device.uuid} has compute capability {has}, and memory='device' needs {needs} (an A100 or later): "
                "register with memory='host'"
            )
        self._cupy: Any = cupy
        self._ordinal = device.ordinal
        self._modules: dict[str, Any] = {}
        self._kernels: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def kernel(self, source: str, name: str) -> int:
        """Return the driver's handle of a kernel of the file `source`.cu, for `CudaStream.launch`."""
        with self._lock:
            if (source, name) not in self._kernels:
                if source not in self._modules:
                    code = (FOLDER / f"{source}.cu").read_text()
                    self._modules[source] = self._cupy.RawModule(code=code, options=_OPTIONS)
                with self._cupy.cuda.Device(self._ordinal):
                    self._kernels[source, name] = int(self._modules[source].get_function(name).kernel.ptr)
            return self._kernels[source, name]
