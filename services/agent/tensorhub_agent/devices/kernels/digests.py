"""Digests of pieces in a GPU's memory, with or without a copy of them: what `digest.cu` computes, in launches.

A launch takes `PIECES_MAX` pieces. Its tables and sums are allocated once for each thread and used again, so nothing is
allocated on the way of a read.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from tensorhub_agent.devices.kernels.library import KernelLibrary
from tensorhub_agent.devices.pinned_buffer import PinnedBuffer
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES
from tensorhub_common.devices.cuda import CudaDevice, CudaEvent, CudaStream
from tensorhub_common.devices.device import DeviceMemory

BLOCK_BYTES: Final = 1024
LANES: Final = 8
WORD_BYTES: Final = 8
LONG_BYTES_MIN: Final = 241
"""XXH3 has other forms for shorter input, which the host computes."""

PIECES_MAX: Final = 128
BLOCKS_MAX: Final = PIECES_MAX * 4096
"""The limits of one launch: 128 whole pieces are 512 MiB, and have 32 MiB of sums."""

LAUNCHES: Final = 3
"""How many are under way: while the sums of one are scrambled, which keeps few of the GPU's processors busy, those of
the next one are computed."""

THREADS: Final = 256
BLOCKS_PER_GROUP: Final = THREADS // 32 * 8
"""A warp takes eight blocks."""

FINISH_THREADS: Final = 32

_PIECE: Final = np.dtype([("to", "<u8"), ("from", "<u8"), ("nbytes", "<u8"), ("sums", "<u8")])
_TABLE_BYTES: Final = PIECES_MAX * _PIECE.itemsize
_ENDS_BYTES: Final = PIECES_MAX * LANES * WORD_BYTES
_DIGESTS_BYTES: Final = PIECES_MAX * PIECE_DIGEST_BYTES

Places = npt.NDArray[np.int64]
"""Addresses, or sizes, of pieces."""


class _Launch:
    """The memory of one launch: its table, its sums, and where its digests go."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        # By way of pinned memory, so that neither the copy of the table nor that of the digests waits for the host.
        self._host = PinnedBuffer(device, _TABLE_BYTES + _DIGESTS_BYTES)
        self.table = np.frombuffer(self._host.view, _PIECE, PIECES_MAX)
        self.table_from, self.digests_to = self._host.address, self._host.address + _TABLE_BYTES
        self._memory = device.allocate(_TABLE_BYTES + _ENDS_BYTES + _DIGESTS_BYTES)
        self.pieces = self._memory.address
        self.ends = self.pieces + _TABLE_BYTES
        self.digests = self.ends + _ENDS_BYTES
        self._sums: DeviceMemory | None = None
        self.count = 0
        self.done: CudaEvent | None = None

    def write(self, to: Places, origin: Places | None, nbytes: Places) -> int:
        """Fill the table; return how many blocks the longest piece has."""
        self.count, blocks = len(nbytes), (nbytes - 1) // BLOCK_BYTES
        ends, table = np.cumsum(blocks), self.table[: self.count]
        table["to"], table["nbytes"], table["sums"] = to, nbytes, ends - blocks
        table["from"] = 0 if origin is None else origin
        self._make_room(int(ends[-1]) * LANES * WORD_BYTES)
        return int(blocks.max())

    @property
    def sums(self) -> int:
        """Where the sums go."""
        assert self._sums is not None
        return self._sums.address

    def _make_room(self, nbytes: int) -> None:
        """Have room for sums; it grows to what the largest launch took."""
        if self._sums is None or self._sums.nbytes < nbytes:
            if self._sums is not None:
                self._sums.close()
            self._sums = self._device.allocate(max(nbytes, WORD_BYTES))

    def collect(self) -> bytes:
        """Wait for the digests, and return them."""
        if self.done is None:
            return b""
        self.done.wait()
        self.done = None
        return bytes(self._host.view[_TABLE_BYTES : _TABLE_BYTES + self.count * PIECE_DIGEST_BYTES])


