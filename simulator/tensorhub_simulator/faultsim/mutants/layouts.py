"""Planted bugs of reads by programs, and of blocks that no source has whole.

- Blocks that no source has whole: folds are known too early, and a table is not the read's.
- Reads by programs: other layouts, half-filled sources, and plans that number other things.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tensorhub_agent.compute.amax_table import NumpyAmaxTable
from tensorhub_agent.core.operations.read import ReadOperation
from tensorhub_agent.core.operations.read_driver import ReadDriver
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_agent.primitives.program_units import PieceCompletion
from tensorhub_agent.primitives.ranges import merge_ranges
from tensorhub_agent.transfer import balancing
from tensorhub_agent.transfer.fold_progress import FoldProgress
from tensorhub_agent.transfer.source import Source
from tensorhub_agent.transfer.transfer import Transfer, TransferPhase
from tensorhub_common.programs.amax_reductions import AmaxReductions
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.programs.regions import StridedCopies
from tensorhub_common.protocol.ranges import Range
from tensorhub_simulator.faultsim.mutants.replacement import Replacement


def values_before_amax() -> list[Replacement]:
    """Values are asked for before the largest magnitudes of their blocks are known."""

    def apart(_: Source, ranges: Any) -> Any:
        return [], list(ranges)

    return [Replacement(Source.apart, apart)]


def fold_lacks_a_part() -> list[Replacement]:
    """A fold counts as known when all but one of those who have a part of it have told of theirs."""
    begin, folded = FoldProgress.__init__, FoldProgress.folded

    def init(self: Any, folds: AmaxReductions | None, units: int) -> None:
        begin(self, folds, units)
        self._left = [left - 1 or 1 for left in self._left]

    def count(self: Any, partials: Any) -> Any:
        units = [unit for first, count in partials for unit in range(first, first + count)]
        return folded(self, [(unit, 1) for unit in units if self._left[self._folds.of[unit]]])

    return [Replacement(FoldProgress.__init__, init), Replacement(FoldProgress.folded, count)]


def table_of_another_read() -> list[Replacement]:
    """What was folded for one version stands in the table of the next read."""
    begin = NumpyAmaxTable.__init__
    tables: dict[int, Any] = {}

    def init(self: Any, program: Any) -> None:
        begin(self, program)
        self._table = tables.setdefault(program.table_bytes, np.zeros_like(self._table))

    return [Replacement(NumpyAmaxTable.__init__, init)]


def units_as_pieces() -> list[Replacement]:
    """A read that is writing pieces takes a plan in units for one in pieces."""
    planned: Callable[[Any, Any, float], None] = ReadDriver._planned

    def take(self: Any, outcome: Any, now: float) -> None:
        if self.program is None and self.transfer.phase is not TransferPhase.LEASING:
            self.transfer.planned(outcome.answer, now)
            return
        planned(self, outcome, now)

    return [Replacement(ReadDriver._planned, take)]


def units_shown_early() -> list[Replacement]:
    """What came by a program is shown to others at once, before its source has said that its lease held."""
    done = Transfer.batch_done

    def batch_done(self: Any, number: int, batch: int, *rest: Any) -> None:
        source = self.sources.get(number)
        flying = source.in_flight.get(batch) if source is not None else None
        if flying is not None and not self.verification.verify:
            self.pool.actions.proven.extend(flying[0])
        done(self, number, batch, *rest)

    def stand(self: PieceCompletion, units: Iterable[Range]) -> list[Range]:
        told: set[int] = self.__dict__.setdefault("told", set())
        fresh = {unit for first, count in units for unit in range(first, first + count)} - told
        told |= fresh
        return once(self, merge_ranges((unit, 1) for unit in fresh))

    once = PieceCompletion.units_arrived
    return [Replacement(Transfer.batch_done, batch_done), Replacement(PieceCompletion.units_arrived, stand)]


def tensor_stands_early() -> list[Replacement]:
    """A tensor that is filled by strided boxes is said to stand with the first of them."""
    stand = PieceCompletion.units_arrived

    def claim(self: Any, units: Iterable[Range]) -> list[Range]:
        ranges = list(units)
        found = stand(self, ranges)
        for place in self._program.places(ranges):
            first, count = self._pieces_of(self._table.tensor[self._table.piece_at(place.to)])
            found += self._fresh(first, count)
        return merge_ranges(found)

    return [Replacement(PieceCompletion.units_arrived, claim)]


def foreign_view() -> list[Replacement]:
    """Boxes are gathered where another source's layout has them."""
    regions = NumberedProgram.regions

    def elsewhere(self: NumberedProgram, layout: str, ranges: Iterable[Range]) -> StridedCopies:
        units = list(ranges)
        for other in self.program.sources:
            try:
                return regions(self, other, units)
            except KeyError:
                continue
        return regions(self, layout, units)

    return [Replacement(NumberedProgram.regions, elsewhere)]


def foreign_units_taken() -> list[Replacement]:
    """An idle source takes over what its layout does not have."""
    take_over = balancing.steal_from_busiest

    def take(taker: Source, others: Iterable[Source]) -> None:
        able, taker.covered = taker.covered, None
        take_over(taker, others)
        taker.covered = able

    return [
        Replacement(balancing.steal_from_busiest, take),
        Replacement(Source.takeover_group, property(lambda _: None)),
    ]


def root_of_another() -> list[Replacement]:
    """Who was filled by a program says the root of what a source of another layout holds."""
    filled: Callable[[Any, str | None], None] = ReadOperation._filled

    def say(self: Any, root: str | None) -> None:
        foreign = [source.share.root for source in self.transfer.sources.values() if source.share.root is not None]
        filled(self, foreign[0] if foreign and root == root_digest(self._driver.digests) else root)

    return [Replacement(ReadOperation._filled, say)]
