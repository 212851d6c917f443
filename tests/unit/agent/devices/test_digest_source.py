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
static u64* room;
static void one_lane() {
    if (copying) copy_and_sum(all, room); else block_sums(all, room);
    ended[lane] = true;
}
static void one_warp(unsigned first) {
    for (unsigned each = 0; each < 32; each++) {
        getcontext(&lanes[each]);
        lanes[each].uc_stack.ss_sp = stacks[each];
        lanes[each].uc_stack.ss_size = sizeof stacks[each];
        lanes[each].uc_link = &caller;
        makecontext(&lanes[each], one_lane, 0);
        ended[each] = false;
        exchanges[each] = 0;
    }
    for (bool busy = true; busy;) {
        busy = false;
        for (lane = 0; lane < 32; lane++) {
            threadIdx.x = first + lane;
            if (!ended[lane]) swapcontext(&caller, &lanes[lane]);
            busy |= !ended[lane];
        }
    }
}
extern "C" void run(int copies, unsigned across, unsigned count, const Piece* pieces, u64* sums, u64* ends, u8* found) {
    copying = copies, all = pieces, room = sums, blockDim.x = 256;
    for (blockIdx.y = 0; blockIdx.y < count; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < across; blockIdx.x++)
            for (unsigned warp = 0; warp < 256; warp += 32) one_warp(warp);
    blockDim.x = 32;
    for (blockIdx.x = 0; blockIdx.x < (count * 8 + 31) / 32; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < 32; threadIdx.x++) scramble_sums(pieces, sums, ends, count);
    for (blockIdx.x = 0; blockIdx.x < (count + 31) / 32; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < 32; threadIdx.x++) finish_digests(pieces, ends, found, count);
}
"""
LENGTHS = [241, 255, 256, 257, 1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 65537, (1 << 20) - 1, 4 << 20]


class Piece(ctypes.Structure):
    _fields_ = [
        ("to", ctypes.c_uint64),
        ("origin", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("sums", ctypes.c_uint64),
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
    pieces, count, sums = (Piece * len(lengths))(), len(lengths), 0
    held = []
    for piece, size in zip(pieces, lengths, strict=True):
        data = lots.randbytes(size)
        here = ctypes.create_string_buffer(size + 64)
        there = ctypes.create_string_buffer(b"\xee" * (size + 64), size + 64)
        piece.to, piece.origin = aligned(there, to_shift), aligned(here, from_shift)
        piece.nbytes, piece.sums = size, sums
        ctypes.memmove(piece.origin if copies else piece.to, data, size)
        sums += (size - 1) // 1024
        held.append((data, here, there))
    room = ctypes.create_string_buffer(sums * 64 + 64)
    ends, found = (ctypes.c_uint64 * (8 * count))(), ctypes.create_string_buffer(16 * count)
    across = (max(lengths) // 1024 + 64) // 64
    library.run(copies, across, count, pieces, ctypes.c_void_p(aligned(room, 0)), ends, found)
    for number, (piece, (data, _, _)) in enumerate(zip(pieces, held, strict=True)):
        assert found.raw[16 * number : 16 * number + 16] == xxhash.xxh3_128_digest(data), len(data)
        assert ctypes.string_at(piece.to, len(data)) == data
        assert ctypes.string_at(piece.to + len(data), 8) == b"\xee" * 8
