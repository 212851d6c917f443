"""Digests of pieces in a GPU's memory, with or without a copy of them: what `digest.cu` computes, in launches.

A launch takes `PIECES_MAX` pieces. Its tables and sums are allocated once for each stream and used again, so nothing is
allocated on the way of a read.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from tensorhub_agent.devices.kernels.library import KernelLibrary
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES
from tensorhub_common.devices.device import Stream

BLOCK_BYTES: Final = 1024
LANES: Final = 8
WORD_BYTES: Final = 8
LONG_BYTES_MIN: Final = 241
"""XXH3 has other forms for shorter input, which the host computes."""

PIECES_MAX: Final = 256
BLOCKS_MAX: Final = PIECES_MAX * 4096
"""A launch has at most so many pieces, and blocks: 64 MiB of sums. 256 whole pieces are 1 GiB."""

THREADS: Final = 256
BLOCKS_PER_THREADS: Final = THREADS // 4
FINISH_THREADS: Final = 32

_PIECE: Final = np.dtype([("to", "<u8"), ("from", "<u8"), ("nbytes", "<u8"), ("sums", "<u8")])


class Digester:
    """The digests of one stream, which one thread uses at a time."""

    def __init__(self, library: KernelLibrary, stream: Stream) -> None:
        """Allocate what a launch needs, on the current device of the thread."""
        cupy = library.cupy
        self._library, self._stream = library, stream
        self._external = cupy.cuda.ExternalStream(stream.handle)
        self._table = cupy.cuda.alloc_pinned_memory(PIECES_MAX * _PIECE.itemsize)
        self._host = np.frombuffer(self._table, _PIECE, PIECES_MAX)
        self._found = cupy.cuda.alloc_pinned_memory(PIECES_MAX * PIECE_DIGEST_BYTES)
        # Not from cupy's pool, whose memory is given to others in the order of another stream.
        self._pieces = cupy.cuda.memory.Memory(PIECES_MAX * _PIECE.itemsize)
        self._sums: Any = None
        self._sums_blocks = 0
        self._ends = cupy.cuda.memory.Memory(PIECES_MAX * LANES * WORD_BYTES)
        self._digests = cupy.cuda.memory.Memory(PIECES_MAX * PIECE_DIGEST_BYTES)

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
        table = self._host[:count]
        table["to"], table["nbytes"], table["sums"] = to, nbytes, ends - blocks
        table["from"] = 0 if origin is None else origin
        sums = self._room_for(int(ends[-1]))
        stream, library = self._stream, self._library
        stream.copy(self._pieces.ptr, self._table.ptr, count * _PIECE.itemsize)
        # The last threads of a piece copy what lies behind its last whole block.
        across = (int(blocks.max()) + BLOCKS_PER_THREADS) // BLOCKS_PER_THREADS
        with self._external:
            name = "block_sums" if origin is None else "copy_and_sum"
            library.kernel("digest", name)((across, count), (THREADS,), (self._pieces.ptr, sums))
            threads = (count * LANES + FINISH_THREADS - 1) // FINISH_THREADS
            scramble = library.kernel("digest", "scramble_sums")
            scramble((threads,), (FINISH_THREADS,), (self._pieces.ptr, sums, self._ends.ptr, np.uint32(count)))
            finish = library.kernel("digest", "finish_digests")
            groups = (count + FINISH_THREADS - 1) // FINISH_THREADS
            arguments = (self._pieces.ptr, self._ends.ptr, self._digests.ptr, np.uint32(count))
            finish((groups,), (FINISH_THREADS,), arguments)
        stream.copy(self._found.ptr, self._digests.ptr, count * PIECE_DIGEST_BYTES)
        stream.record().wait()
        return bytes(memoryview(self._found)[: count * PIECE_DIGEST_BYTES])

    def _room_for(self, blocks: int) -> int:
        """Return where the sums of so many blocks go; it grows to what the largest launch took."""
        if blocks > self._sums_blocks:
            self._sums = None
            self._sums = self._library.cupy.cuda.memory.Memory(max(1, blocks) * LANES * WORD_BYTES)
            self._sums_blocks = blocks
        return int(self._sums.ptr) if self._sums is not None else 0


def short_digests(data: memoryview, nbytes: Sequence[int]) -> list[bytes]:
    """Return the digests of pieces that lie one after another in host memory."""
    found, at = [], 0
    for size in nbytes:
        found.append(xxhash.xxh3_128_digest(data[at : at + size]))
        at += size
    return found
