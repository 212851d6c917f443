"""The kernels' source, compiled for the CPU: its digests are the host's, for every length and alignment.

What only a GPU shows (that its threads don't disturb each other, and how fast they are) is for tests/gpu.
"""

import ctypes
import random

import pytest
import xxhash
from tests.kit.compiled_kernels import compiled

RUN = """
static int copying;
static const Piece* all;
static u8* room;
static void one_piece() {
    if (copying) copy_and_digest(all, room); else digest_pieces(all, room);
}
extern "C" void run(int copies, unsigned count, const Piece* pieces, u8* digests) {
    copying = copies, all = pieces, room = digests;
    for (blockIdx.x = 0; blockIdx.x < count; blockIdx.x++) run_group(GROUP, blockIdx.x, one_piece);
}
"""
LENGTHS = [241, 255, 256, 257, 1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 65537, (1 << 20) - 1, 4 << 20]


class Piece(ctypes.Structure):
    _fields_ = [
        ("to", ctypes.c_uint64),
        ("origin", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled("digest", RUN, tmp_path_factory.mktemp("kernels"))


def aligned(buffer: ctypes.Array[ctypes.c_char], shift: int) -> int:
    return (ctypes.addressof(buffer) + 15) // 16 * 16 + shift


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize(("to_shift", "from_shift"), [(0, 0), (3, 0), (8, 5), (1, 1)])
def test_digests_are_those_of_the_host(library: ctypes.CDLL, *, to_shift: int, from_shift: int, copies: bool) -> None:
    lots = random.Random(to_shift)
    lengths = LENGTHS + [lots.randrange(241, 100_000) for _ in range(10)]
    pieces, count = (Piece * len(lengths))(), len(lengths)
    held = []
    for piece, size in zip(pieces, lengths, strict=True):
        data = lots.randbytes(size)
        here = ctypes.create_string_buffer(size + 64)
        there = ctypes.create_string_buffer(b"\xee" * (size + 64), size + 64)
        piece.to, piece.origin = aligned(there, to_shift), aligned(here, from_shift)
        piece.nbytes = size
        ctypes.memmove(piece.origin if copies else piece.to, data, size)
        held.append((data, here, there))
    found = ctypes.create_string_buffer(16 * count)
    library.run(copies, count, pieces, found)
    for number, (piece, (data, _, _)) in enumerate(zip(pieces, held, strict=True)):
        assert found.raw[16 * number : 16 * number + 16] == xxhash.xxh3_128_digest(data), len(data)
        assert ctypes.string_at(piece.to, len(data)) == data
        assert ctypes.string_at(piece.to + len(data), 8) == b"\xee" * 8
