"""Programs as data: what they say of units, and that what is none is refused."""

import msgspec
import pytest

from tensorhub_common import program as module
from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.program import Cell, Cut, Execution, Group, Owner, Place, Program, decoded, encoded
from tensorhub_common.regions import Blocks

CUT = Cut((5, 4), (8, 2), 2, dim=0, rows=2, units=3)
"""A box of 5 rows of 4 elements of two bytes, two rows at a time."""
HALF = Cut((5, 2), (8, 2), 2, dim=0, rows=5, units=1)
BOTH = (Cell(0, HALF, (Owner(0, 0, (4, 2), 2, ""),)), Cell(4, HALF, (Owner(1, 0, (4, 2), 2, ""),)))
"""The left half of each row is one source's, the right half another one's."""
PROGRAM = Program(
    "reader",
    ("left", "right", "copy"),
    ((Cell(0, CUT, (Owner(0, 16, (100, 2), 2, ""), Owner(1, 0, (8, 2), 2, ""))),), BOTH),
    (Group(0, (0, 2), (0, 256), ((1000, 0), (2000, 40))), Group(1, (0, 1), (512,), ((3000, 4000),))),
)


def test_units_are_numbered_source_by_source() -> None:
    """What two sources have stands apart from what one has alone."""
    execution = Execution(PROGRAM, "digest")
    assert len(execution) == 2 * 3 + 2
    assert execution.given_by("left") == ((0, 7),)
    assert execution.given_by("copy") == ((1, 6),)
    assert execution.given_by("right") == ((7, 1),)
    assert execution.given_by("nobody") == ()
    assert execution.nbytes() == [20, 16, 16, 8, 16, 16, 8, 20]


def test_units_know_where_they_stand_at_both_ends() -> None:
    execution = Execution(PROGRAM, "digest")
    regions = execution.regions("left", [(1, 6)])
    assert list(regions.to) == [0, 16, 32, 256, 272, 288]
    assert list(regions.origin) == [1016, 1216, 1416, 2016, 2216, 2416]
    assert [form.shape for form in regions.form] == [(2, 4), (2, 4), (1, 4)] * 2
    assert regions.form[0] is regions.form[1], "units that are alike share a form"
    assert regions.form[0].origin_strides == (100, 2)
    there = execution.regions("copy", [(3, 1)])
    assert (list(there.to), list(there.origin), there.form[0].origin_strides) == ([32], [32], (8, 2))
    with pytest.raises(KeyError):
        execution.regions("right", [(1, 1)])


def test_where_units_go_does_not_depend_on_who_gives_them() -> None:
    places = list(Execution(PROGRAM).places([(0, 2), (7, 1)]))
    assert places == [Place(512, 20, is_packed=False), Place(0, 16, is_packed=True), Place(516, 20, is_packed=False)]


def of_one(cut: Cut, *owners: Owner) -> Program:
    """Return a program of one cell of one tensor, which begins at 7 here, and at 100 and 200 there."""
    sources = tuple(range(len(owners)))
    return Program(
        "reader",
        ("a", "b")[: len(owners)],
        ((Cell(3, cut, owners),),),
        (Group(0, sources, (7,), ((100, 200)[: len(owners)],)),),
    )


def test_units_are_cut_along_any_dimension() -> None:
    cut = Cut((2, 5, 3), (30, 6, 2), 2, dim=1, rows=2, units=3)
    execution = Execution(of_one(cut, Owner(0, 4, (999, 10, 2), 2, "x")))
    regions = execution.regions("a", [(0, 3)])
    assert [form.shape for form in regions.form] == [(2, 2, 3), (2, 2, 3), (2, 1, 3)]
    assert (list(regions.to), list(regions.origin)) == ([10, 22, 34], [104, 124, 144])
    assert {(form.to_strides, form.itemsize, form.to_itemsize, form.cast) for form in regions.form} == {
        ((30, 6, 2), 2, 2, "x")
    }
    assert execution.nbytes() == [24, 24, 12]


def test_a_unit_that_is_computed_of_blocks_takes_its_own() -> None:
    """Two scales a unit, of 128 rows each; the last block has 60."""
    cut = Cut((5, 1), (4, 4), 4, dim=0, rows=2, units=3)
    blocks = Blocks((4 * 128 + 60, 256), (0, 0))
    regions = Execution(of_one(cut, Owner(0, 0, (512, 2), 2, "x", blocks, 128))).regions("a", [(0, 3)])
    assert [form.blocks for form in regions.form] == [Blocks((rows, 256), (0, 0)) for rows in (256, 256, 60)]
    assert list(regions.origin) == [100, 100 + 256 * 512, 100 + 512 * 512]


def test_a_cell_of_one_unit_is_made_of_all_its_blocks() -> None:
    """Which begin before it does."""
    cut = Cut((9, 4), (4, 1), 1, dim=0, rows=9, units=1)
    blocks = Blocks((128, 128), (5, 2))
    (form,) = Execution(of_one(cut, Owner(0, 0, (512, 2), 2, "x", blocks))).regions("a", [(0, 1)]).form
    assert form.blocks == blocks


def test_each_owner_has_its_own_form() -> None:
    cut = Cut((4,), (2,), 2, dim=0, rows=4, units=1)
    execution = Execution(of_one(cut, Owner(0, 0, (2,), 2, ""), Owner(1, 6, (8,), 4, "x")))
    ((one,), (other,)) = (execution.regions(each, [(0, 1)]).form for each in "ab")
    assert (one.origin_strides, one.itemsize, one.cast) == ((2,), 2, "")
    assert (other.origin_strides, other.itemsize, other.cast) == ((8,), 4, "x")
    assert list(execution.regions("b", [(0, 1)]).origin) == [206]


