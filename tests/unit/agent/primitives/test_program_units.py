"""What stands and what can be had while a shard is filled by a program: against a painting of every byte."""

import contextlib
from itertools import combinations
from random import Random
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples_of import examples
from tests.property.shardings import cuttings, models
from tests.unit.planner import cut_blocks

from tensorhub_agent.primitives.program_units import PieceCompletion, UnitAvailability, UnitSpans
from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout import layout as layouts
from tensorhub_common.layout.layout import Layout, PieceTable, layout_digest, pieces
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.programs.program import Cell, SourceBox, TensorGroup, TransferProgram, UnitSplit
from tensorhub_common.programs.regions import StridedForm
from tensorhub_common.protocol.ranges import Range
from tensorhub_planner.compiler import overlaps
from tensorhub_planner.compiler.compiler import compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex

SMALL_BYTES = 24


def of(data: st.DataObject) -> tuple[NumberedProgram, Layout, list[Layout]]:
    """Draw a program, its reader's layout and its sources' layouts."""
    model = data.draw(models())
    replicas = [data.draw(cuttings(model)) for _ in range(data.draw(st.integers(1, 2)))]
    reader = data.draw(st.sampled_from(data.draw(cuttings(model))))
    sources = {layout_digest(layout): layout for replica in replicas for layout in replica}
    program = compile_program(layout_digest(reader), reader, LayoutIndex(sources))
    return NumberedProgram(program), reader, list(sources.values())


def small_pieces(layout: Layout) -> PieceTable:
    with mock.patch.object(layouts, "PIECE_BYTES_MAX", SMALL_BYTES):
        return pieces(layout)


def box(at: int, form: StridedForm, strides: tuple[int, ...], itemsize: int) -> np.ndarray:
    """Return the bytes that a box stands in."""
    where = np.array([at])
    for size, stride in zip(form.shape, strides, strict=True):
        where = (where[:, None] + np.arange(size) * stride).reshape(-1)
    return (where[:, None] + np.arange(itemsize)).reshape(-1)


@given(st.data())
@settings(max_examples=examples(1.0))
def test_pieces_stand_when_all_their_bytes_do(data: st.DataObject) -> None:
    """Never earlier, each once; and in the end all do."""
    with mock.patch.object(overlaps, "PIECE_BYTES_MAX", SMALL_BYTES):
        execution, reader, sources = of(data)
    table = small_pieces(reader)
    completion = PieceCompletion(execution, table)
    painted = np.zeros(max([a + n for a, n in zip(table.at, table.nbytes, strict=True)], default=0), bool)
    told = np.zeros(len(table), int)
    for unit in data.draw(st.permutations(range(len(execution)))):
        giver = next(layout for layout in map(layout_digest, sources) if _gives(execution, layout, unit))
        regions = execution.regions(giver, [(unit, 1)])
        painted[box(regions.to[0], regions.form[0], regions.form[0].to_strides, regions.form[0].to_itemsize)] = True
        for first, count in completion.units_arrived([(unit, 1)]):
            told[first : first + count] += 1
            for piece in range(first, first + count):
                assert painted[table.at[piece] : table.at[piece] + table.nbytes[piece]].all()
    assert (told == 1).all()


@given(st.data())
@settings(max_examples=examples(1.0))
def test_units_can_be_had_when_all_their_bytes_stand_there(data: st.DataObject) -> None:
    """Never earlier, each once; and all once everything stands there."""
    with mock.patch.object(overlaps, "PIECE_BYTES_MAX", SMALL_BYTES):
        execution, _, sources = of(data)
    source = data.draw(st.sampled_from(sources))
    digest, table = layout_digest(source), small_pieces(source)
    availability = UnitAvailability(execution, digest, table)
    painted = np.zeros(max([a + n for a, n in zip(table.at, table.nbytes, strict=True)], default=0), bool)
    told = np.zeros(len(execution), int)
    for piece in data.draw(st.permutations(range(len(table)))):
        painted[table.at[piece] : table.at[piece] + table.nbytes[piece]] = True
        for first, count in availability.units([(piece, 1)]):
            regions = execution.regions(digest, [(first, count)])
            told[first : first + count] += 1
            for origin, form in zip(regions.origin, regions.form, strict=True):
                assert painted[box(origin, form, form.origin_strides, form.itemsize)].all()
    able = np.zeros(len(execution), int)
    for first, count in execution.given_by(digest):
        able[first : first + count] = 1
    np.testing.assert_array_equal(told, able)


def of_rows(unit_rows: int, reader: Layout, *sources: Layout) -> NumberedProgram:
    """Return a program whose units are so many rows of 8 bytes."""
    with mock.patch.object(overlaps, "PIECE_BYTES_MAX", 8 * unit_rows):
        by_digest = {layout_digest(each): each for each in sources}
        return NumberedProgram(compile_program("reader", reader, LayoutIndex(by_digest)))


