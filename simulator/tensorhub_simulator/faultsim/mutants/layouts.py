"""Planted bugs of blocks that no source has whole: folds known too early, and a table that is not the read's."""

# ruff: noqa: ANN401 (what stands in for a method takes what that takes)

from typing import TYPE_CHECKING, Any

import numpy as np

from tensorhub_agent.compute.amax_table import AmaxTable
from tensorhub_agent.transfer.fold_progress import Folding
from tensorhub_agent.transfer.source import Reading
from tensorhub_common.programs.amax_reductions import Folds

if TYPE_CHECKING:
    from tensorhub_simulator.faultsim.mutants.planting import Replacement


def values_before_amax() -> list["Replacement"]:
    """Values are asked for before the largest magnitudes of their blocks are known."""

    def apart(_: Reading, ranges: Any) -> Any:
        return [], list(ranges)

    return [(Reading, "apart", apart)]


def fold_lacks_a_part() -> list["Replacement"]:
    """A fold counts as known when all but one of those who have a part of it have told of theirs."""
    begin, folded = Folding.__init__, Folding.folded

    def init(self: Any, folds: Folds | None, units: int) -> None:
        begin(self, folds, units)
        self._left = [left - 1 or 1 for left in self._left]

    def count(self: Any, partials: Any) -> Any:
        units = [unit for first, count in partials for unit in range(first, first + count)]
        return folded(self, [(unit, 1) for unit in units if self._left[self._folds.of[unit]]])

    return [(Folding, "__init__", init), (Folding, "folded", count)]


def table_of_another_read() -> list["Replacement"]:
    """What was folded for one version stands in the table of the next read."""
    begin = AmaxTable.__init__
    tables: dict[int, Any] = {}

    def init(self: Any, program: Any) -> None:
        begin(self, program)
        self._table = tables.setdefault(program.table_bytes, np.zeros_like(self._table))

    return [(AmaxTable, "__init__", init)]