def test_there_are_so_many_units_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNITS_MAX", 8)
    Execution(PROGRAM)
    monkeypatch.setattr(module, "UNITS_MAX", 7)
    with pytest.raises(LayoutMismatch, match="filled by 8 units, and 7 are possible: use more shards"):
        Execution(PROGRAM)


def test_a_group_without_tensors_gives_nothing() -> None:
    empty = msgspec.structs.replace(PROGRAM, groups=(Group(0, (0, 2), (), ()), *PROGRAM.groups))
    for layout in PROGRAM.sources:
        assert Execution(empty).given_by(layout) == Execution(PROGRAM).given_by(layout)


def test_a_tensor_without_dimensions_is_in_a_program() -> None:
    program = of_one(Cut((), (), 4, 0, 1, 1), Owner(0, 0, (), 4, ""))
    execution = Execution(decoded(encoded(program)))
    assert list(execution.places([(0, 1)])) == [Place(10, 4, is_packed=True)]
    for wrong in (Cut((), (), 4, 1, 1, 1), Cut((), (), 4, -1, 1, 1), Cut((), (), 4, 0, 1, 2)):
        with pytest.raises(LayoutMismatch, match="names what it does not have"):
            decoded(encoded(of_one(wrong, Owner(0, 0, (), 4, ""))))


def test_a_program_comes_back_as_it_was_kept() -> None:
    assert decoded(encoded(PROGRAM)) == PROGRAM


@pytest.mark.parametrize(
    "wrong",
    [
        {"groups": (Group(2, (), (), ()),)},
        {"groups": (Group(-1, (), (), ()),)},
        {"groups": (Group(0, (0, 3), (0,), ((0, 0),)),)},
        {"groups": (Group(0, (0, 2), (0,), ()),)},
        {"groups": (Group(0, (0, 2), (0,), ((0, 0, 0),)),)},
        {"groups": (Group(0, (0,), (0,), ((0,),)),)},
        {"groups": (Group(0, (-1, 0), (0,), ((0, 0),)),)},
        {"groups": (*PROGRAM.groups, Group(2, (), (), ()))},
        {"patterns": ((Cell(0, CUT, (Owner(2, 0, (8, 2), 2, ""),)),), BOTH)},
        {"patterns": ((Cell(0, CUT, (Owner(-1, 0, (8, 2), 2, ""),)),), BOTH)},
        {"patterns": ((Cell(0, msgspec.structs.replace(CUT, dim=-1), BOTH[0].owners),), BOTH)},
        {"patterns": ((Cell(0, msgspec.structs.replace(CUT, units=2), BOTH[0].owners),), BOTH)},
        {"patterns": ((Cell(0, CUT, ()),), BOTH)},
        {"patterns": ((Cell(0, msgspec.structs.replace(CUT, dim=2), BOTH[0].owners),), BOTH)},
        {"patterns": ((Cell(0, msgspec.structs.replace(CUT, rows=0), BOTH[0].owners),), BOTH)},
        {"patterns": ((Cell(0, msgspec.structs.replace(CUT, units=4), BOTH[0].owners),), BOTH)},
        {"patterns": ((Cell(0, msgspec.structs.replace(CUT, shape=(5, 0)), BOTH[0].owners),), BOTH)},
        {"patterns": ((Cell(0, msgspec.structs.replace(CUT, to_strides=(8,)), BOTH[0].owners),), BOTH)},
        {"patterns": ((Cell(0, CUT, (Owner(0, 0, (2,), 2, ""),)),), BOTH)},
        {"patterns": ((Cell(-1, CUT, BOTH[0].owners),), BOTH)},
        {"patterns": ((Cell(0, msgspec.structs.replace(CUT, itemsize=0), BOTH[0].owners),), BOTH)},
        {"patterns": ((Cell(0, msgspec.structs.replace(CUT, to_strides=(8, -2)), BOTH[0].owners),), BOTH)},
        {"patterns": ((Cell(0, CUT, (Owner(0, -1, (4, 2), 2, ""),)),), BOTH)},
        {"patterns": ((Cell(0, CUT, (Owner(0, 0, (4, -2), 2, ""),)),), BOTH)},
        {"patterns": ((Cell(0, CUT, (Owner(0, 0, (4, 2), 0, ""),)),), BOTH)},
        {"patterns": ((Cell(0, CUT, (Owner(0, 0, (4, 2), 2, "", None, 0),)),), BOTH)},
        {"patterns": ((Cell(0, CUT, (Owner(0, 0, (4, 2), 2, "", Blocks((5,), (0, 0))),)),), BOTH)},
        {"groups": (Group(0, (0, 2), (-1,), ((0, 0),)),)},
        {"groups": (Group(0, (0, 2), (0,), ((0, -1),)),)},
    ],
)
def test_what_names_more_than_it_has_is_no_program(wrong: dict[str, object]) -> None:
    with pytest.raises(LayoutMismatch, match="names what it does not have"):
        decoded(encoded(msgspec.structs.replace(PROGRAM, **wrong)))


def test_other_bytes_are_no_program() -> None:
    with pytest.raises(LayoutMismatch, match="is none"):
        decoded(b"\x93")
