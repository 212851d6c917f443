"""The kernels for deltas, compiled for the CPU: columns are the host's byte by byte, and so is what is overwritten.

What only a GPU shows (that its threads don't disturb each other, and how fast they are) is for tests/gpu.
"""

import ctypes
import functools
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.kit.compiled_device import CompiledDevice
from tests.kit.compiled_kernels import compiled

from tensorhub_agent.devices.changes import BITMAP, GAPS, Changes, changes_between, positions_in
from tensorhub_agent.devices.kernels import deltas
from tensorhub_agent.devices.kernels.deltas import PART_UNITS, ComparisonTables, PieceComparer, PieceOverwriter, cut
from tensorhub_agent.encodings.patch import apply, written

RUN = """
static const void* one;
static const void* two;
static void* three;
static u32 many;
static void one_compare() { compare((const Pair*)one, many); }
static void one_number() { number_changes((const Pair*)one, many, (Total*)three); }
static void one_gather() { gather_changes((const Pair*)one, many, (const Columns*)two); }
static void one_overwrite() { overwrite((const Target*)one, many, (const Patch*)two, (u32*)three); }
extern "C" void run(int which, u32 groups, u32 count, const void* first, const void* second, void* third) {
    static void (*bodies[])() = {one_compare, one_number, one_gather, one_overwrite};
    one = first, many = count, two = second, three = third;
    for (blockIdx.x = 0; blockIdx.x < groups; blockIdx.x++) run_group(THREADS, blockIdx.x, bodies[which]);
}
"""
MARGIN = 32
Array = np.ndarray


@functools.cache
def library() -> ctypes.CDLL:
    return compiled("deltas", RUN, Path(tempfile.mkdtemp(prefix="tensorhub-kernels-")))


def run(which: int, groups: int, count: int, *places: int | None) -> None:
    library().run(which, groups, count, *map(ctypes.c_void_p, places))


def device() -> CompiledDevice:
    return CompiledDevice(
        {
            "compare": lambda groups, pairs, count: run(0, groups, count, pairs, None, None),
            "number_changes": lambda groups, pairs, count, totals: run(1, groups, count, pairs, None, totals),
            "gather_changes": lambda groups, pairs, count, columns: run(2, groups, count, pairs, columns, None),
            "overwrite": lambda groups, targets, count, patches, right: run(3, groups, count, targets, patches, right),
        }
    )


