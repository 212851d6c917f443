"""Patches: exact to the bit, small where little changed, none where that is no gain, and deaf to hostile bytes."""

import ctypes
import itertools
import random
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.devices.columns import Columns
from tensorhub_agent.devices.fake_engine import FakeEngine
from tensorhub_agent.devices.region import DeviceRegion
from tensorhub_agent.encodings.codec_tasks import Coded, patch_pieces
from tensorhub_agent.encodings.columns import Damaged, unit_of
from tensorhub_agent.encodings.patch import apply, make
from tensorhub_common.devices.fake import FakeDevice, FakeEvent

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


def test_equal_pieces_have_an_empty_patch_a_new_one_none_and_units_divide_the_values() -> None:
    assert make(memoryview(b"abcd"), memoryview(b"abcd"), 2) == make(memoryview(b""), memoryview(b""), 8) == b""
    apply(b"", memoryview(b""), 8)
    chance = np.random.default_rng(3)
    assert make(memoryview(chance.bytes(4096)), memoryview(chance.bytes(4096)), 2) is None
    assert [unit_of(size) for size in (1, 2, 3, 4, 6, 8, 12, 16)] == [1, 2, 1, 4, 2, 8, 4, 8]


def test_every_bit_counts_and_long_gaps_are_stepped_over() -> None:
    """A NaN keeps its payload, and zero its sign."""
    old = np.zeros(2 * MIB, np.uint32)
    new = old.copy()
    new[7], new[8], new[900] = 0x7FC00001, 0x80000000, 0xFFC12345
    for at in (0, 254, 255, 256, 255 + 256 + 255, MIB, 2 * MIB - 1):
        new[at] = 0xBEEF
    assert patched(old, new)[1] == new.tobytes()


