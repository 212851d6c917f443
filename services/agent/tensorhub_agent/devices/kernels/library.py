"""The compiled kernels of one GPU, by name."""

import threading
from importlib import resources
from typing import Any, Final

from tensorhub_common.devices.device import DeviceUnavailable
from tensorhub_common.runtime.extras import missing

_OPTIONS: Final = ("-std=c++17",)


class KernelLibrary:
    """Compiles a source with the first kernel that is wanted of it: about a second, or at once where cupy has it."""

    def __init__(self, ordinal: int) -> None:
        """Compile for the device with this number in the process. Raises `DeviceUnavailable` without cupy."""
        try:
            import cupy  # noqa: PLC0415 (of the extra `cuda`; hosts without GPUs lack it)
        except ImportError as why:
            raise DeviceUnavailable(missing("memory on a GPU", ["cupy"], "cuda")) from why
        self.cupy: Any = cupy
        self._ordinal = ordinal
        self._modules: dict[str, Any] = {}
        self._kernels: dict[tuple[str, str], Any] = {}
        self._lock = threading.Lock()

    def kernel(self, source: str, name: str) -> Any:  # noqa: ANN401 (a cupy kernel)
        """Return a kernel of the file `source`.cu: call it with grid, block and arguments, in a stream's context."""
        with self._lock:
            found = self._kernels.get((source, name))
            if found is None:
                if source not in self._modules:
                    code = resources.files(__package__).joinpath(f"{source}.cu").read_text()
                    self._modules[source] = self.cupy.RawModule(code=code, options=_OPTIONS)
                with self.cupy.cuda.Device(self._ordinal):
                    found = self._kernels[source, name] = self._modules[source].get_function(name)
            return found
