"""Patches against numpy: whatever changed, the patched bytes are the new bytes; and damage is never written."""

import contextlib
from typing import Final

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_agent.encodings.columns import Damaged, unit_of
from tensorhub_agent.encodings.patch import apply, make

UNITS_MAX: Final = 3000
ITEMSIZES: Final = (1, 2, 3, 4, 6, 8, 12, 16)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[int, bytes, bytes]:
    """Return a unit, and two pieces: some units changed, in runs or here and there, by any part of their bytes."""
    unit = unit_of(draw(st.sampled_from(ITEMSIZES)))
    units = draw(st.integers(0, UNITS_MAX))
    chance = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = np.frombuffer(chance.bytes(units * unit), np.uint8).reshape(units, unit)
    new = old.copy()
    if draw(st.booleans()):
        which = chance.random(units) < draw(st.sampled_from((0.0, 0.001, 0.01, 0.1, 0.3, 0.8, 1.0)))
    else:
        which = np.zeros(units, bool)
        for _ in range(draw(st.integers(0, 4))):
            first = draw(st.integers(0, max(units - 1, 0)))
            which[first : first + draw(st.integers(0, units))] = True
    byte = draw(st.integers(0, unit - 1))
    new[which, byte:] = draw(st.integers(0, 255))
    return unit, old.tobytes(), new.tobytes()


@given(pairs())
def test_a_patched_piece_is_the_new_piece_however_often(pair: tuple[int, bytes, bytes]) -> None:
    unit, old, new = pair
    patch = make(memoryview(old), memoryview(new), unit)
    if patch is None:
        return
    assert (patch == b"") == (old == new)
    assert len(patch) <= len(new)
    piece = bytearray(old)
    for _ in range(2):
        apply(patch, memoryview(piece), unit)
        assert piece == new


@given(pairs(), st.integers(0, 2**32))
def test_patches_in_a_row_make_the_last_piece_also_of_a_mixture(pair: tuple[int, bytes, bytes], seed: int) -> None:
    """A chain takes any mixture of its first and last piece to the last one: a fill may be broken off anywhere."""
    unit, old, middle = pair
    chance = np.random.default_rng(seed)
    last = np.frombuffer(middle, np.uint8).reshape(-1, unit).copy()
    last[chance.random(len(last)) < 0.05] ^= 1
    chain = [make(memoryview(a), memoryview(b), unit) for a, b in ((old, middle), (middle, last.tobytes()))]
    if None in chain:
        return
    taken = chance.random(len(last)) < 0.5
    mixed = np.where(taken[:, None], np.frombuffer(old, np.uint8).reshape(-1, unit), last)
    piece = bytearray(mixed.tobytes())
    apply(b"".join(each or b"" for each in chain), memoryview(piece), unit)
    assert piece == last.tobytes()


@given(pairs(), st.data())
def test_a_damaged_patch_is_refused_or_stays_within_its_piece(
    pair: tuple[int, bytes, bytes], data: st.DataObject
) -> None:
    unit, old, new = pair
    patch = make(memoryview(old), memoryview(new), unit)
    if not patch:
        return
    damaged = bytearray(patch)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    del damaged[data.draw(st.integers(0, len(damaged))) :]
    guarded = bytearray(b"\xa5" * 64 + old + b"\xa5" * 64)
    try:
        apply(bytes(damaged), memoryview(guarded)[64 : 64 + len(old)], unit)
    except Damaged:
        assert guarded[64:-64] == old, "a refused patch has written"
    assert guarded[:64] == guarded[-64:] == b"\xa5" * 64


@given(st.binary(max_size=400), st.sampled_from((1, 2, 4, 8)))
def test_any_bytes_are_a_patch_or_are_refused(data: bytes, unit: int) -> None:
    piece = memoryview(bytearray(64 * unit))
    with contextlib.suppress(Damaged):
        apply(data, piece, unit)
        return
    assert not any(piece)
