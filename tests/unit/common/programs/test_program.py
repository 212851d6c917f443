"""Programs carried out: which units there are, who has them, and where they stand at both ends."""

import msgspec
import pytest

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.programs import numbered_program as module
from tensorhub_common.programs.numbered_program import NumberedProgram, PatternCache
from tensorhub_common.programs.program import Cell, SourceBox, TensorGroup, TransferProgram, UnitSplit, decoded, encoded
from tensorhub_common.programs.regions import Blocks, Dim, Sizes, StridedForm, joined_dims

# A program by hand: a box of 5 rows of 4 elements of two bytes, two rows at a time, that a source and its copy have;
# and one of which the left half of each row is one source's, the right half another one's.
CUT = UnitSplit((5, 4), (8, 2), 2, dim=0, rows=2, units=3)
HALF = UnitSplit((5, 2), (8, 2), 2, dim=0, rows=5, units=1)
BOTH = (Cell(0, HALF, (SourceBox(0, 0, (4, 2), 2, ""),)), Cell(4, HALF, (SourceBox(1, 0, (4, 2), 2, ""),)))
PROGRAM = TransferProgram(
    "reader",
    ("left", "right", "copy"),
    ((Cell(0, CUT, (SourceBox(0, 16, (100, 2), 2, ""), SourceBox(1, 0, (8, 2), 2, ""))),), BOTH),
    (TensorGroup(0, (0, 2), (0, 256), ((1000, 0), (2000, 40))), TensorGroup(1, (0, 1), (512,), ((3000, 4000),))),
)
ONE = TensorGroup(0, (0,), (0,), ((0,),))


def test_units_are_numbered_source_by_source() -> None:
    """What two sources have stands apart from what one has alone."""
    execution = NumberedProgram(PROGRAM)
    assert len(execution) == 2 * 3 + 2
    assert execution.given_by("left") == ((0, 7),)
    assert execution.given_by("copy") == ((1, 6),)
    assert execution.given_by("right") == ((7, 1),)
    assert execution.given_by("nobody") == ()
    assert execution.nbytes() == [20, 16, 16, 8, 16, 16, 8, 20]
    assert execution.runs() == [([0, 20], 1), ([0, 16, 32, 40], 2), ([0, 20], 1)]
    # The units of `copy` lie apart, and the last ones are of two blocks.
    alone = TensorGroup(0, (1, 2), (0,), ((0, 0),)), TensorGroup(0, (0, 2), (0,), ((0, 0),))
    groups = (*alone, TensorGroup(1, (2, 1), (64,), ((0, 0),)))
    apart = NumberedProgram(msgspec.structs.replace(PROGRAM, groups=groups))
    assert [apart.given_by(each) for each in PROGRAM.sources] == [((0, 3),), ((3, 4),), ((0, 3), (4, 4))]
    nothing = NumberedProgram(msgspec.structs.replace(PROGRAM, groups=()))
    assert (len(nothing), nothing.table_bytes, nothing.digest) == (0, 0, "")


def test_units_know_where_they_stand_at_both_ends() -> None:
    execution = NumberedProgram(PROGRAM)
    regions = execution.regions("left", [(1, 6)])
    assert list(regions.to) == [0, 16, 32, 256, 272, 288]
    assert list(regions.origin) == [1016, 1216, 1416, 2016, 2216, 2416]
    assert [form.shape for form in regions.form] == [(2, 4), (2, 4), (1, 4)] * 2
    assert regions.form[0] is regions.form[1], "units that are alike share a form"
    assert regions.form[0].origin_strides == (100, 2)
    there = execution.regions("copy", [(3, 1)])
    assert (list(there.to), list(there.origin), there.form[0].origin_strides) == ([32], [32], (8, 2))
    long = NumberedProgram(msgspec.structs.replace(PROGRAM, sources=("left", "r" * 13, "copy")))
    with pytest.raises(KeyError, match=r"'layout r{12} does not have all of these units'$"):
        long.regions("r" * 13, [(1, 1)])
    here = execution.regions("reader", [(1, 3)])
    assert here.form[0] is here.form[1]
    # Of two units the first is longer; and the same box of a source gives two cells, which are cut otherwise.
    two, whole = UnitSplit((3, 4), (8, 2), 2, dim=0, rows=2, units=2), UnitSplit((3, 4), (8, 2), 2, 0, 3, 1)
    box = SourceBox(0, 0, (8, 2), 2, "")
    other = NumberedProgram(
        TransferProgram("reader", ("a",), ((Cell(0, two, (box,)), Cell(24, whole, (box,))),), (ONE,))
    )
    assert other.nbytes() == [16, 8, 24]
    for layout in ("a", "reader"):
        assert [form.shape for form in other.regions(layout, [(0, 3)]).form] == [(2, 4), (1, 4), (3, 4)]


