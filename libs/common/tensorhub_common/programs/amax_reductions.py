"""Which units of a transfer program belong to which fold. Pure.

Always true: a fold's partials are all units below `partials` that belong to it; what follows of them are its scales, or
its values, and no unit belongs to two folds.
"""

from array import array
from itertools import accumulate
from typing import Final
from weakref import WeakKeyDictionary

from tensorhub_common.programs.numbered_program import NumberedProgram


class AmaxReductions:
    """The folds of a program, by number. A program whose sources cut no block has none."""

    def __init__(self, program: NumberedProgram) -> None:
        """Number them."""
        self.partials, self.scales, self.values = program.partials, program.scales, program.values
        runs = list(program.fold_runs())
        counts: dict[int, tuple[int, int]] = {}
        for run in runs:
            last = max(cell.fold.number for cell in run.cells if cell.fold is not None)
            counts[run.group] = (max(last + 1, counts.get(run.group, (0, 0))[0]), run.tensors)
        first = dict(zip(counts, accumulate((n * tensors for n, tensors in counts.values()), initial=0), strict=False))
        self.of = array("l", bytes(array("l").itemsize * self.values))
        """The fold of each unit."""
        self.units: list[list[int]] = [[] for _ in range(sum(n * tensors for n, tensors in counts.values()))]
        """The units of each fold, in order: its partials come first."""
        for run in runs:
            numbers = [cell.fold.number for cell in run.cells if cell.fold is not None]
            unit = run.first
            for tensor in range(run.tensors):
                base = first[run.group] + tensor * counts[run.group][0]
                for number in numbers:
                    self.of[unit] = base + number
                    self.units[base + number].append(unit)
                    unit += 1

    def __len__(self) -> int:
        """Return the number of folds."""
        return len(self.units)

    def partials_of(self, fold: int) -> list[int]:
        """Return what a fold is folded of."""
        return [unit for unit in self.units[fold] if unit < self.partials]

    def rest_of(self, fold: int) -> list[int]:
        """Return what follows of a fold: its scales, or its values."""
        return [unit for unit in self.units[fold] if unit >= self.partials]


_KNOWN: Final[WeakKeyDictionary[NumberedProgram, AmaxReductions]] = WeakKeyDictionary()


def amax_reductions_of(program: NumberedProgram) -> AmaxReductions:
    """Return a program's folds, numbered once for as long as the program is kept."""
    known = _KNOWN.get(program)
    if known is None:
        known = _KNOWN[program] = AmaxReductions(program)
    return known
