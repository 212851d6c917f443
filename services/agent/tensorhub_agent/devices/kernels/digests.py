"""Digests of pieces in a GPU's memory, with or without a copy of them: what `digest.cu` computes, in launches.

A launch takes `PIECES_MAX` pieces. Its tables and sums are allocated once for each stream and used again, so nothing is
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
from tensorhub_common.devices.cuda import CudaDevice, CudaStream
from tensorhub_common.devices.device import DeviceMemory

BLOCK_BYTES: Final = 1024
LANES: Final = 8
WORD_BYTES: Final = 8
LONG_BYTES_MIN: Final = 241
"""XXH3 has other forms for shorter input, which the host computes."""

PIECES_MAX: Final = 256
BLOCKS_MAX: Final = PIECES_MAX * 4096
"""A launch has at most so many pieces, and blocks: 64 MiB of sums. 256 whole pieces are 1 GiB."""

THREADS: Final = 256
BLOCKS_PER_GROUP: Final = THREADS // 32 * 8
"""A warp takes eight blocks."""
FINISH_THREADS: Final = 32

_PIECE: Final = np.dtype([("to", "<u8"), ("from", "<u8"), ("nbytes", "<u8"), ("sums", "<u8")])


class Digester:
    """The digests of one stream, which one thread uses at a time."""

    def __init__(self, device: CudaDevice, library: KernelLibrary, stream: CudaStream) -> None:
        """Allocate what a launch needs."""
        self._device, self._library, self._stream = device, library, stream
        # By way of pinned memory, so that neither the copy of the table nor that of the digests waits for the host.
        self._host = PinnedBuffer(device, PIECES_MAX * (_PIECE.itemsize + PIECE_DIGEST_BYTES))
        self._table = np.frombuffer(self._host.view, _PIECE, PIECES_MAX)
        self._found = self._host.view[PIECES_MAX * _PIECE.itemsize :]
        words = PIECES_MAX * LANES * WORD_BYTES
        self._memory = device.allocate(PIECES_MAX * (_PIECE.itemsize + PIECE_DIGEST_BYTES) + words)
        self._pieces = self._memory.address
        self._ends = self._pieces + PIECES_MAX * _PIECE.itemsize
        self._digests = self._ends + words
        self._sums: DeviceMemory | None = None

    def digest(
        self, to: npt.NDArray[np.int64], origin: npt.NDArray[np.int64] | None, nbytes: npt.NDArray[np.int64]
    ) -> bytes:
        """Copy pieces of at least `LONG_BYTES_MIN` bytes, where `origin` is given, and return their digests.

        Blocks until all is done. The digests are of what was stored: a byte is loaded once for both.
        """
        found, first = [], 0
        while first < len(nbytes):
            last = self._launch_end(nbytes, first)
            found.append(
                self._launch(to[first:last], None if origin is None else origin[first:last], nbytes[first:last])
            )
            first = last
        return b"".join(found)

    def _launch_end(self, nbytes: npt.NDArray[np.int64], first: int) -> int:
        """Return up to which piece a launch reaches that begins with `first`."""
        blocks = np.cumsum((nbytes[first : first + PIECES_MAX] - 1) // BLOCK_BYTES)
        return first + max(1, int(np.searchsorted(blocks, BLOCKS_MAX, side="right")))

    def _launch(
        self, to: npt.NDArray[np.int64], origin: npt.NDArray[np.int64] | None, nbytes: npt.NDArray[np.int64]
    ) -> bytes:
        count, blocks = len(nbytes), (nbytes - 1) // BLOCK_BYTES
        ends = np.cumsum(blocks)
        table = self._table[:count]
        table["to"], table["nbytes"], table["sums"] = to, nbytes, ends - blocks
        table["from"] = 0 if origin is None else origin
        sums, stream = self._room_for(int(ends[-1])), self._stream
        stream.copy(self._pieces, self._host.address, count * _PIECE.itemsize)
        self._sum("block_sums" if origin is None else "copy_and_sum", count, int(blocks.max()), sums)
        self._scramble(count, sums)
        self._finish(count)
        stream.copy(self._host.address + PIECES_MAX * _PIECE.itemsize, self._digests, count * PIECE_DIGEST_BYTES)
        stream.record().wait()
        return bytes(self._found[: count * PIECE_DIGEST_BYTES])

    def by_kernel(self, count: int, blocks: int) -> dict[str, Callable[[], None]]:
        """Return what gives the stream one kernel of the last launch again, to be measured."""
        sums = self._room_for(count * blocks)
        return {
            "block_sums": lambda: self._sum("block_sums", count, blocks, sums),
            "copy_and_sum": lambda: self._sum("copy_and_sum", count, blocks, sums),
            "scramble_sums": lambda: self._scramble(count, sums),
            "finish_digests": lambda: self._finish(count),
        }

    def _sum(self, name: str, count: int, blocks: int, sums: int) -> None:
        # The last warp of a piece copies what lies behind its last whole block.
        across = (blocks + BLOCKS_PER_GROUP) // BLOCKS_PER_GROUP
        self._stream.launch(self._library.kernel("digest", name), (across, count), THREADS, (self._pieces, sums))

    def _scramble(self, count: int, sums: int) -> None:
        groups = (count * LANES + FINISH_THREADS - 1) // FINISH_THREADS
        arguments = (self._pieces, sums, self._ends, count)
        self._stream.launch(self._library.kernel("digest", "scramble_sums"), (groups, 1), FINISH_THREADS, arguments)

    def _finish(self, count: int) -> None:
        groups = (count + FINISH_THREADS - 1) // FINISH_THREADS
        arguments = (self._pieces, self._ends, self._digests, count)
        self._stream.launch(self._library.kernel("digest", "finish_digests"), (groups, 1), FINISH_THREADS, arguments)

    def _room_for(self, blocks: int) -> int:
        """Return where the sums of so many blocks go; it grows to what the largest launch took."""
        nbytes = max(1, blocks) * LANES * WORD_BYTES
        if self._sums is None or self._sums.nbytes < nbytes:
            if self._sums is not None:
                self._sums.close()
            self._sums = self._device.allocate(nbytes)
        return self._sums.address


def short_digests(data: memoryview, nbytes: Sequence[int]) -> list[bytes]:
    """Return the digests of pieces that lie one after another in host memory."""
    found, at = [], 0
    for size in nbytes:
        found.append(xxhash.xxh3_128_digest(data[at : at + size]))
        at += size
    return found