class Digester:
    """The digests of one thread, on two streams: one for sums, one for what is made of them."""

    def __init__(self, device: CudaDevice, library: KernelLibrary, stream: CudaStream) -> None:
        """Allocate what launches need."""
        self._library, self._stream, self._scrambling = library, stream, device.stream()
        self._launches = tuple(_Launch(device) for _ in range(LAUNCHES))

    def digest(self, to: Places, origin: Places | None, nbytes: Places) -> bytes:
        """Copy pieces of at least `LONG_BYTES_MIN` bytes, where `origin` is given, and return their digests.

        Blocks until all is done. The digests are of what was stored: a byte is loaded once for both.
        """
        found: list[bytes] = []
        first = number = 0
        while first < len(nbytes):
            last = self._launch_end(nbytes, first)
            launch = self._launches[number % LAUNCHES]
            found.append(launch.collect())
            some = slice(first, last)
            self._begin(launch, to[some], None if origin is None else origin[some], nbytes[some])
            first, number = last, number + 1
        found += [self._launches[(number + later) % LAUNCHES].collect() for later in range(LAUNCHES)]
        return b"".join(found)

    def _launch_end(self, nbytes: Places, first: int) -> int:
        """Return up to which piece a launch reaches that begins with `first`."""
        blocks = np.cumsum((nbytes[first : first + PIECES_MAX] - 1) // BLOCK_BYTES)
        return first + max(1, int(np.searchsorted(blocks, BLOCKS_MAX, side="right")))

    def _begin(self, launch: _Launch, to: Places, origin: Places | None, nbytes: Places) -> None:
        blocks = launch.write(to, origin, nbytes)
        self._stream.copy(launch.pieces, launch.table_from, launch.count * _PIECE.itemsize)
        self._sum("block_sums" if origin is None else "copy_and_sum", launch, blocks)
        side = self._scrambling
        side.wait_for(self._stream.record())
        self._scramble(launch)
        self._finish(launch)
        side.copy(launch.digests_to, launch.digests, launch.count * PIECE_DIGEST_BYTES)
        launch.done = side.record()

    def by_kernel(self, blocks: int) -> dict[str, tuple[CudaStream, Callable[[], None]]]:
        """Return what runs one kernel of the last launch again, and on which stream, to be measured."""
        launch = self._launches[0]
        return {
            "block_sums": (self._stream, lambda: self._sum("block_sums", launch, blocks)),
            "copy_and_sum": (self._stream, lambda: self._sum("copy_and_sum", launch, blocks)),
            "scramble_sums": (self._scrambling, lambda: self._scramble(launch)),
            "finish_digests": (self._scrambling, lambda: self._finish(launch)),
        }

    def _sum(self, name: str, launch: _Launch, blocks: int) -> None:
        # The last warp of a piece copies what lies behind its last whole block.
        across = (blocks + BLOCKS_PER_GROUP) // BLOCKS_PER_GROUP
        kernel = self._library.kernel("digest", name)
        self._stream.launch(kernel, (across, launch.count), THREADS, (launch.pieces, launch.sums))

    def _scramble(self, launch: _Launch) -> None:
        groups = (launch.count * LANES + FINISH_THREADS - 1) // FINISH_THREADS
        arguments = (launch.pieces, launch.sums, launch.ends, launch.count)
        self._scrambling.launch(self._library.kernel("digest", "scramble_sums"), (groups, 1), FINISH_THREADS, arguments)

    def _finish(self, launch: _Launch) -> None:
        groups = (launch.count + FINISH_THREADS - 1) // FINISH_THREADS
        arguments = (launch.pieces, launch.ends, launch.digests, launch.count)
        self._scrambling.launch(
            self._library.kernel("digest", "finish_digests"), (groups, 1), FINISH_THREADS, arguments
        )


def short_digests(data: memoryview, nbytes: Sequence[int]) -> list[bytes]:
    """Return the digests of pieces that lie one after another in host memory."""
    found, at = [], 0
    for size in nbytes:
        found.append(xxhash.xxh3_128_digest(data[at : at + size]))
        at += size
    return found
