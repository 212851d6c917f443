"""Patches: exact to the bit, small where little changed, none where that is no gain, and deaf to hostile bytes."""

import struct

import numpy as np
import pytest
import zstandard

from tensorhub_agent.encodings.byte_planes import Damaged, unit_of
from tensorhub_agent.encodings.patch import apply, make

MIB = 1024 * 1024
HEAD = struct.Struct("<BBHI")


def bf16(chance: np.random.Generator, count: int) -> np.ndarray:
    """Return the upper halves of small normal float32 values, as bfloat16 has them."""
    return (chance.standard_normal(count, dtype=np.float32) * 0.02).view(np.uint16)[1::2].copy()


def patched(old: np.ndarray, new: np.ndarray) -> tuple[bytes, bytes]:
    unit = unit_of(old.itemsize)
    patch = make(memoryview(old.tobytes()), memoryview(new.tobytes()), unit)
    assert patch is not None
    piece = bytearray(old.tobytes())
    apply(patch, memoryview(piece), unit)
    return patch, bytes(piece)


@pytest.mark.parametrize(("itemsize", "unit"), [(1, 1), (2, 2), (3, 1), (4, 4), (6, 2), (8, 8), (12, 4), (16, 8)])
def test_values_are_compared_in_units_that_divide_them(itemsize: int, unit: int) -> None:
    assert unit_of(itemsize) == unit


def test_a_nan_keeps_its_payload_and_zero_its_sign() -> None:
    old = np.zeros(1000, np.uint32)
    new = old.copy()
    new[7], new[8], new[900] = 0x7FC00001, 0x80000000, 0xFFC12345
    assert patched(old, new)[1] == new.tobytes()


def test_equal_pieces_have_an_empty_patch_and_an_empty_piece_too() -> None:
    assert make(memoryview(b"abcd"), memoryview(b"abcd"), 2) == b""
    assert make(memoryview(b""), memoryview(b""), 8) == b""
    apply(b"", memoryview(b""), 8)


@pytest.mark.parametrize("chance_of", ["anywhere", "in runs"])
def test_one_percent_of_a_bfloat16_piece_is_far_below_three_percent(chance_of: str) -> None:
    chance = np.random.default_rng(1)
    old = bf16(chance, 2 * MIB)
    new, fresh = old.copy(), bf16(chance, 2 * MIB)
    which = chance.random(len(old)) < 0.01
    if chance_of == "in runs":
        which = np.repeat(chance.random(len(old) // 1024) < 0.01, 1024)
    new[which] = fresh[which]
    patch, piece = patched(old, new)
    assert piece == new.tobytes()
    assert len(patch) <= 0.0155 * new.nbytes


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_many_changes_take_a_bitmap(share: float) -> None:
    chance = np.random.default_rng(2)
    old = bf16(chance, MIB)
    new = old.copy()
    new[chance.random(len(old)) < share] ^= 1
    patch, piece = patched(old, new)
    assert patch[0] == 2
    assert piece == new.tobytes()


def test_long_gaps_are_stepped_over() -> None:
    old = np.zeros(2 * MIB, np.uint16)
    new = old.copy()
    for at in (0, 254, 255, 256, 255 + 256 + 255, MIB, 2 * MIB - 1):
        new[at] = 0xBEEF
    assert patched(old, new)[1] == new.tobytes()


def test_a_piece_that_is_new_has_no_patch() -> None:
    chance = np.random.default_rng(3)
    old, new = chance.bytes(4096), chance.bytes(4096)
    assert make(memoryview(old), memoryview(new), 2) is None


def column(plain: bytes, *, packed: bool = False) -> tuple[int, bytes]:
    body = zstandard.ZstdCompressor().compress(plain) if packed else plain
    return len(body) | (packed << 31), body


def by_hand(form: int, unit: int, changed: int, *columns: tuple[int, bytes], zeros: int = 0) -> bytes:
    heads = b"".join(struct.pack("<I", length) for length, _ in columns)
    return HEAD.pack(form, unit, zeros, changed) + heads + b"".join(body for _, body in columns)


def test_what_it_looks_like() -> None:
    piece = bytearray(600)
    apply(by_hand(1, 1, 2, column(b"\x03\xff\x01"), column(b"ab")), memoryview(piece), 1)
    assert piece == b"\0\0\0a" + b"\0" * (255 + 1) + b"b" + b"\0" * (600 - 261)


def test_patches_in_a_row_take_no_more_memory_than_a_few_pieces() -> None:
    """Each of them is a few bytes that claim most of a piece; only so many are believed."""
    old, new = np.zeros(MIB, np.uint16), np.zeros(MIB, np.uint16)
    new[: MIB * 4 // 5] = 1
    patch, _ = patched(old, new)
    assert len(patch) < 1000
    piece = bytearray(old.tobytes())
    apply(patch * 5, memoryview(piece), 2)
    assert piece == new.tobytes()
    piece = bytearray(old.tobytes())
    with pytest.raises(Damaged, match="patches in a row change more than 4 times"):
        apply(patch * 6, memoryview(piece), 2)
    assert piece == old.tobytes()


@pytest.mark.parametrize(
    "hostile",
    [
        b"\x01",
        by_hand(3, 1, 1, column(b"\x00"), column(b"a")),
        by_hand(1, 2, 1, column(b"\x00"), column(b"a"), column(b"a")),
        by_hand(1, 1, 1, column(b"\x00"), column(b"a"), zeros=1),
        by_hand(1, 1, 0, column(b""), column(b"")),
        by_hand(1, 1, 17, column(bytes(17)), column(bytes(17))),
        by_hand(1, 1, 1, column(b"\x10"), column(b"a")),
        by_hand(1, 1, 1, column(b"\xff"), column(b"a")),
        by_hand(1, 1, 2, column(b"\x00\x0f"), column(b"aa")),
        by_hand(1, 1, 1, column(b"\x00\x00"), column(b"a")),
        by_hand(1, 1, 1, column(b"\x00"), column(b"ab")),
        by_hand(1, 1, 1, column(b"\x00"), (2, b"a")),
        by_hand(1, 1, 1, column(b"\x00"))[:-2],
        by_hand(2, 1, 1, column(b"\x00\x00"), column(b"a")),
        by_hand(2, 1, 1, column(b"\x80"), column(b"a")),
        by_hand(2, 1, 1, column(b"\xc0\x00"), column(b"a")),
        by_hand(1, 1, 1, column(bytes(10_000_000), packed=True), column(b"a")),
        by_hand(1, 1, 1, ((5 | 1 << 31), b"nozst"), column(b"a")),
        by_hand(1, 1, 1, column(b"\x00"), column(b"a")) + b"\x01",
    ],
    ids=str,
)
def test_a_hostile_patch_is_refused_and_nothing_is_written(hostile: bytes) -> None:
    piece = bytearray(16)
    with pytest.raises(Damaged):
        apply(hostile, memoryview(piece), 1)
    assert not any(piece)
