"""Transfer programs of layouts, at the seam: cells, owners, units, and the sentences for what no source has."""

from math import prod

import msgspec
import pytest

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.layout import PIECE_BYTES_MAX, Layout, TensorEntry, layout_of
from tensorhub_common.layout.parts import Part, Shape
from tensorhub_common.programs.amax_cells import UnitKind
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.programs.program import TransferProgram
from tensorhub_planner.compiler import layout_index
from tensorhub_planner.compiler.compiler import compile_program
from tensorhub_planner.compiler.layout_index import TENSORS_TOLD_MAX, LayoutIndex

OWNERS_MAX = 8
"""A cell names this many of its sources at most."""
FIRST_OWNERS = 2
"""The first ones are always among them."""

ITEMSIZES = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}


def entry(
    name: str, shape: Shape, start: Shape | None = None, stop: Shape | None = None, dtype: str = "int8"
) -> TensorEntry:
    """Return a box of a global tensor of this shape."""
    begin, end = start or (0,) * len(shape), stop or shape
    sizes = tuple(b - a for a, b in zip(begin, end, strict=True))
    return TensorEntry(name, dtype, ITEMSIZES[dtype], sizes, shape, begin)


def rows(begin: int, end: int, names: str = "w", whole: int = 24) -> Layout:
    return layout_of([entry(name, (whole, 4), (begin, 0), (end, 4)) for name in names])


def compiled(reader: Layout, originals: tuple[str, ...] = (), /, **sources: Layout) -> TransferProgram:
    return compile_program("reader", reader, LayoutIndex(sources, originals))


def refusal(reader: Layout, originals: tuple[str, ...] = (), /, **sources: Layout) -> str:
    with pytest.raises(LayoutMismatch) as raised:
        compiled(reader, originals, **sources)
    return str(raised.value)


def test_a_program_names_the_sources_that_it_reads_from_in_their_order() -> None:
    program = compiled(rows(4, 12), a=rows(18, 24), b=rows(8, 16), c=rows(0, 8))
    assert (program.layout, program.sources) == ("reader", ("b", "c"))
    execution = NumberedProgram(program)
    assert [execution.given_by(each) for each in "abc"] == [(), ((0, 1),), ((1, 1),)]


def test_tensors_that_are_cut_alike_share_a_pattern() -> None:
    """And a group, where they also come from the same sources; a place that all boxes have is named once."""
    program = compiled(rows(4, 12, "uvw"), a=rows(0, 8, "uvw"), b=rows(8, 16, "uw"), c=rows(8, 16, "v"))
    assert len(program.patterns) == 1
    assert sorted(group.sources for group in program.groups) == [(0, 1), (0, 2)]
    two = next(group for group in program.groups if len(group.to) == 2)
    room = two.to[1] // 2
    assert two.to == (0, 2 * room)
    assert two.at == ((0,), (2 * room, room)), "both begin at 0; then each source has its own"
    many = {f"s{number:02}": rows(0, 24, "uv"[number % 2]) for number in range(2 * OWNERS_MAX + 2)}
    program = compiled(rows(0, 24, "uv"), **many)
    assert (len(program.patterns), len(program.groups)) == (1, 2), "also where a reader takes some of many owners"


def test_of_sources_that_are_equal_each_is_an_owner_and_a_box_that_is_not_read_from_is_left_out() -> None:
    (group,) = compiled(rows(0, 8), a=rows(0, 8), b=rows(0, 24)).groups
    assert group.sources == (0, 1)
    (group,) = compiled(rows(20, 24), a=rows(0, 8, "vw"), b=rows(16, 24, "uvw")).groups
    room = group.at[0][0] // 2
    assert (group.sources, group.at, room > 0) == ((0,), ((2 * room,),), True)
    (group,) = compiled(rows(20, 24), a=rows(16, 24, "uvw"), b=rows(0, 8, "vw")).groups
    assert (group.sources, group.at) == ((0,), ((2 * room,),))
    (group,) = compiled(rows(4, 12, "uw"), a=rows(0, 8, "uvw"), b=rows(8, 16, "uw"), c=rows(16, 24, "uw")).groups
    assert (group.sources, group.at) == ((0, 1), ((0,), (2 * room, room)))


def test_what_the_reader_has_nothing_of_is_counted_and_the_first_ones_are_named() -> None:
    program = compiled(rows(0, 8, "bd"), a=rows(0, 8, "abcdefghijkl"))
    assert (program.unread, program.unread_count) == (tuple("acefghij"), 10)