def of_one(cut: UnitSplit, *owners: SourceBox) -> TransferProgram:
    """Return a program of one cell of one tensor, which begins at 7 here, and at 100 and 200 there."""
    sources = tuple(range(len(owners)))
    return TransferProgram(
        "reader",
        ("a", "b")[: len(owners)],
        ((Cell(3, cut, owners),),),
        (TensorGroup(0, sources, (7,), ((100, 200)[: len(owners)],)),),
    )


def test_each_owner_has_its_own_form_and_a_group_without_tensors_gives_nothing() -> None:
    cut = UnitSplit((4,), (2,), 2, dim=0, rows=4, units=1)
    execution = NumberedProgram(of_one(cut, SourceBox(0, 0, (2,), 2, ""), SourceBox(1, 6, (8,), 4, "x")))
    ((one,), (other,)) = (execution.regions(each, [(0, 1)]).form for each in "ab")
    assert (one.origin_strides, one.itemsize, one.cast) == ((2,), 2, "")
    assert (other.origin_strides, other.itemsize, other.cast) == ((8,), 4, "x")
    assert list(execution.regions("b", [(0, 1)]).origin) == [206]
    empty = msgspec.structs.replace(PROGRAM, groups=(TensorGroup(0, (0, 2), (), ()), *PROGRAM.groups))
    for layout in PROGRAM.sources:
        assert NumberedProgram(empty).given_by(layout) == NumberedProgram(PROGRAM).given_by(layout)


def test_a_unit_that_is_computed_of_blocks_takes_its_own() -> None:
    """Two scales a unit, of 128 rows each; the last block has 60."""
    cut = UnitSplit((5, 1), (4, 4), 4, dim=0, rows=2, units=3)
    blocks = Blocks((4 * 128 + 60, 256), (0, 0))
    regions = NumberedProgram(of_one(cut, SourceBox(0, 0, (512, 2), 2, "x", blocks, 128))).regions("a", [(0, 3)])
    assert [form.blocks for form in regions.form] == [Blocks((rows, 256), (0, 0)) for rows in (256, 256, 60)]
    assert list(regions.origin) == [100, 100 + 256 * 512, 100 + 512 * 512]
    cut, blocks = UnitSplit((1, 5), (4, 4), 4, dim=1, rows=2, units=3), Blocks((256, 4 * 128 + 60), (0, 0))
    regions = NumberedProgram(of_one(cut, SourceBox(0, 0, (2048, 2), 2, "x", blocks, 128))).regions("a", [(0, 3)])
    assert [form.blocks for form in regions.form] == [Blocks((256, columns), (0, 0)) for columns in (256, 256, 60)]
    whole, blocks = UnitSplit((9, 4), (4, 1), 1, dim=0, rows=9, units=1), Blocks((128, 128), (5, 2))
    (form,) = NumberedProgram(of_one(whole, SourceBox(0, 0, (512, 2), 2, "x", blocks))).regions("a", [(0, 1)]).form
    assert form.blocks == blocks, "a cell of one unit is made of all its blocks, which begin before it does"


def test_there_are_so_many_units_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNITS_MAX", 8)
    NumberedProgram(PROGRAM)
    monkeypatch.setattr(module, "UNITS_MAX", 7)
    with pytest.raises(LayoutMismatch, match="filled by 8 units, and 7 are possible: use more shards"):
        NumberedProgram(PROGRAM)


@pytest.mark.parametrize("own", ["reader", "left", "right"])
def test_all_who_have_units_are_told_at_once(own: str) -> None:
    """Memory of the destination's own layout has every unit, whether the program was compiled of that or not."""
    program = msgspec.structs.replace(PROGRAM, layout=own)
    execution = NumberedProgram(program)
    given = dict(execution.given())
    assert list(given) == list(dict.fromkeys((*program.sources, own)))
    assert given == {layout: execution.given_by(layout) for layout in given}
    assert given[own] == ((0, len(execution)),)


def units_of(execution: NumberedProgram) -> list[object]:
    """Return all that is to be known of a program's units."""
    everything = [(0, len(execution))]
    regions = [
        (layout, given, execution.regions(layout, given))
        for layout in execution.program.sources
        if (given := execution.given_by(layout))
    ]
    return [execution.nbytes(), list(execution.places(everything)), regions]