def matrix(start: tuple[int, int] = (0, 0), stop: tuple[int, int] = (9, 8)) -> Layout:
    """Return a box of a matrix of 9 rows; a piece of a whole one is of three rows."""
    shape = (stop[0] - start[0], stop[1] - start[1])
    return layouts.layout_of([layouts.TensorEntry("w", "int8", 1, shape, (9, 8), start)])


WHOLE, HALVES = (matrix(),), (matrix((0, 0), (9, 4)), matrix((0, 4), (9, 8)))
Stages = list[tuple[list[Range], list[Range]]]


@pytest.mark.parametrize(
    ("unit_rows", "sources", "stages"),
    [
        (1, WHOLE, [([(0, 2), (3, 1)], []), ([(2, 1), (4, 2)], [(0, 2)]), ([(6, 2)], []), ([(8, 1)], [(2, 1)])]),
        (2, WHOLE, [([(0, 1)], []), ([(2, 1)], []), ([(1, 1)], [(0, 2)]), ([(3, 2)], [(2, 1)])]),
        (1000, HALVES, [([(1, 1)], []), ([(0, 1)], [(0, 3)])]),
    ],
    ids=["a row each", "two rows, of two pieces", "columns"],
)
def test_a_piece_stands_with_the_last_of_its_units(unit_rows: int, sources: tuple[Layout, ...], stages: Stages) -> None:
    completion = PieceCompletion(of_rows(unit_rows, matrix(), *sources), small_pieces(matrix()))
    for arrived, stand in stages:
        assert completion.units_arrived(arrived) == stand


@pytest.mark.parametrize(
    ("unit_rows", "reader", "stages"),
    [
        (3, matrix((3, 0), (6, 8)), [([(1, 1)], [(0, 1)]), ([(0, 3)], [])]),
        (2, matrix(), [([(1, 1)], [(2, 1)]), ([(2, 1)], [(3, 2)]), ([(0, 1)], [(0, 2)])]),
        (1000, matrix((2, 0), (4, 1)), [([(0, 1)], []), ([(1, 1)], [(0, 1)])]),
    ],
)
def test_a_unit_can_be_had_as_soon_as_its_own_pieces_stand_there(
    unit_rows: int, reader: Layout, stages: Stages
) -> None:
    """Whatever stands before and behind them; some need the piece before or behind as well."""
    execution = of_rows(unit_rows, reader, matrix())
    availability = UnitAvailability(execution, layout_digest(matrix()), small_pieces(matrix()))
    for there, units in stages:
        assert availability.units(there) == tuple(units)


def test_scales_that_nobody_brings_stand_with_their_fold() -> None:
    """Partials go nowhere, and scales that the reader folds itself are no source's: both are counted all the same."""
    layout, execution = of_blocks()
    table = pieces(layout)
    scales = (execution.partials, execution.scales - execution.partials)
    assert scales[1] > 0
    completion = PieceCompletion(execution, table)
    assert completion.units_arrived([(execution.scales, len(execution) - execution.scales)]) == [(1, 1)], "the values"
    assert completion.units_arrived([scales]) == [(0, 1)]


def vector(rows: int) -> Layout:
    return layouts.layout_of([layouts.TensorEntry("w", "int8", 1, (rows,), (rows,), (0,))])


def test_what_a_source_says_beyond_its_pieces_is_ignored() -> None:
    digest = layout_digest(vector(4))
    execution = NumberedProgram(compile_program("reader", vector(4), LayoutIndex({digest: vector(4)})))
    availability = UnitAvailability(execution, digest, pieces(vector(4)))
    assert availability.units([(-1, 1), (0, 0), (0, 2), (1, 1), (7, 8)]) == ()
    assert len(availability._has) == 1, "nor is it kept"
    assert availability.units([(0, 1)]) == ((0, 1),)


@pytest.mark.parametrize(
    ("to", "rows", "filled"), [(0, 3, 3), (1, 3, 3), (2, 4, 3), (256, 1, 3), (10**9, 1, 3), (0, 1, 0), (-1, 1, 3)]
)
def test_a_program_whose_box_lies_in_no_tensor_is_refused_before_it_is_read_by(to: int, rows: int, filled: int) -> None:
    """Else it would be found out in the middle of a read, by an agent that can't go on."""
    cell = Cell(to, UnitSplit((rows,), (1,), 1, 0, rows, 1), (SourceBox(0, 0, (1,), 1, ""),))
    program = TransferProgram("reader", ("source",), ((cell,),), (TensorGroup(0, (0,), (0,), ((0,),)),))
    is_good = (to, rows) == (0, 3)
    why = "^the transfer program has a box that lies in no tensor of the shard$"
    with contextlib.nullcontext() if is_good else pytest.raises(LayoutMismatch, match=why):
        table = pieces(vector(filled) if filled else layouts.layout_of([]))
        assert PieceCompletion(NumberedProgram(program), table).units_arrived([(0, 1)]) == [(0, 1)]


