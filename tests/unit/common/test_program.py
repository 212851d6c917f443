"""Programs as data: what they say of units, and that what is none is refused."""

import msgspec
import pytest

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