def test_programs_of_the_same_patterns_are_numbered_as_by_themselves() -> None:
    """The same cells in other groups: of one source, of two, of two boxes in one source."""
    twice = (Cell(0, HALF, (SourceBox(0, 0, (4, 2), 2, ""), SourceBox(1, 0, (4, 2), 2, ""))),)
    cells = (*PROGRAM.patterns, twice)
    groups = [
        (TensorGroup(1, (1, 0), (0,), ((5, 7),)), TensorGroup(2, (2, 1), (64,), ((0, 9),))),
        (TensorGroup(1, (2, 2), (0,), ((5, 50),)), TensorGroup(1, (0, 2), (64,), ((0, 9),))),
        (TensorGroup(2, (1, 1), (0, 64), ((5, 50), (6, 60))), TensorGroup(0, (2, 0), (256,), ((0, 9),))),
        PROGRAM.groups,
    ]
    known = PatternCache()
    for some in [*groups, *reversed(groups)]:
        program = TransferProgram("reader", PROGRAM.sources, cells, some)
        assert units_of(NumberedProgram(program, "", known)) == units_of(NumberedProgram(program))
    one, other = (NumberedProgram(PROGRAM, "", known).runs() for _ in range(2))
    assert all(a is b for (a, _), (b, _) in zip(one, other, strict=True)), "what follows of a pattern is kept once"
    both = TransferProgram("reader", PROGRAM.sources, cells, groups[1])
    assert NumberedProgram(both, "", known).given_by("copy") == ((1, 3),), "two boxes of one source are one block"


def test_what_one_source_has_in_several_boxes_goes_tensor_by_tensor() -> None:
    """In this order agents of all releases number it, whoever compiled the program."""
    group = TensorGroup(1, (2, 2), (0, 64), ((5, 50), (6, 60)))
    groups = (TensorGroup(1, (0, 1), (512,), ((3000, 4000),)), group)
    execution = NumberedProgram(TransferProgram("reader", PROGRAM.sources, PROGRAM.patterns, groups))
    assert [place.to for place in execution.places([(0, 6)])] == [512, 516, 0, 4, 64, 68]
    apart = msgspec.structs.replace(group, sources=(1, 2))
    execution = NumberedProgram(TransferProgram("reader", PROGRAM.sources, PROGRAM.patterns, (apart,)))
    assert [place.to for place in execution.places([(0, 4)])] == [0, 64, 4, 68]


def test_what_is_kept_of_patterns_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATTERNS_MAX", 2)
    known = PatternCache()
    first = known.alike(PROGRAM.patterns[0], 2)
    assert known.alike(PROGRAM.patterns[0], 2) is first, "it is found out once"
    for _ in range(2):
        assert known.alike(PROGRAM.patterns[0], 2) is first
        cells = tuple(msgspec.structs.replace(cell) for cell in BOTH)
        assert [each.boxes for each in known.alike(cells, 2)] == [(0,), (1,)]
    again = known.alike(PROGRAM.patterns[0], 2)
    assert again == first, "what was forgotten is found out again"
    assert again is not first
    twice = (Cell(0, HALF, (BOTH[0].owners[0], BOTH[0].owners[0])),)
    assert [[each.boxes for each in known.alike(twice, boxes)] for boxes in (1, 3)] == [[(0,)], [(0, 0)]]


def scalar(cut: UnitSplit) -> tuple[Cell, ...]:
    """Return a pattern of one element of no dimension."""
    return (Cell(0, cut, (SourceBox(0, 0, (), 4, ""),)),)


BAD_CUTS = [
    *(msgspec.structs.replace(CUT, dim=dim) for dim in (-1, 2)),
    *(msgspec.structs.replace(CUT, units=units) for units in (2, 4)),
    *(msgspec.structs.replace(CUT, to_strides=strides) for strides in ((8,), (8, -2))),
    msgspec.structs.replace(CUT, rows=0),
    msgspec.structs.replace(CUT, itemsize=0),
    msgspec.structs.replace(CUT, shape=(5, 0)),
]
BAD_SCALARS = [UnitSplit((), (), 4, dim, 1, units) for dim, units in ((1, 1), (-1, 1), (0, 2))]
BAD_BOXES = [
    SourceBox(2, 0, (8, 2), 2, ""),
    SourceBox(-1, 0, (8, 2), 2, ""),
    SourceBox(0, 0, (2,), 2, ""),
    SourceBox(0, -1, (4, 2), 2, ""),
    SourceBox(0, 0, (4, -2), 2, ""),
    SourceBox(0, 0, (4, 2), 0, ""),
    SourceBox(0, 0, (4, 2), 2, "", None, 0),
    SourceBox(0, 0, (4, 2), 2, "", Blocks((5,), (0, 0))),
]


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
        *({"patterns": ((Cell(0, cut, BOTH[0].owners),), BOTH)} for cut in BAD_CUTS),
        *({"patterns": (scalar(cut), BOTH)} for cut in BAD_SCALARS),
        *({"patterns": ((Cell(0, CUT, owners),), BOTH)} for owners in [(), *((box,) for box in BAD_BOXES)]),
        {"patterns": ((Cell(-1, CUT, BOTH[0].owners),), BOTH)},
        {"groups": (TensorGroup(0, (0, 2), (-1,), ((0, 0),)),)},
        {"groups": (TensorGroup(0, (0, 2), (0,), ((0, -1),)),)},
        *({"groups": (TensorGroup(0, (0, 2), (0,), ((0, 0),), *table),)} for table in ((-1, 0), (0, -1))),
    ],
)
def test_what_names_more_than_it_has_is_no_program(wrong: dict[str, object]) -> None:
    good = msgspec.structs.replace(PROGRAM, patterns=(scalar(UnitSplit((), (), 4, 0, 1, 1)), BOTH))
    empty = msgspec.structs.replace(PROGRAM, patterns=((), BOTH), groups=(TensorGroup(0, (), (0,), ((),)),))
    none = msgspec.structs.replace(PROGRAM, groups=(TensorGroup(0, (0, 2), (), ()),))
    assert [decoded(encoded(each)) for each in (PROGRAM, good, empty, none)] == [PROGRAM, good, empty, none]
    with pytest.raises(
        LayoutMismatch, match=r"^the blob that should be a transfer program names what it does not have$"
    ):
        decoded(encoded(msgspec.structs.replace(PROGRAM, **wrong)))


