"""Digests of pieces in a GPU's memory, with or without a copy of them: what `digest.cu` computes, in launches.

A launch takes `PIECES_MAX` pieces. Its tables are allocated once for each thread and used again, so a read allocates
nothing.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from tensorhub_agent.devices.columns import Columns
from tensorhub_agent.devices.kernels.library import KernelLibrary
from tensorhub_agent.devices.pinned_buffer import PinnedBuffer
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES
from tensorhub_common.devices.cuda import CudaDevice, CudaEvent, CudaStream

LONG_BYTES_MIN: Final = 241
"""XXH3 has other forms for shorter input, which the host computes."""

PIECES_MAX: Final = 2048
"""The limit of one launch: 8 GiB of whole pieces."""

LAUNCHES: Final = 3
"""How many are under way: the GPU goes from one to the next while this thread collects the digests of a third."""

THREADS: Final = 13 * 32
"""Those of a group, as in the source: twelve warps that sum and one that scrambles."""

_PIECE: Final = np.dtype([("to", "<u8"), ("from", "<u8"), ("nbytes", "<u8")])
_TABLE_BYTES: Final = PIECES_MAX * _PIECE.itemsize
_DIGESTS_BYTES: Final = PIECES_MAX * PIECE_DIGEST_BYTES


class _Launch:
    """The memory of one launch: its table, and where its digests go."""

    def __init__(self, device: CudaDevice) -> None:
        # By way of pinned memory, so that neither the copy of the table nor that of the digests waits for the host.
        self._host = PinnedBuffer(device, _TABLE_BYTES + _DIGESTS_BYTES)
        self._table = np.frombuffer(self._host.view, _PIECE, PIECES_MAX)
        self._memory = device.allocate(_TABLE_BYTES + _DIGESTS_BYTES)
        self.pieces = self._memory.address
        self.digests = self.pieces + _TABLE_BYTES
        self.count = 0
        self._done: CudaEvent | None = None

    def begin(self, stream: CudaStream, kernel: int, to: Columns, origin: Columns | None, nbytes: Columns) -> None:
        """Have the pieces digested once the stream comes to it."""
        self.count = count = len(nbytes)
        table = self._table[:count]
        table["to"], table["from"], table["nbytes"] = to, 0 if origin is None else origin, nbytes
        stream.copy(self.pieces, self._host.address, count * _PIECE.itemsize)
        self.run(stream, kernel)
        stream.copy(self._host.address + _TABLE_BYTES, self.digests, count * PIECE_DIGEST_BYTES)
        self._done = stream.record()

    def run(self, stream: CudaStream, kernel: int) -> None:
        """Run the kernel over the pieces of the table."""
        stream.launch(kernel, (self.count, 1), THREADS, (self.pieces, self.digests))

    def collect(self) -> bytes:
        """Wait for the digests, and return them; there are none where nothing was begun."""
        if self._done is None:
            return b""
        self._done.wait()
        self._done = None
        return bytes(self._host.view[_TABLE_BYTES : _TABLE_BYTES + self.count * PIECE_DIGEST_BYTES])


class Digester:
    """The digests of one thread, in the order of one stream."""

    def __init__(self, device: CudaDevice, library: KernelLibrary, stream: CudaStream) -> None:
        """Allocate what launches need."""
        self._library, self._stream = library, stream
        self._launches = tuple(_Launch(device) for _ in range(LAUNCHES))
        self._begun = 0
        self._found: list[bytes] = []

    def begin(self, to: Columns, origin: Columns | None, nbytes: Columns) -> None:
        """Have pieces of at least `LONG_BYTES_MIN` bytes copied, where `origin` is given, and digested.

        The digests are of what is stored: a byte is loaded once for both. The call waits only where `LAUNCHES` are
        under way.
        """
        kernel = self._library.kernel("digest", "digest_pieces" if origin is None else "copy_and_digest")
        for first in range(0, len(nbytes), PIECES_MAX):
            some = slice(first, first + PIECES_MAX)
            launch = self._launches[self._begun % LAUNCHES]
            self._found.append(launch.collect())
            launch.begin(self._stream, kernel, to[some], None if origin is None else origin[some], nbytes[some])
            self._begun += 1

    def collect(self) -> bytes:
        """Wait for all that was begun since the last call; return its digests in that order."""
        self._found += [self._launches[(self._begun + later) % LAUNCHES].collect() for later in range(LAUNCHES)]
        found, self._found = b"".join(self._found), []
        return found

    def by_kernel(self) -> dict[str, Callable[[], None]]:
        """Return what runs each kernel over the pieces of the first launch again, to be measured."""
        launch, kernel = self._launches[0], self._library.kernel
        return {
            name: lambda name=name: launch.run(self._stream, kernel("digest", name))  # type: ignore[misc]
            for name in ("digest_pieces", "copy_and_digest")
        }
