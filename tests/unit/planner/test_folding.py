"""Blocks that sources' edges cut through: who has a part of them, and where their entries stand."""

from itertools import product

import pytest
from tests.unit.planner.test_spans import SCALES, VALUES, cutout

from tensorhub_common.layout.parts import Shape
from tensorhub_common.programs.amax_cells import AMAX_ENTRY_BYTES
from tensorhub_planner.compiler.boxes import BoxGeometry
from tensorhub_planner.compiler.fp8_blocks import AmaxTableLayout, has_some, parts_of_blocks


def has_a_part(atom: BoxGeometry, boxes: list[BoxGeometry], start: Shape, stop: Shape) -> bool:
    return has_some(atom, parts_of_blocks(atom, boxes), start, stop)


def test_what_some_have_a_part_of_is_told_from_what_nobody_has() -> None:
    atom = cutout((256, 128), dtype="float8_e4m3fn", cast=VALUES)
    upper = cutout((256, 128), (0, 0), (100, 128))
    assert has_a_part(atom, [upper], (0, 0), (128, 128))
    assert not has_a_part(atom, [upper], (128, 0), (256, 128)), "it has nothing of that block"
    assert not has_a_part(atom, [], (0, 0), (128, 128))
    assert not has_a_part(cutout((256, 128)), [upper], (0, 0), (128, 128)), "nothing is computed there"
    assert not has_a_part(atom, [cutout((256, 129), (0, 0), (100, 128))], (0, 0), (128, 128))
    other = cutout((256, 128), (0, 0), (100, 128), is_original=False)
    assert not has_a_part(atom, [other], (0, 0), (128, 128)), "what was cast is not cast again"
    assert has_a_part(atom, [other, upper], (5, 0), (128, 128))
    above = cutout((256, 128), (0, 0), (128, 128))
    assert not has_a_part(atom, [above], (128, 0), (256, 128)), "it ends where the block begins"
    below = cutout((256, 128), (128, 0), (256, 128))
    assert not has_a_part(atom, [below], (0, 0), (128, 128)), "it begins where the block ends"


@pytest.mark.parametrize("cast", [VALUES, SCALES])
def test_each_block_that_an_atom_has_to_do_with_has_an_entry_of_its_own(cast: str) -> None:
    """Row by row, from the first one on, of a box that begins and ends within blocks or counts them."""
    shape = (3, 1000, 700)
    blocks = ((1, 2, 1), (3, 5, 4))
    start, stop = blocks
    if cast == VALUES:
        start, stop = ((1, 2 * 128 + 5, 128), (3, 4 * 128 + 1, 3 * 128 + 70))
    atom = cutout(shape, start, stop, dtype="x", cast=cast)
    table = AmaxTableLayout.of(atom)
    every = list(product(*(range(a, b) for a, b in zip(*blocks, strict=True))))
    assert [table.at(block) for block in every] == list(range(0, table.nbytes, AMAX_ENTRY_BYTES))
