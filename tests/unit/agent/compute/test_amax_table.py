"""Partials of a batch count once their source has vouched for them, and make the entries of whole blocks."""

import math

import numpy as np
import pytest
from tests.unit.planner.cut_blocks import reader, sources

from tensorhub_agent.compute.amax_table import NumpyAmaxTable
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_planner.compiler.compiler import compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex

LAYOUTS = sources(70, 200, 300, 390)
EXECUTION = NumberedProgram(compile_program("reader", reader(), LayoutIndex(LAYOUTS, set(LAYOUTS))))
FIRST, SECOND = list(LAYOUTS)[:2]


def partials(layout: str) -> list[tuple[int, int]]:
    """Return the partials that a shard gives."""
    return [
        (unit, 1)
        for first, count in EXECUTION.given_by(layout)
        for unit in range(first, first + count)
        if unit < EXECUTION.partials
    ]


def bring(table: NumpyAmaxTable, source: int, layout: str, value: float) -> list[tuple[int, int]]:
    """Let a source say the same of all its parts of blocks."""
    units = partials(layout)
    memory, regions = table.batch_buffer(layout, units)
    assert list(regions.to) == sorted(regions.to)
    memory[:] = np.full(len(memory) // 4, value, np.float32).tobytes()
    table.batch_arrived(source, units, memory)
    return units


def values_of(layout: str) -> list[tuple[int, int]]:
    return list(EXECUTION.by_amax(layout))


def told(table: NumpyAmaxTable, layout: str, place: int = 0) -> list[float]:
    """Return by what a shard computes its first values, or later ones: those of the first row of blocks."""
    units = [unit for first, count in values_of(layout) for unit in range(first, first + count)]
    return [float(each) for each in np.frombuffer(table.amax(layout, [(units[place], 1)])[0], np.float32)]


@pytest.mark.parametrize("first", [3.0, math.nan])
def test_what_two_say_of_a_block_is_the_larger_of_both_and_a_nan_is_larger_than_any(first: float) -> None:
    table = NumpyAmaxTable(EXECUTION)
    for source, (layout, value) in enumerate(((FIRST, first), (SECOND, 2.0))):
        table.fold(source, bring(table, source, layout, value))
    np.testing.assert_array_equal(told(table, FIRST), [first, first])
    np.testing.assert_array_equal([told(table, SECOND, place) for place in (0, 1)], [[first, first], [2.0, 2.0]])


def test_nothing_counts_before_its_source_has_vouched_for_it_and_what_a_closed_one_has_said_is_forgotten() -> None:
    """Another one says it again, under a number of its own."""
    table = NumpyAmaxTable(EXECUTION)
    units = bring(table, 1, FIRST, 9.0)
    assert told(table, FIRST) == [0.0, 0.0]
    table.forget(1)
    with pytest.raises(KeyError):
        table.fold(1, units)
    table.fold(2, bring(table, 2, FIRST, 3.0))
    assert told(table, FIRST) == [3.0, 3.0]
