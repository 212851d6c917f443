"""Patches in the threads of the pool: each piece gets its own, and what is damaged changes nothing."""

import numpy as np
import pytest
import xxhash

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.encodings.codec_tasks import Coded, patch_pieces
from tensorhub_agent.encodings.patch import make

PIECES = 40
NBYTES = 100_000


def versions() -> tuple[bytes, bytes]:
    chance = np.random.default_rng(1)
    old = np.frombuffer(chance.bytes(PIECES * NBYTES), np.uint16)
    new = old.copy()
    new[chance.random(len(old)) < 0.01] ^= 3
    return old.tobytes(), new.tobytes()


def cut() -> Spans:
    at = [number * NBYTES for number in range(PIECES)]
    return Spans(at, at, [NBYTES] * PIECES)


def patches_of(old: bytes, new: bytes) -> list[Coded]:
    pairs = [(memoryview(old)[at : at + NBYTES], memoryview(new)[at : at + NBYTES]) for at in cut().to]
    return [(memoryview(make(a, b, 2) or b""), 2) for a, b in pairs]


def digests_of(view: bytes) -> list[bytes]:
    return [xxhash.xxh3_128_digest(view[at : at + NBYTES]) for at in cut().to]


@pytest.mark.parametrize("beside", [False, True])
async def test_all_pieces_stand_patched_and_hashed(pool: CopyPool, beside: bool) -> None:  # noqa: FBT001
    old, new = versions()
    destination = bytearray(len(old)) if beside else bytearray(old)
    base = memoryview(old) if beside else None
    found = await patch_pieces(pool, memoryview(destination), base, cut(), patches_of(old, new)).result()
    assert destination == new
    assert found == b"".join(digests_of(new))


async def test_a_damaged_patch_leaves_its_piece_and_has_no_digest(pool: CopyPool) -> None:
    old, new = versions()
    patches = patches_of(old, new)
    patches[3] = memoryview(b"\x01\x02nonsense"), 2
    destination = bytearray(old)
    found = await patch_pieces(pool, memoryview(destination), None, cut(), patches).result()
    assert found[3 * 16 : 4 * 16] == bytes(16)
    assert destination[3 * NBYTES : 4 * NBYTES] == old[3 * NBYTES : 4 * NBYTES]
    assert destination[4 * NBYTES :] == new[4 * NBYTES :]


async def test_what_does_not_fit_is_refused(pool: CopyPool) -> None:
    piece = memoryview(bytearray(10))
    with pytest.raises(ValueError, match="destination"):
        patch_pieces(pool, piece, None, Spans([5], [5], [6]), [(memoryview(b""), 1)])
    with pytest.raises(ValueError, match="base"):
        patch_pieces(pool, piece, memoryview(b"123"), Spans([0], [0], [4]), [(memoryview(b""), 1)])
    with pytest.raises(ValueError, match="patches"):
        patch_pieces(pool, piece, None, Spans([0], [0], [4]), [])
    with pytest.raises(ValueError, match="written"):
        patch_pieces(pool, memoryview(b"1234"), None, Spans([0], [0], [4]), [(memoryview(b""), 1)])