@pytest.mark.parametrize(("count", "least"), [(8, 8), (9, 5), (14, 8), (24, 7)])
def test_of_many_owners_a_cell_names_the_first_and_by_lot_some_of_the_others(count: int, least: int) -> None:
    """In their order, and each of the others is somebody's: so that their load is spread."""
    sources = {f"s{number:03}": rows(0, 24, names="w" + "x" * (number % 2)) for number in range(count)}
    index, named = LayoutIndex(sources), set[str]()
    for lot in range(2 * count):
        program = compile_program(f"{lot:08}", rows(0, 24), index)
        (group,) = program.groups
        assert least <= len(group.sources) <= OWNERS_MAX
        assert program.sources[:FIRST_OWNERS] == tuple(sources)[:FIRST_OWNERS], (
            "the first ones, which are ready, are always named"
        )
        named |= set(program.sources)
    assert named == set(sources)


def test_forgotten_patterns_are_worked_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {"a": rows(0, 12, "uvw"), "b": rows(12, 24, "uvw")}
    readers = [rows(at, at + 5, "uvw") for at in range(20)]
    kept = LayoutIndex(sources)
    expected = [compile_program("x", reader, kept) for reader in readers]
    monkeypatch.setattr(layout_index, "PATTERNS_MAX", 2)
    monkeypatch.setattr(layout_index, "GRIDS_MAX", 1)
    monkeypatch.setattr("tensorhub_planner.compiler.boxes.ROWS_MAX", 2)
    monkeypatch.setattr("tensorhub_planner.compiler.memo.PLACES_MAX", 2)
    index = LayoutIndex(sources)
    for reader, program in [*zip(readers, expected, strict=True)] * 2:
        assert compile_program("x", reader, index) == program
        assert len(index._patterns) <= 2
        assert len(index._grids) <= 1


def test_what_no_source_has_is_named_by_its_first_region_and_so_many_tensors() -> None:
    assert refusal(rows(0, 24), a=rows(0, 8), b=rows(12, 24)) == "no holder has [8:12, 0:4] of 'w'"
    names = "abcdef"
    told = refusal(rows(0, 24, names), x=rows(1, 24, names))
    assert told == "; ".join(f"no holder has [0:1, 0:4] of {name!r}" for name in "abcd") + ", and 2 more tensors"
    assert refusal(rows(0, 24, names[:4]), x=rows(1, 24, names)).endswith("of 'd'")
    assert refusal(rows(0, 24, "v"), x=rows(0, 24, "w")) == (
        "'v' is int8 of global shape [24, 4] here, and with the holders there is nothing of that name"
    )


def test_another_tensor_of_the_name_is_told_with_all_that_there_is() -> None:
    reader = layout_of([entry("w", (6,))])
    told = refusal(reader, a=layout_of([entry("w", (7,))]), b=layout_of([entry("w", (6,), dtype="float32")]))
    assert told == (
        "'w' is int8 of global shape [6] here, and with the holders there is int8 of global shape [7] and float32 of "
        "global shape [6]"
    )
    many = {f"s{size}": layout_of([entry("w", (size,))]) for size in range(7, 7 + TENSORS_TOLD_MAX + 1)}
    assert refusal(reader, **many).count(" of global shape ") == 1 + TENSORS_TOLD_MAX


def test_what_was_published_is_cast_and_what_others_have_cast_is_not() -> None:
    reader, source = layout_of([entry("w", (6,), dtype="bfloat16")]), layout_of([entry("w", (6,), dtype="float32")])
    ((cell,),) = compiled(reader, ("a",), a=source, b=source).patterns
    assert [(owner.box, owner.cast) for owner in cell.owners] == [(0, "float32>bfloat16")]
    assert refusal(reader, a=source) == (
        "'w' is bfloat16 of global shape [6] here, and with the holders there is float32 of global shape [6]"
    )


@pytest.mark.parametrize(("here", "there"), [("int8", "float32"), ("bfloat16", "int8")])
def test_a_dtype_that_is_not_castable_is_refused_though_it_was_published(here: str, there: str) -> None:
    reader, source = (layout_of([entry("w", (6,), dtype=dtype)]) for dtype in (here, there))
    assert refusal(reader, ("a",), a=source) == (
        f"'w' is {here} of global shape [6] here, and with the holders there is {there} of global shape [6]"
    )