@pytest.mark.parametrize("other", [b"\x93", encoded(PROGRAM).replace(b"left", b"l\xffft"), b"\x91" * 100_000])
def test_other_bytes_are_no_program(other: bytes) -> None:
    with pytest.raises(LayoutMismatch, match="is none"):
        decoded(other)


def form(shape: Sizes, to_strides: Sizes, origin_strides: Sizes | None = None, to_itemsize: int = 2) -> StridedForm:
    return StridedForm(shape, to_strides, to_strides if origin_strides is None else origin_strides, 4, to_itemsize)


def test_a_box_has_its_bytes_at_either_end() -> None:
    """Four bytes there become two here."""
    box = form((3, 5), (64, 2), (32, 4))
    assert (box.elements, box.nbytes, box.origin_nbytes) == (15, 30, 60)
    assert (box.span_bytes, box.origin_span_bytes) == (2 * 64 + 4 * 2 + 2, 2 * 32 + 4 * 4 + 4)
    assert box.origin_shape == (3, 5)
    one = form((), ())
    assert (one.elements, one.nbytes, one.span_bytes, one.is_packed_here, one.is_packed_there) == (1, 2, 2, True, True)


@pytest.mark.parametrize(
    ("shape", "strides", "is_packed"),
    [
        ((3, 5), (10, 2), True),
        ((3, 5), (12, 2), False),
        ((3, 5), (10, 4), False),
        ((1, 5), (999, 2), True),
        ((3, 1), (2, 999), True),
        ((3, 1, 4), (8, 999, 2), True),
        ((3, 2, 4), (8, 8, 2), False),
    ],
)
def test_packed_is_what_follows_on_one_another(shape: Sizes, strides: Sizes, *, is_packed: bool) -> None:
    """How far apart the elements of a dimension would lie that has one says nothing."""
    assert form(shape, strides, (1,) * len(shape)).is_packed_here == is_packed
    there = tuple(2 * stride for stride in strides)
    assert form(shape, (1,) * len(shape), there).is_packed_there == is_packed


def test_what_is_made_of_blocks_is_as_large_as_those_there() -> None:
    """A box of two scales is made of 128 rows of 256 elements."""
    box = StridedForm((1, 2), (16, 4), (1024, 4), 4, 4, "float32>x", Blocks((128, 256), (0, 0)))
    assert (box.nbytes, box.origin_shape, box.origin_nbytes) == (8, (128, 256), 128 * 256 * 4)
    assert box.origin_span_bytes == 128 * 1024
    assert box.is_packed_there
    assert box.is_packed_here


@pytest.mark.parametrize(
    ("dims", "joined"),
    [
        ([(3, 20, 40), (5, 4, 8)], [(15, 4, 8)]),
        ([(3, 20, 40), (1, 7, 7), (5, 4, 8), (1, 9, 9)], [(15, 4, 8)]),
        ([(2, 60, 120), (3, 20, 40), (5, 4, 8)], [(30, 4, 8)]),
        ([(3, 20, 41), (5, 4, 8)], [(3, 20, 41), (5, 4, 8)]),
        ([(3, 21, 40), (5, 4, 8)], [(3, 21, 40), (5, 4, 8)]),
        ([(1, 4, 8)], []),
    ],
)
def test_dimensions_that_continue_each_other_at_both_ends_are_one(dims: list[Dim], joined: list[Dim]) -> None:
    assert joined_dims(dims) == joined