@pytest.mark.parametrize("in_order", [True, False])
def test_a_word_of_the_source_is_not_looked_up_for_every_unit(*, in_order: bool) -> None:
    """Each unit is looked at once for each piece that it waits for in vain, whatever the order of the words."""
    rows = 64
    source = layouts.layout_of([layouts.TensorEntry("w", "int8", 1, (rows, 4), (rows, 4), (0, 0))])
    reader = layouts.layout_of([layouts.TensorEntry("w", "int8", 1, (rows, 1), (rows, 4), (0, 2))])
    digest = layout_digest(source)
    with mock.patch.object(overlaps, "PIECE_BYTES_MAX", 2):
        execution = NumberedProgram(compile_program("reader", reader, LayoutIndex({digest: source})))
    with mock.patch.object(layouts, "PIECE_BYTES_MAX", 4):
        table = pieces(source)
    availability = UnitAvailability(execution, digest, table)
    looks: list[int] = []
    wait = availability._wait

    def waits(piece: int, unit: int, stop: int) -> None:
        looks.append(unit)
        wait(piece, unit, stop)

    with mock.patch.object(availability, "_wait", waits):
        for piece in range(rows) if in_order else reversed(range(rows)):
            availability.units([(piece, 1)])
    assert len(looks) == (rows // 2 if in_order else 0), "two rows are a unit here, and wait for the first one first"


def _gives(execution: NumberedProgram, layout: str, unit: int) -> bool:
    return any(first <= unit < first + count for first, count in execution.given_by(layout))


BANDS = [matrix((row, column), (row + 3, column + 4)) for row in (0, 3, 6) for column in (0, 4)]
MIXED = of_rows(1, matrix(), *BANDS)
"""Of half a row of 8 bytes: the units of every third row are packed, and the others have two rows each."""


def of_blocks() -> tuple[Layout, NumberedProgram]:
    """Return a program by which the reader folds scales itself, and the layout that it fills."""
    layout, sources = cut_blocks.reader(), cut_blocks.sources(100)
    return layout, NumberedProgram(compile_program("fp8", layout, LayoutIndex(sources, tuple(sources))))


@pytest.mark.parametrize(
    "execution",
    [MIXED, of_rows(2, matrix(), *WHOLE), of_rows(1, matrix(), *HALVES), of_blocks()[1]],
    ids=["mixed", "packed", "columns", "blocks"],
)
def test_a_run_of_bytes_is_lacked_unless_its_units_stand(execution: NumberedProgram) -> None:
    """Packed ones side by side, or a strided one in whose span it lies."""
    own = execution.program.layout
    [(first, _)] = given = execution.given_by(own)
    here = execution.regions(own, given)
    spans = [(at, at + form.span_bytes, form.is_packed_here) for at, form in zip(here.to, here.form, strict=True)]
    near = {edge + more for begin, end, _ in spans for edge in (begin, end) for more in (-1, 0, 1)}
    points, lookup = sorted(near - {-1}), UnitSpans(execution)
    for chance in range(6):
        stands = bytearray(Random(chance).choices((0, 1), (chance, 5), k=len(execution)))
        standing = [span for unit, span in enumerate(spans, first) if stands[unit]]
        packed = np.zeros(points[-1], bool)
        for begin, end, is_packed in standing:
            packed[begin:end] |= is_packed
        for at, stop in combinations(points, 2):
            strided = any(begin <= at and stop <= end for begin, end, is_packed in standing if not is_packed)
            assert lookup.lacks(stands, at, stop - at) is not (strided or bool(packed[at:stop].all()))


def test_a_piece_that_stood_is_not_told_again_when_its_tensor_is_whole() -> None:
    with mock.patch.object(layouts, "PIECE_BYTES_MAX", 8):
        completion = PieceCompletion(MIXED, pieces(matrix()))
    assert [completion.units_arrived([(unit, 1), (unit + 2, 1)]) for unit in (1, 5)] == [[(2, 1)], [(5, 1)]]
    assert completion.units_arrived([(unit, 1) for unit in (0, 2, 4, 6, 8, 9, 10, 11)]) == [(0, 2), (3, 2), (6, 3)]


@given(st.data())
@settings(max_examples=examples(1.0))
def test_a_source_of_the_reader_s_own_layout_gives_each_unit_where_it_belongs(data: st.DataObject) -> None:
    """By whichever program: the bytes of a unit are the same there and here."""
    execution, reader, _ = of(data)
    own = layout_digest(reader)
    assert execution.given_by(own) == (((0, len(execution)),) if len(execution) else ())
    here = execution.regions(own, [(0, len(execution))])
    for source in execution.program.sources:
        if source == own:
            continue
        there = execution.regions(source, units := execution.given_by(source))
        numbers = [unit for first, count in units for unit in range(first, first + count)]
        for unit, to, form in zip(numbers, there.to, there.form, strict=True):
            mine = here.form[unit]
            assert (here.to[unit], mine.shape, mine.to_strides) == (to, form.shape, form.to_strides)
            assert (mine.origin_strides, mine.itemsize, mine.cast) == (form.to_strides, form.to_itemsize, "")