def quantised(start: Shape, stop: Shape, whole: Shape = (256, 128)) -> Layout:
    extent = tuple(b - a for a, b in zip(start, stop, strict=True))
    part = Part("w", whole, start, extent, (0, 0), extent, "fp8-block-128:values")
    return layout_of([TensorEntry("mine", "float8_e4m3fn", 1, extent, extent, (0, 0), (part,))])


@pytest.mark.parametrize(
    ("edges", "told"),
    [
        (
            [(0, 64), (128, 384)],
            "[0:128, 0:128] of {} is computed of [0:128, 0:128], and no holder has [64:128, 0:128] of 'w'",
        ),
        ([(0, 64), (64, 128), (128, 256)], "no holder has [256:384, 0:128] of {}"),
    ],
)
def test_what_is_lacking_of_a_block_is_told_with_what_the_block_is_computed_of(
    edges: list[tuple[int, int]], told: str
) -> None:
    whole = (384, 128)
    sources = {f"{a}": layout_of([entry("w", whole, (a, 0), (b, 128), "bfloat16")]) for a, b in edges}
    reader = quantised((0, 0), whole, whole)
    assert refusal(reader, tuple(sources), **sources) == told.format("'w' as fp8-block-128:values")


def test_what_others_have_quantised_is_told_by_how() -> None:
    assert refusal(layout_of([entry("w", (256, 128))]), a=quantised((0, 0), (256, 128))) == (
        "'w' is int8 of global shape [256, 128] here, and with the holders there is "
        "float8_e4m3fn (fp8-block-128:values) of global shape [256, 128]"
    )


def test_groups_that_are_computed_of_cut_blocks_stand_in_the_table_one_after_another() -> None:
    heights = {"a": 256, "b": 384, "c": 256, "d": 512}
    reader: list[TensorEntry] = []
    shards: dict[str, list[TensorEntry]] = {"upper": [], "lower": []}
    for name, height in heights.items():
        whole = (height, 128)
        part = Part(name, whole, (0, 0), whole, (0, 0), whole, "fp8-block-128:values")
        reader.append(TensorEntry(name, "float8_e4m3fn", 1, whole, whole, (0, 0), (part,)))
        shards["upper"].append(entry(name, whole, (0, 0), (70, 128), "bfloat16"))
        shards["lower"].append(entry(name, whole, (70, 0), whole, "bfloat16"))
    groups = compiled(layout_of(reader), tuple(shards), **{each: layout_of(its) for each, its in shards.items()}).groups
    each = [group.table_bytes for group in groups]
    assert [group.table for group in groups] == [0, 2 * each[0], 2 * each[0] + each[1]]
    assert min(each) > 0


@pytest.mark.parametrize("count", [OWNERS_MAX, 2 * OWNERS_MAX])
def test_of_many_that_have_parts_of_a_block_each_is_read_from_by_somebody(count: int) -> None:
    """Of the second block one source has each half alone; the first one is whole, and no less of the reader."""
    boxes = [(a, b) for a, b in ((0, 128), (128, 200), (200, 256)) for _ in range(count)]
    sources = {
        f"s{number:03}": layout_of([entry("w", (256, 128), (a, 0), (b, 128), "bfloat16"), entry(f"x{number}", (1,))])
        for number, (a, b) in enumerate(boxes)
    }
    index, reader, named = LayoutIndex(sources, set(sources)), quantised((0, 0), (256, 128)), set[str]()
    for lot in range(2 * count):
        program = compile_program(f"{lot:08}", reader, index)
        (cells,) = program.patterns
        assert sum(prod(each.cut.shape) for each in cells if each.kind is not UnitKind.PARTIAL) == 256 * 128
        named |= set(program.sources)
    assert named == set(sources)


def test_sources_that_are_cut_alike_give_whole_blocks_alike() -> None:
    whole = (256, 128)
    sources = {
        name: layout_of([entry("w", whole, dtype="bfloat16"), *(entry(each, (1,)) for each in name)]) for name in "ab"
    }
    part = Part("w", whole, (0, 0), (2, 1), (0, 0), (2, 1), "fp8-block-128:scales")
    reader = layout_of([TensorEntry("mine", "float32", 4, (2, 1), (2, 1), (0, 0), (part,))])
    ((cell,),) = compiled(reader, ("a", "b"), **sources).patterns
    assert cell.owners[1] == msgspec.structs.replace(cell.owners[0], box=1)
    assert cell.owners[1].blocks is not None


