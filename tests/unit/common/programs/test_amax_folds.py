"""Folds of a program: which partials each has, and what follows of them."""

import msgspec
import pytest
from tests.unit.planner.cut_blocks import reader, sources

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.programs import numbered_program as executions
from tensorhub_common.programs.amax_cells import AmaxReduction, UnitKind
from tensorhub_common.programs.amax_reductions import AmaxReductions, amax_reductions_of
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.programs.program import (
    Cell,
    SourceBox,
    TensorGroup,
    TransferProgram,
    UnitSplit,
    decoded,
    encoded,
)
from tensorhub_planner.compiler.compiler import compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex


def compiled(*edges: int) -> TransferProgram:
    """Return the program of a reader of all values and scales, out of rows that are cut there."""
    layouts = sources(*edges)
    return compile_program("reader", reader(), LayoutIndex(layouts, set(layouts)))


def test_units_of_folds_come_first_and_each_belongs_to_one() -> None:
    """Partials, then scales, then values; the two tensors fold for themselves."""
    layouts = sources(70, 200)
    execution = NumberedProgram(compile_program("reader", reader(), LayoutIndex(layouts, set(layouts))))
    folds = amax_reductions_of(execution)
    assert amax_reductions_of(execution) is folds, "they are numbered once"
    assert all(execution.by_amax(layout) for layout in layouts)
    assert execution.by_amax("nobody") == ()
    assert 0 < execution.partials < execution.scales < execution.values <= len(execution)
    units = [unit for fold in range(len(folds)) for unit in folds.units[fold]]
    assert sorted(units) == list(range(execution.values))
    for fold in range(len(folds)):
        partials, rest = folds.partials_of(fold), folds.rest_of(fold)
        assert partials
        assert rest
        assert all(folds.of[unit] == fold for unit in (*partials, *rest))
        assert {unit < execution.scales for unit in rest} in ({True}, {False}), "scales or values, never both"


def test_a_fold_by_hand_has_its_entries_in_the_table_and_its_scales_in_the_destination() -> None:
    """Two tensors of two blocks, of each of which the one source has a part: 8 bytes of the table for each tensor."""
    scheme, cut = "fp8-block-128", UnitSplit((2,), (4,), 4, dim=0, rows=2, units=1)
    partial = Cell(0, cut, (SourceBox(0, 5, (8,), 2, "x"),), AmaxReduction(UnitKind.PARTIAL, 0, 0, (4,), (1,), scheme))
    scales = Cell(12, cut, (), AmaxReduction(UnitKind.SCALES, 0, 0, (4,), (1,), scheme))
    last = UnitSplit((1,), (4,), 4, dim=0, rows=1, units=1)
    second = Cell(24, last, (), AmaxReduction(UnitKind.SCALES, 1, 4, (4,), (1,), scheme))
    group = TensorGroup(0, (0,), (100, 200), ((1000,), (2000,)), table=16, table_bytes=8)
    program = TransferProgram("reader", ("a",), ((partial, scales, second),), (group,))
    assert decoded(encoded(program)) == program
    execution = NumberedProgram(program)
    assert (len(execution), execution.partials, execution.scales, execution.values) == (6, 2, 6, 6)
    assert (execution.given_by("a"), execution.given_by("reader")) == (((0, 2),), ((2, 4),))
    found = [(each.at, each.counts, each.to, each.form.shape) for each in execution.entries([(0, 6)])]
    assert found[:2] == [(16, (2,), 16, (2,)), (24, (2,), 24, (2,))]
    assert found[2:] == [
        *((16, (2,), 112, (2,)), (20, (1,), 124, (1,))),
        *((24, (2,), 212, (2,)), (28, (1,), 224, (1,))),
    ]
    regions = execution.regions("a", [(0, 2)])
    assert (list(regions.to), list(regions.origin)) == ([16, 24], [1005, 2005])


def test_blocks_that_are_not_cut_are_read_as_ever() -> None:
    """Only the row of blocks with the edge is folded, and where none is cut there is no fold."""
    execution = NumberedProgram(compiled(300))
    values = [unit for fold in AmaxReductions(execution).units for unit in fold if unit >= execution.scales]
    shapes = [next(execution.entries([(unit, 1)])).form.shape for unit in values]
    assert sum(rows for rows, _ in shapes) == 128
    assert NumberedProgram(compiled(70)).table_bytes == 2 * 4 * 4 * 2, "an entry for each block of each tensor"
    whole = NumberedProgram(compiled(128, 256))
    assert (whole.partials, whole.values, whole.table_bytes, len(AmaxReductions(whole))) == (0, 0, 0, 0)


def test_a_table_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that would need more is refused by what it would need."""
    monkeypatch.setattr(executions, "TABLE_BYTES_MAX", 64)
    NumberedProgram(compiled(70))
    monkeypatch.setattr(executions, "TABLE_BYTES_MAX", 60)
    with pytest.raises(LayoutMismatch, match=r"cut 16 blocks .* and 15 are possible"):
        NumberedProgram(compiled(70))


@pytest.mark.parametrize(
    "change",
    [
        *({"kind": kind} for kind in (3, 7)),
        *({"strides": strides} for strides in ((1,), (4, 1 << 40))),
        *({"grain": grain} for grain in ((0, 1), (2, 1))),
        *({name: number} for name, large in (("at", 1 << 20), ("number", 1 << 40)) for number in (-1, large)),
        {"scheme": "no such"},
        {"number": "as many as there are cells"},
    ],
)
def test_what_is_no_fold_is_refused(change: dict[str, object]) -> None:
    program = compiled(70)
    plain = msgspec.to_builtins(program)
    fold, cells = next((cell[3], len(some)) for some in plain["patterns"] for cell in some if cell[3] is not None)
    columns = ["kind", "number", "at", "strides", "grain", "scheme"]
    for name, value in change.items():
        fold[columns.index(name)] = cells if value == "as many as there are cells" else value
    assert decoded(encoded(program)) == program
    assert len(amax_reductions_of(NumberedProgram(program))) < 1 << 10, "as many are kept as there are numbers"
    with pytest.raises(LayoutMismatch):
        decoded(msgspec.msgpack.encode(plain))