@pytest.mark.parametrize(("share", "run"), [(0.01, 1), (0.01, 1024), (0.2, 1), (0.5, 1)])
def test_one_percent_of_a_bfloat16_piece_is_far_below_three_percent_and_many_take_a_bitmap(
    share: float, run: int
) -> None:
    chance = np.random.default_rng(1)
    old = bf16(chance, 2 * MIB)
    new, fresh = old.copy(), bf16(chance, 2 * MIB)
    which = np.repeat(chance.random(len(old) // run) < share, run)
    new[which] = fresh[which] if share == 0.01 else old[which] ^ 1
    patch, piece = patched(old, new)
    assert piece == new.tobytes()
    assert len(patch) <= 0.0155 * new.nbytes if share == 0.01 else patch[0] == 2


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
async def test_all_pieces_stand_patched_and_hashed_and_a_damaged_patch_leaves_its_piece(
    pool: CopyPool, *, beside: bool
) -> None:
    old, new = versions()
    destination = bytearray(len(old)) if beside else bytearray(old)
    base = memoryview(old) if beside else None
    found = await patch_pieces(pool, memoryview(destination), base, cut(), patches_of(old, new)).result()
    assert destination == new
    assert found == b"".join(digests_of(new))
    patches = patches_of(old, new)
    patches[3] = memoryview(b"\x01\x02nonsense"), 2
    destination = bytearray(old)
    found = await patch_pieces(pool, memoryview(destination), None, cut(), patches).result()
    assert found[3 * 16 : 4 * 16] == bytes(16)
    assert destination[3 * NBYTES : 4 * NBYTES] == old[3 * NBYTES : 4 * NBYTES]
    assert destination[4 * NBYTES :] == new[4 * NBYTES :]


@pytest.mark.parametrize(
    ("piece", "base", "at", "nbytes", "patches", "why"),
    [
        (bytearray(10), None, 5, 6, 1, "destination"),
        (bytearray(10), b"123", 0, 4, 1, "base"),
        (bytearray(10), None, 0, 4, 0, "patches"),
        (b"1234", None, 0, 4, 1, "written"),
    ],
)
async def test_what_does_not_fit_is_refused(
    pool: CopyPool, piece: bytes, base: bytes | None, at: int, nbytes: int, patches: int, why: str
) -> None:
    below = None if base is None else memoryview(base)
    with pytest.raises(ValueError, match=why):
        patch_pieces(pool, memoryview(piece), below, Spans([at], [at], [nbytes]), [(memoryview(b""), 1)] * patches)


# In the memory of a GPU.


@pytest.fixture(params=["lazy", "eager", 1])
def device(request: pytest.FixtureRequest) -> FakeDevice:
    return FakeDevice(schedule=random.Random(request.param) if isinstance(request.param, int) else request.param)


def on_device(device: FakeDevice, data: bytes) -> DeviceRegion:
    memory = device.allocate(len(data))
    ctypes.memmove(memory.address, data, len(data))
    return DeviceRegion.of(device, memory)


def bytes_of(region: DeviceRegion) -> bytes:
    return ctypes.string_at(region.address, region.nbytes)


async def patched_on(
    pool: CopyPool, device: FakeDevice, patches: Sequence[Coded], *, beside: bool = False
) -> tuple[bytes, bytes]:
    """Patch all pieces in a GPU's memory; return what stands there then, and the digests that were told."""
    old, _ = versions()
    destination = on_device(device, bytes(len(old)) if beside else old)
    base = on_device(device, old) if beside else None
    found = await patch_pieces(pool, destination, base, cut(), patches).result()
    return bytes_of(destination), found


@pytest.mark.parametrize("beside", [False, True])
async def test_pieces_in_a_gpus_memory_are_patched_and_hashed_there(
    pool: CopyPool, device: FakeDevice, *, beside: bool
) -> None:
    old, new = versions()
    patches = patches_of(old, new)
    after, found = await patched_on(pool, device, patches, beside=beside)
    assert (after, found) == (new, b"".join(digests_of(new)))
    # What can't be read, whose positions are none of the piece, and a chain with such a patch behind a good one.
    outside = by_hand(1, 2, 1, column(bytes([255] * 197)), column(b"a"), column(b"a"))
    wrong = {3: b"\x01\x02nonsense", 5: outside, 7: bytes(patches[7][0]) + outside, 9: b""}
    patches = [
        (memoryview(wrong[number]), unit) if number in wrong else (patch, unit)
        for number, (patch, unit) in enumerate(patches)
    ]
    after, found = await patched_on(pool, device, patches, beside=beside)
    for number, (before, digest) in enumerate(zip(digests_of(old), digests_of(new), strict=True)):
        place = slice(number * NBYTES, (number + 1) * NBYTES)
        stays = number in wrong
        assert after[place] == (old if stays else new)[place]
        told = found[number * 16 : number * 16 + 16]
        assert told == (digest if not stays else before if number == 9 else bytes(16))


async def test_patches_in_a_row_and_values_of_other_sizes_are_patched_there(pool: CopyPool, device: FakeDevice) -> None:
    chance = np.random.default_rng(4)
    pieces, codes, wanted = [], [], b""
    for unit in (1, 2, 4, 8):
        data = [np.frombuffer(chance.bytes(4000), f"<u{unit}").copy() for _ in range(3)]
        data[1][: len(data[1]) * 4 // 5] = data[0][: len(data[1]) * 4 // 5]
        data[2][:-3] = data[1][:-3]
        steps = [
            make(memoryview(a.tobytes()), memoryview(b.tobytes()), unit) or b"" for a, b in itertools.pairwise(data)
        ]
        pieces.append(data[0].tobytes())
        codes.append((memoryview(b"".join(steps)), unit))
        wanted += data[2].tobytes()
    at = [4000 * number for number in range(4)]
    destination = on_device(device, b"".join(pieces))
    found = await patch_pieces(pool, destination, None, Spans(at, at, [4000] * 4), codes).result()
    assert bytes_of(destination) == wanted
    assert found == b"".join(xxhash.xxh3_128_digest(wanted[begin : begin + 4000]) for begin in at)


# Planted bugs, as in compute/test_device_copy.py: a reader compares these digests with those of the version.


async def test_an_overwrite_that_is_not_waited_for_is_found(pool: CopyPool, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = versions()
    device = FakeDevice()
    with monkeypatch.context() as patch:
        patch.setattr(FakeEvent, "wait", lambda _: None)
        after, found = await patched_on(pool, device, patches_of(old, new))
    assert after == old
    assert found != b"".join(digests_of(new))
    device.finish()


async def test_digests_of_the_old_bytes_are_found(pool: CopyPool, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = versions()
    overwrite = FakeEngine.overwrite

    def digest_first(engine: FakeEngine, at: Columns, nbytes: Columns, units: Columns, patches: Any) -> Any:
        digests = engine.digest(at, nbytes)
        return digests, overwrite(engine, at, nbytes, units, patches)[1]

    monkeypatch.setattr(FakeEngine, "overwrite", digest_first)
    after, found = await patched_on(pool, FakeDevice(), patches_of(old, new))
    assert after == new
    assert found == b"".join(digests_of(old))
