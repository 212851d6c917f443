"""Blocks that sources' edges cut through: who has a part of them."""

from tests.unit.planner.test_spans import VALUES, cutout

from tensorhub_common.layout import Shape
from tensorhub_planner.atoms import Cutout
from tensorhub_planner.folding import has_some, parts_of_blocks


def has_a_part(atom: Cutout, boxes: list[Cutout], start: Shape, stop: Shape) -> bool:
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
