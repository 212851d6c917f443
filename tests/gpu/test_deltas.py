"""Deltas that a GPU makes and applies: their columns are torch's and the host's, byte by byte."""

import random

import numpy as np
import pytest
import torch
from tests.kit.gpu import address_of, bytes_of, on_device

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.devices.changes import BITMAP, GAPS, Changes, changes_between, positions_in
from tensorhub_agent.devices.engine import engine_of
from tensorhub_agent.encodings.codec_tasks import Coded, patch_pieces
from tensorhub_agent.encodings.patch import make, written
from tensorhub_common.devices.cuda import CudaDevice

pytestmark = pytest.mark.gpu

MIB = 1024 * 1024
UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SHARES = [0.0, 1e-5, 0.01, 0.124, 0.126, 0.5, 0.89, 1.0]
EDGES = [1, 7, 8, 127, 128, 129, 32_767, 32_768, 32_769, 100_003]


def column(values: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.asarray(values, np.int64)


def versions(unit: int, units: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.default_rng(seed)
    old = np.frombuffer(chance.bytes(unit * units), f"<u{unit}")
    new = old.copy()
    which = chance.random(units) < share
    if share:
        which[0] = which[-1] = True
    new[which] ^= chance.integers(1, 1 << 8 * unit, int(which.sum()), np.uint64).astype(new.dtype)
    return old, new


def by_torch(old: np.ndarray, new: np.ndarray) -> tuple[list[int], bytes]:
    """Return which units differ, and their new values, as torch finds them on the GPU."""
    dtype = UNITS[old.itemsize]
    one, other = (torch.frombuffer(bytearray(each.tobytes()), dtype=dtype).cuda() for each in (old, new))
    where = torch.nonzero(one != other).flatten()
    return where.tolist(), other[where].cpu().numpy().tobytes()


def check(device: CudaDevice, pairs: list[tuple[np.ndarray, np.ndarray]], shift: int) -> None:
    """Compare pieces, of which the old ones are the host's, and overwrite the old ones by what is found."""
    engine = engine_of(device)
    regions = [on_device(device, new.tobytes(), shift) for _, new in pairs]
    olds = [old.tobytes() for old, _ in pairs]
    sizes, units = column([new.nbytes for _, new in pairs]), column([new.itemsize for _, new in pairs])
    places = column([address_of(each) for each in olds]), column([each.address for each in regions])
    found = engine.changes(*places, sizes, units)
    for changes, (old, new) in zip(found, pairs, strict=True):
        wanted = changes_between(old, new)
        assert written(changes, new.itemsize, new.nbytes) == written(wanted, new.itemsize, new.nbytes)
        assert (changes is None) is (wanted is None)
        if changes is not None and changes.changed:
            where, values = by_torch(old, new)
            positions = positions_in(changes, len(new))
            assert positions is not None
            assert positions.tolist() == where
            assert np.stack(changes.planes, axis=1).tobytes() == values
    patches = [[] if each is None or not each.changed else [each] for each in found]
    targets = [on_device(device, old, shift) for old in olds]
    at = column([each.address for each in targets])
    digests, right = engine.overwrite(at, sizes, units, patches)
    assert all(right)
    for target, changes, (old, new) in zip(targets, found, pairs, strict=True):
        assert bytes_of(target) == (old if changes is None else new).tobytes()
    assert digests == engine.digest(at, sizes)


@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("unit", UNITS)
def test_pieces_of_all_lengths_densities_and_alignments(device: CudaDevice, unit: int, shift: int) -> None:
    pairs = [versions(unit, units, share, seed) for seed, units in enumerate(EDGES) for share in SHARES]
    check(device, pairs, shift)


@pytest.mark.parametrize("share", SHARES)
def test_whole_pieces_of_bfloat16(device: CudaDevice, share: float) -> None:
    check(device, [versions(2, 2 * MIB, share, seed) for seed in range(20)], 0)


def test_random_pieces(device: CudaDevice) -> None:
    chance = random.Random(3)
    pairs = [
        versions(chance.choice([1, 2, 4, 8]), chance.randrange(1, 200_000), chance.choice(SHARES), seed)
        for seed in range(150)
    ]
    check(device, pairs, 0)


def test_long_gaps_before_a_dense_part(device: CudaDevice) -> None:
    old = np.zeros(4 * MIB, np.uint8)
    new = old.copy()
    new[-40_000:] = 1
    check(device, [(old, new)], 0)


def test_positions_that_are_none_of_the_piece_write_nothing(device: CudaDevice) -> None:
    """Whatever bytes come: what stands beside the pieces is there afterwards, and so is the context."""
    chance = random.Random(5)
    room = on_device(device, bytes(MIB))
    said, at = [], []
    for number in range(200):
        form, count = chance.choice([GAPS, BITMAP]), chance.randrange(1, 60)
        positions = np.frombuffer(bytes(chance.choices([0, 1, 254, 255, chance.randrange(256)], k=count)), np.uint8)
        said.append(Changes(form, chance.randrange(1, 90), positions, [np.full(90, 7, np.uint8)]))
        at.append(room.address + 4096 * number + 512)
    said = [Changes(each.form, each.changed, each.positions, [each.planes[0][: each.changed]]) for each in said]
    sizes = [chance.randrange(1, 500) for _ in said]
    _, right = engine_of(device).overwrite(column(at), column(sizes), column([1] * 200), [[each] for each in said])
    wanted = bytearray(MIB)
    for number, (changes, size, is_right) in enumerate(zip(said, sizes, right, strict=True)):
        where = positions_in(changes, size)
        assert is_right is (where is not None)
        if where is not None:
            for unit in where.tolist():
                wanted[4096 * number + 512 + unit] = 7
    assert bytes_of(room) == wanted


@pytest.mark.parametrize("beside", [False, True])
async def test_the_pool_patches_pieces_in_the_gpus_memory(device: CudaDevice, *, beside: bool) -> None:
    data = [versions(2, MIB, share, seed) for seed, share in enumerate([0.01, 0.3, 0.0, 0.001] * 6)]
    later = [
        versions(2, MIB, 0.01, seed + 100)[1] ^ versions(2, MIB, 0.01, seed + 100)[0] ^ new
        for seed, (_, new) in enumerate(data)
    ]
    codes: list[Coded] = []
    for (old, new), last in zip(data, later, strict=True):
        chain = [make(memoryview(a.tobytes()), memoryview(b.tobytes()), 2) or b"" for a, b in ((old, new), (new, last))]
        codes.append((memoryview(b"".join(chain)), 2))
    before, wanted = (b"".join(each.tobytes() for each in some) for some in ([old for old, _ in data], later))
    destination = on_device(device, bytes(len(before)) if beside else before)
    base = on_device(device, before) if beside else None
    at = [2 * MIB * number for number in range(len(data))]
    spans, pool = Spans(at, at, [2 * MIB] * len(data)), CopyPool(3)
    try:
        found = await patch_pieces(pool, destination, base, spans, codes).result()
        assert bytes_of(destination) == wanted
        assert found == await pool.digest(destination, spans).result()
    finally:
        pool.close()
