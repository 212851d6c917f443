"""Programs as data: what they are kept as comes back, and what is none is refused."""

import msgspec
import pytest
from tests.unit.common.programs.two_sources import BOTH, CUT, PROGRAM

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.programs.program import Cell, SourceBox, TensorGroup, TransferProgram, UnitSplit, decoded, encoded
from tensorhub_common.programs.regions import Blocks


def test_a_cell_without_dimensions_has_one_unit() -> None:
    def program(cut: UnitSplit) -> TransferProgram:
        cell = Cell(0, cut, (SourceBox(0, 0, (), 4, ""),))
        return TransferProgram("reader", ("a",), ((cell,),), (TensorGroup(0, (0,), (10,), ((200,),)),))

    assert decoded(encoded(program(UnitSplit((), (), 4, 0, 1, 1)))) == program(UnitSplit((), (), 4, 0, 1, 1))
    for wrong in (UnitSplit((), (), 4, 1, 1, 1), UnitSplit((), (), 4, -1, 1, 1), UnitSplit((), (), 4, 0, 1, 2)):
        with pytest.raises(LayoutMismatch, match="names what it does not have"):
            decoded(encoded(program(wrong)))


def test_a_program_comes_back_as_it_was_kept() -> None:
    assert decoded(encoded(PROGRAM)) == PROGRAM


@pytest.mark.parametrize(
    "wrong",
    [
        {"groups": (TensorGroup(2, (), (), ()),)},
        {"groups": (TensorGroup(-1, (), (), ()),)},
        {"groups": (TensorGroup(0, (0, 3), (0,), ((0, 0),)),)},
        {"groups": (TensorGroup(0, (0, 2), (0,), ()),)},
        {"groups": (TensorGroup(0, (0, 2), (0,), ((0, 0, 0),)),)},
        {"groups": (TensorGroup(0, (0,), (0,), ((0,),)),)},
        {"groups": (TensorGroup(0, (-1, 0), (0,), ((0, 0),)),)},
        {"groups": (*PROGRAM.groups, TensorGroup(2, (), (), ()))},
        {"patterns": ((Cell(0, CUT, (SourceBox(2, 0, (8, 2), 2, ""),)),), BOTH)},
        {"patterns": ((Cell(0, CUT, (SourceBox(-1, 0, (8, 2), 2, ""),)),), BOTH)},
        {"patterns": ((Cell(0, msgspec.structs.replace(CUT, dim=-1), BOTH[0].owners),), BOTH)},
        {"patterns": ((Cell(0, msgspec.structs.replace(CUT, units=2), BOTH[0].owners),), BOTH)},
        {"patterns": ((Cell(0, CUT, ()),), BOTH)},
        {"patterns": ((Cell(0, msgspec.structs.replace(CUT, dim=2), BOTH[0].owners),), BOTH)},
        {"patterns": ((Cell(0, msgspec.structs.replace(CUT, rows=0), BOTH[0].owners),), BOTH)},
        {"patterns": ((Cell(0, msgspec.structs.replace(CUT, units=4), BOTH[0].owners),), BOTH)},
        {"patterns": ((Cell(0, msgspec.structs.replace(CUT, shape=(5, 0)), BOTH[0].owners),), BOTH)},
        {"patterns": ((Cell(0, msgspec.structs.replace(CUT, to_strides=(8,)), BOTH[0].owners),), BOTH)},
        {"patterns": ((Cell(0, CUT, (SourceBox(0, 0, (2,), 2, ""),)),), BOTH)},
        {"patterns": ((Cell(-1, CUT, BOTH[0].owners),), BOTH)},
        {"patterns": ((Cell(0, msgspec.structs.replace(CUT, itemsize=0), BOTH[0].owners),), BOTH)},
        {"patterns": ((Cell(0, msgspec.structs.replace(CUT, to_strides=(8, -2)), BOTH[0].owners),), BOTH)},
        {"patterns": ((Cell(0, CUT, (SourceBox(0, -1, (4, 2), 2, ""),)),), BOTH)},
        {"patterns": ((Cell(0, CUT, (SourceBox(0, 0, (4, -2), 2, ""),)),), BOTH)},
        {"patterns": ((Cell(0, CUT, (SourceBox(0, 0, (4, 2), 0, ""),)),), BOTH)},
        {"patterns": ((Cell(0, CUT, (SourceBox(0, 0, (4, 2), 2, "", None, 0),)),), BOTH)},
        {"patterns": ((Cell(0, CUT, (SourceBox(0, 0, (4, 2), 2, "", Blocks((5,), (0, 0))),)),), BOTH)},
        {"groups": (TensorGroup(0, (0, 2), (-1,), ((0, 0),)),)},
        {"groups": (TensorGroup(0, (0, 2), (0,), ((0, -1),)),)},
    ],
)
def test_what_names_more_than_it_has_is_no_program(wrong: dict[str, object]) -> None:
    with pytest.raises(LayoutMismatch, match="names what it does not have"):
        decoded(encoded(msgspec.structs.replace(PROGRAM, **wrong)))


@pytest.mark.parametrize("other", [b"\x93", encoded(PROGRAM).replace(b"left", b"l\xffft"), b"\x91" * 100_000])
def test_other_bytes_are_no_program(other: bytes) -> None:
    with pytest.raises(LayoutMismatch, match="is none"):
        decoded(other)