def test_a_box_that_gives_no_whole_block_cuts_nothing() -> None:
    """One rank of another replica has a part of a block alone: the whole is filled as if that one weren't there."""
    whole = layout_of([entry("w", (512, 128), dtype="bfloat16")])
    part = layout_of([entry("w", (512, 128), (130, 0), (250, 128), "bfloat16")])
    reader = quantised((0, 0), (512, 128), (512, 128))
    assert compiled(reader, ("a", "b"), a=whole, b=part) == compiled(reader, ("a",), a=whole)


@pytest.mark.parametrize(
    ("start", "stop"), [((0, 0), (2, 5)), ((6, 3), (8, 8)), ((0, 0), (5, 2)), ((3, 6), (8, 8)), ((0, 0), (1, 4))]
)
def test_a_box_beside_what_is_read_cuts_nothing(start: Shape, stop: Shape) -> None:
    reader, whole = layout_of([entry("w", (8, 8), (2, 2), (6, 6))]), layout_of([entry("w", (8, 8))])
    beside = layout_of([entry("w", (8, 8), start, stop)])
    assert compiled(reader, a=whole, b=beside) == compiled(reader, a=whole)


def test_tensors_without_an_element_and_padding_are_in_no_program() -> None:
    reader = layout_of([entry("e", (0, 4)), entry("w", (24, 4))])
    assert len(NumberedProgram(compiled(reader, a=rows(0, 24)))) == 1
    assert len(NumberedProgram(compiled(layout_of([entry("e", (0, 4))])))) == 0


def cuts(program: TransferProgram) -> list[tuple[int, int, int]]:
    """Return of each cell the dimension along which it is cut, the rows of a unit, and how many units it has."""
    return [(cell.cut.dim, cell.cut.rows, cell.cut.units) for pattern in program.patterns for cell in pattern]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, PIECE_BYTES_MAX // 4), [(0, 4, 1)]),
        ((9, PIECE_BYTES_MAX // 4), [(0, 4, 3)]),
        ((9, PIECE_BYTES_MAX // 4 + 1), [(0, 3, 3)]),
        ((3, PIECE_BYTES_MAX), [(0, 1, 3)]),
        ((3, PIECE_BYTES_MAX + 1), [(1, PIECE_BYTES_MAX, 2)] * 3),
        ((), [(0, 1, 1)]),
    ],
)
def test_units_are_as_large_as_they_may_be(shape: Shape, expected: list[tuple[int, int, int]]) -> None:
    """They are rows of the first dimension of which one row fits into a unit."""
    whole = layout_of([entry("w", shape)])
    assert cuts(compiled(whole, a=whole)) == expected


COLUMNS = PIECE_BYTES_MAX // 256


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (100, 1024, [(0, 28, 1), (0, 256, 4)]),
        (128, 1024, [(0, 256, 4)]),
        (100, 256, [(0, 156, 1)]),
        (100, 257, [(0, 28, 1), (0, 129, 1)]),
        (228, 384, [(0, 156, 1)]),
        (100, 120, [(0, 20, 1)]),
    ],
)
def test_units_of_fp8_values_begin_where_blocks_do(first: int, last: int, expected: list[tuple[int, int, int]]) -> None:
    """What is left of a first block is a cell of its own once there are several units."""
    whole = (1024, COLUMNS)
    source = layout_of([entry("w", whole, dtype="bfloat16")])
    program = compiled(quantised((first, 0), (last, COLUMNS), whole), ("a",), a=source)
    assert [(dim, min(rows, last - first), units) for dim, rows, units in cuts(program)] == expected


def test_a_row_of_blocks_that_is_longer_than_a_unit_is_cut_between_blocks() -> None:
    wide = (256, 40_000)
    source = layout_of([entry("w", wide, dtype="bfloat16")])
    assert cuts(compiled(quantised((0, 0), wide, wide), ("a",), a=source)) == [(1, 32_768, 2)] * 2


def test_readers_that_are_cut_alike_share_what_was_worked_out() -> None:
    """Whatever their layouts: as long as all owners fit into a cell, one pattern serves everybody."""
    index = LayoutIndex({f"s{at:03}": rows(at, at + 1) for at in range(24)})
    (one,), (other,) = (compile_program(f"{lot:08}", rows(0, 24), index).patterns for lot in (1, 2))
    assert one is other