def column(values: Sequence[int]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.asarray(list(values), np.int64)


def held(data: bytes, shift: int, margin: int = 0xEE) -> Array:
    """Return memory with these bytes from `shift` bytes behind an aligned address on, and a margin at both ends."""
    room = np.full(len(data) + 3 * MARGIN, margin, np.uint8)
    begin = (-room.ctypes.data) % 16 + 16 + shift
    room[begin : begin + len(data)] = np.frombuffer(data, np.uint8)
    return room[begin : begin + len(data)]


def margins(piece: Array) -> bytes:
    """Return what stands before and behind the bytes of `held`."""
    return ctypes.string_at(piece.ctypes.data - 16, 16) + ctypes.string_at(piece.ctypes.data + len(piece), MARGIN - 16)


def found_by_kernels(
    pairs: Sequence[tuple[bytes, bytes, int]], shifts: tuple[int, int] = (0, 0), on: CompiledDevice | None = None
) -> Sequence[Changes | None]:
    """Compare pieces as they were and are, in units of these bytes."""
    gpu: Any = on or device()
    # What stands beside the two versions differs, so that it is seen where it is looked at.
    old = [held(before, shifts[0], 0xE0) for before, _, _ in pairs]
    # Every other one is aligned otherwise.
    new = [held(after, (shifts[1] + number % 2 * 5) % 16, 0xE1) for number, (_, after, _) in enumerate(pairs)]
    nbytes, units = column([len(each[1]) for each in pairs]), column([each[2] for each in pairs])
    before, after = (column([each.ctypes.data for each in some]) for some in (old, new))
    comparer = PieceComparer(gpu, gpu)
    if shifts[0] != shifts[1]:
        # Where they are, since what is brought beside the pieces is aligned as they are.
        return comparer._compared(ComparisonTables(before, after, nbytes, units))
    return comparer.changes(before, after, nbytes, units)


def check(pairs: Sequence[tuple[bytes, bytes, int]], shifts: tuple[int, int] = (0, 0)) -> None:
    for found, (old, new, unit) in zip(found_by_kernels(pairs, shifts), pairs, strict=True):
        wanted = changes_between(*(np.frombuffer(each, f"<u{unit}") for each in (old, new)))
        assert (found is None) is (wanted is None)
        if found is not None and wanted is not None:
            assert found[:2] == wanted[:2]
            assert found.positions.tobytes() == wanted.positions.tobytes()
            assert [each.tobytes() for each in found.planes] == [each.tobytes() for each in wanted.planes]
        assert written(found, unit, len(new)) == written(wanted, unit, len(new))


def pair_of(unit: int, units: int, changed: "Sequence[int] | Array", seed: int = 0) -> tuple[bytes, bytes, int]:
    """Return random bytes, and the same with other values of these units."""
    chance = np.random.default_rng(seed)
    old = np.frombuffer(chance.bytes(unit * units), f"<u{unit}")
    new = old.copy()
    which = np.asarray(changed, np.int64)
    new[which] ^= chance.integers(1, 1 << 8 * unit, len(which), np.uint64).astype(new.dtype)
    return old.tobytes(), new.tobytes(), unit


@st.composite
def changed_pieces(draw: st.DrawFn) -> tuple[bytes, bytes, int]:
    """Draw sizes about the bounds of words, threads and parts; what changed is sparse, dense, or in runs."""
    unit = draw(st.sampled_from([1, 2, 4, 8]))
    units = draw(st.sampled_from([1, 7, 8, 127, 128, 129, 3000, PART_UNITS - 1, PART_UNITS + 1])) + draw(
        st.integers(0, 9)
    )
    seed, share = draw(st.integers(0, 99)), draw(st.sampled_from([0.0, 0.0003, 0.01, 0.124, 0.126, 0.5, 0.89, 1.0]))
    chance = np.random.default_rng(seed)
    run = draw(st.sampled_from([1, 40]))
    which = np.repeat(chance.random(-(-units // run)) < share, run)[:units]
    return pair_of(unit, units, np.flatnonzero(which), seed)


@pytest.mark.long
@given(st.lists(changed_pieces(), min_size=1, max_size=3), st.tuples(*[st.sampled_from([0, 1, 2, 4, 8])] * 2))
@settings(max_examples=25)
def test_columns_are_those_of_the_host(pairs: list[tuple[bytes, bytes, int]], shifts: tuple[int, int]) -> None:
    check(pairs, shifts)


@pytest.mark.parametrize("unit", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "changed",
    [
        [],
        [0],
        [PART_UNITS * 2 + 4],
        [0, PART_UNITS * 2 + 4],
        # A gap that ends with a part, one over a whole part, and steps that end at a bound.
        [PART_UNITS - 1, PART_UNITS],
        [3, 3 + 255, 3 + 255 + 256, 3 + 255 + 256 + 257, PART_UNITS + 700],
        [*range(PART_UNITS, PART_UNITS + 3000)],
        [*range(PART_UNITS - 100, PART_UNITS + 100, 3), 2 * PART_UNITS + 1],
    ],
    ids=lambda changed: f"{len(changed)} changed",
)
def test_what_changes_at_the_ends_and_at_the_bounds_of_parts(unit: int, changed: list[int]) -> None:
    check([pair_of(unit, 2 * PART_UNITS + 5, changed)])


def test_a_long_gap_before_a_dense_part_takes_no_more_than_the_room_has() -> None:
    """What is shared holds a part's gaps, and not the steps before it."""
    units = 9 * PART_UNITS + 1
    check([pair_of(1, units, range(8 * PART_UNITS, 9 * PART_UNITS))])


def test_random_bytes_of_either_version_and_every_bit_count() -> None:
    chance = np.random.default_rng(5)
    bits = np.zeros(1024, np.uint16)
    flipped = [bits.copy() for _ in range(16)]
    for bit, each in enumerate(flipped):
        each[bit * 61] = 1 << bit
    check([(bits.tobytes(), each.tobytes(), 2) for each in flipped])
    check([(chance.bytes(4096), chance.bytes(4096), unit) for unit in (1, 2, 4, 8)])


# Overwriting.


def overwritten(
    pieces: Sequence[tuple[bytes, int]],
    patches: Sequence[Sequence[Changes]],
    shift: int = 0,
    on: CompiledDevice | None = None,
) -> list[tuple[bytes, bool]]:
    """Overwrite pieces in units of these bytes; return them, and which were overwritten."""
    gpu: Any = on or device()
    memory = [held(data, shift) for data, _ in pieces]
    at, nbytes = column([each.ctypes.data for each in memory]), column([len(data) for data, _ in pieces])
    overwriter = PieceOverwriter(gpu, gpu, gpu.stream())
    right = overwriter.overwrite(at, nbytes, column([unit for _, unit in pieces]), patches)
    for each in memory:
        assert margins(each) == b"\xee" * MARGIN, "something outside of a piece was written"
    return [(each.tobytes(), bool(is_right)) for each, is_right in zip(memory, right, strict=True)]


@given(st.lists(changed_pieces(), min_size=1, max_size=3), st.sampled_from([0, 1, 2, 4, 8]))
@settings(max_examples=25)
def test_patches_lead_to_the_new_bytes(pairs: list[tuple[bytes, bytes, int]], shift: int) -> None:
    changes = [changes_between(*(np.frombuffer(each, f"<u{unit}") for each in (old, new))) for old, new, unit in pairs]
    patches = [[] if each is None or not each.changed else [each] for each in changes]
    found = overwritten([(old, unit) for old, _, unit in pairs], patches, shift)
    wanted = [old if each is None else new for each, (old, new, _) in zip(changes, pairs, strict=True)]
    assert found == [(each, True) for each in wanted]


@pytest.mark.parametrize("unit", [1, 2, 4, 8])
def test_patches_in_a_row_end_in_what_the_last_one_says(unit: int) -> None:
    versions = [np.frombuffer(pair_of(unit, 5000, [])[0], f"<u{unit}")]
    chance = np.random.default_rng(unit)
    for share in (0.01, 0.3, 0.3, 0.001):
        after = versions[-1].copy()
        which = chance.random(len(after)) < share
        # Most of them the same units each time.
        which[:1000] |= share > 0.1
        after[which] = chance.integers(0, 1 << 8 * unit, int(which.sum()), np.uint64)
        versions.append(after)
    chain = [changes_between(one, other) for one, other in itertools.pairwise(versions)]
    assert {each.form for each in chain if each is not None} == {GAPS, BITMAP}
    patches = [each for each in chain if each is not None]
    assert overwritten([(versions[0].tobytes(), unit)], [patches]) == [(versions[-1].tobytes(), True)]


def changes(form: int, positions: bytes, changed: int, unit: int = 1) -> Changes:
    planes = [np.full(changed, 7, np.uint8) for _ in range(unit)]
    return Changes(form, changed, np.frombuffer(positions, np.uint8), planes)


@pytest.mark.long
@given(
    st.sampled_from([GAPS, BITMAP]),
    st.lists(st.sampled_from([0, 1, 3, 254, 255]) | st.integers(0, 255), min_size=1, max_size=40),
    st.integers(1, 300),
    st.integers(1, 600),
)
@example(GAPS, [255], 1, 255)
@example(GAPS, [0, 255, 255], 1, 1)
@example(GAPS, [255, 44], 1, 300)
@example(GAPS, [255, 45], 1, 300)
@example(BITMAP, [1, 128], 2, 9)
@example(BITMAP, [1, 64], 2, 9)
def test_positions_that_are_none_are_the_hosts_answer_and_nothing_is_written(
    form: int, positions: list[int], changed: int, units: int
) -> None:
    """Whatever bytes came: none outside the piece is written, and of a chain with one such patch nothing at all."""
    said = changes(form, bytes(positions), changed)
    good = changes(GAPS, b"\0", 1)
    (found, is_right), (chained, is_chain_right) = overwritten([(bytes(units), 1)] * 2, [[said], [good, said]])
    where = positions_in(said, units)
    assert is_right is is_chain_right is (where is not None)
    wanted = np.zeros(units, np.uint8)
    if where is not None:
        wanted[where] = 7
    assert found == wanted.tobytes()
    assert chained == (found if where is None else b"\x07" + found[1:])


def test_long_columns_are_walked_to_their_end() -> None:
    """More positions than a group takes at a time, in both forms, with steps among them."""
    for share, unit in ((0.01, 2), (0.3, 1), (0.003, 4)):
        chance = np.random.default_rng(1)
        old, new, _ = pair_of(unit, 200_000, np.flatnonzero(chance.random(200_000) < share))
        said = changes_between(*(np.frombuffer(each, f"<u{unit}") for each in (old, new)))
        assert said is not None
        assert len(said.positions) > 500
        assert overwritten([(old, unit)], [[said]]) == [(new, True)]
        piece = bytearray(old)
        apply(written(said, unit, len(old)) or b"", memoryview(piece), unit)
        assert piece == new


@pytest.mark.long
def test_the_room_for_both_ways_is_bounded_whatever_is_given_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "COMPARED_BYTES_MAX", 100_000)
    monkeypatch.setattr(deltas, "COLUMNS_BYTES_MAX", 5_000)
    chance = np.random.default_rng(2)
    pairs = [pair_of(2, 5000, np.flatnonzero(chance.random(5000) < 0.1), seed) for seed in range(40)]
    gpu = device()
    found = found_by_kernels(pairs, on=gpu)
    assert gpu.streams[0].launches == ["compare", "number_changes", "gather_changes"] * 4
    assert sum(gpu.allocated) < 3 * 100_000
    known = [each for each in found if each is not None]
    assert len(known) == 40
    gpu = device()
    done = overwritten([(old, 2) for old, _, _ in pairs], [[each] for each in known], on=gpu)
    assert done == [(new, True) for _, new, _ in pairs]
    assert len(gpu.streams[0].launches) > 10
    assert sum(gpu.allocated) < 3 * 5_000


def test_nothing_is_no_launch() -> None:
    gpu = device()
    assert (list(found_by_kernels([], on=gpu)), overwritten([], [], on=gpu)) == ([], [])
    assert [each.launches for each in gpu.streams] == [[], []]


def test_what_a_launch_takes_is_bounded_and_a_piece_at_least() -> None:
    sizes = column([5, 5, 5, 100, 1, 1, 1, 1])
    assert [(each.start, each.stop) for each in cut(sizes, 10, 3)] == [(0, 2), (2, 3), (3, 4), (4, 7), (7, 8)]
    assert list(cut(column([]), 10, 3)) == []
