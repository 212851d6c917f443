"""Folds of a program: which partials each has, and what follows of them."""

import msgspec
import pytest
from tests.unit.planner.cut_blocks import reader, sources

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.programs import numbered_program as executions
from tensorhub_common.programs.amax_reductions import AmaxReductions, amax_reductions_of
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.programs.program import TransferProgram, decoded, encoded
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
    ],
)
def test_what_is_no_fold_is_refused(change: dict[str, object]) -> None:
    program = compiled(70)
    plain = msgspec.to_builtins(program)
    fold = next(cell[3] for pattern in plain["patterns"] for cell in pattern if cell[3] is not None)
    columns = ["kind", "number", "at", "strides", "grain", "scheme"]
    for name, value in change.items():
        fold[columns.index(name)] = value
    assert decoded(encoded(program)) == program
    assert len(amax_reductions_of(NumberedProgram(program))) < 1 << 10, "as many are kept as there are numbers"
    with pytest.raises(LayoutMismatch):
        decoded(msgspec.msgpack.encode(plain))
