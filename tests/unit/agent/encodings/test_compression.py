"""Packed pieces: the same bytes again, fewer on the way where they shrink, and hostile ones refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_agent.devices.planes import planes_of, units_in
from tensorhub_agent.encodings.columns import Damaged, stored
from tensorhub_agent.encodings.compression import pack, unpack

MIB = 1024 * 1024


def weights(count: int) -> bytes:
    chance = np.random.default_rng(1)
    return (chance.standard_normal(count, dtype=np.float32) * 0.02).view(np.uint16)[1::2].tobytes()


def unpacked(packed: bytes, nbytes: int, unit: int) -> bytes:
    piece = bytearray(nbytes)
    unpack(packed, memoryview(piece), unit)
    return bytes(piece)


def test_bfloat16_weights_lose_more_than_a_quarter_of_their_bytes() -> None:
    piece = weights(2 * MIB)
    packed = pack(memoryview(piece), 2)
    assert 0 < len(packed) <= 0.72 * len(piece)
    assert unpacked(packed, len(piece), 2) == piece


@pytest.mark.parametrize("nbytes", [0, 2, 1000, MIB])
def test_what_does_not_shrink_is_not_packed(nbytes: int) -> None:
    assert pack(memoryview(np.random.default_rng(2).bytes(nbytes)), 2) == b""


@given(st.binary(max_size=300), st.integers(1, 60), st.sampled_from((1, 2, 4, 8)))
def test_what_is_packed_comes_out_again(pattern: bytes, times: int, unit: int) -> None:
    piece = pattern * times
    piece = piece[: len(piece) // unit * unit]
    packed = pack(memoryview(piece), unit)
    if packed:
        assert len(packed) < len(piece)
        assert unpacked(packed, len(piece), unit) == piece


@given(st.data())
def test_damage_is_refused_or_stays_within_the_piece(data: st.DataObject) -> None:
    piece = bytes(range(40)) * 100
    packed = bytearray(pack(memoryview(piece), 4))
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    del packed[data.draw(st.integers(0, len(packed))) :]
    guarded = bytearray(b"\xa5" * 8 + bytes(len(piece)) + b"\xa5" * 8)
    try:
        unpack(bytes(packed), memoryview(guarded)[8:-8], 4)
    except Damaged:
        assert not any(guarded[8:-8])
    assert guarded[:8] == guarded[-8:] == b"\xa5" * 8


@pytest.mark.parametrize(("nbytes", "more", "why"), [(996, b"", "."), (1004, b"", "."), (1000, b"x", "follow")])
def test_a_piece_of_another_size_and_bytes_behind_it_are_refused(nbytes: int, more: bytes, why: str) -> None:
    packed = stored(planes_of(units_in(memoryview(bytes(1000)), 4), 4))
    with pytest.raises(Damaged, match=why):
        unpacked(packed + more, nbytes, 4)
