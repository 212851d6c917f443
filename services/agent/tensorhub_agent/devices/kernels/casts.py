"""Which kernel of `casts.cu` makes a cast, and the table that it looks codes up in."""

import threading
from typing import Final

from tensorhub_agent.casting.floats import Bits
from tensorhub_agent.casting.kernels import table_of
from tensorhub_agent.devices.pinned_buffer import PinnedBuffer
from tensorhub_common.devices.cuda import CudaDevice, CudaStream
from tensorhub_common.devices.device import DeviceMemory
from tensorhub_common.layout.casts import CASTABLE, dtypes_of

COMPUTED_FROM: Final = ("float64", "float32", "bfloat16")
"""What comes from the other dtypes is looked up."""


def kernel_name(cast: str) -> str:
    """Return the kernel's name for a value cast, as "float32_to_bfloat16" for "float32>bfloat16"."""
    from_dtype, to_dtype = dtypes_of(cast)
    if from_dtype in COMPUTED_FROM:
        return f"{from_dtype}_to_{to_dtype}"
    return f"lookup_{CASTABLE[from_dtype]}_to_{CASTABLE[to_dtype]}"


def table(cast: str) -> Bits | None:
    """Return the table of a cast; None where it is computed."""
    from_dtype, to_dtype = dtypes_of(cast)
    return None if from_dtype in COMPUTED_FROM else table_of(from_dtype, to_dtype)


class CastTables:
    """The tables of one GPU, each brought there with the first cast that wants it: 512 KiB at most."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._tables: dict[str, DeviceMemory] = {}
        self._lock = threading.Lock()

    def address(self, cast: str, stream: CudaStream) -> int:
        """Return where the table of a cast is; 0 for one that is computed."""
        wanted = table(cast)
        if wanted is None:
            return 0
        with self._lock:
            if cast not in self._tables:
                memory, host = self._device.allocate(wanted.nbytes), PinnedBuffer(self._device, wanted.nbytes)
                host.view[:] = wanted.tobytes()
                stream.copy(memory.address, host.address, wanted.nbytes)
                stream.record().wait()
                self._tables[cast] = memory
            return self._tables[cast].address
