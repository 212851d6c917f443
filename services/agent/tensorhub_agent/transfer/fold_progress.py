"""Which folds of a read by a program are known, and which partials are wanted for that. Pure.

A reader may take quantised values from a source that has them, and then it needs no partial. A source that has a part
of the blocks computes values only with the fold, which needs all partials. So partials are deferred until values of
their fold are given to such a source, or a plan names them. Scales that no source brings follow from their fold.

Invariants:
- A partial is deferred, or is with the read as any other unit, or is folded.
- Values are asked for by amax only when their fold is known.
- A fold is known once each of its partials is folded, and each is folded once.
"""

from collections.abc import Iterable, Sequence

from tensorhub_agent.primitives.ranges import clear_marks, merge_ranges, ranges_of_marks, set_marks, split_by_marks
from tensorhub_agent.transfer.balancing import assign_plan
from tensorhub_common.programs.amax_reductions import AmaxReductions
from tensorhub_common.protocol.plans import Plan, Share
from tensorhub_common.protocol.ranges import Range


class FoldProgress:
    """The folds of one read. Without a program it has none."""

    def __init__(self, folds: AmaxReductions | None, units: int) -> None:
        """Begin with all partials asleep."""
        self._folds = folds
        self.partials = folds.partials if folds is not None else 0
        self._asleep = bytearray(b"\x01" * self.partials)
        self._left = [len(folds.partials_of(fold)) for fold in range(len(folds))] if folds is not None else []
        """Of each fold, how many partials are not folded."""
        self._follows = bytearray(folds.scales) if folds is not None else bytearray()
        self.unknown = bytearray(units)
        """Marks of values whose fold is not known; sources look at them."""
        if folds is not None:
            set_marks(self.unknown, [(folds.scales, folds.values - folds.scales)])

    def places(self) -> Iterable[Iterable[Range]]:
        """Yield what is with no source and not wanted of any now."""
        yield ranges_of_marks(self._asleep, 0, self.partials)
        yield ranges_of_marks(self._follows, 0, len(self._follows))

    def apart(self, ranges: Iterable[Range]) -> tuple[list[Range], list[Range]]:
        """Divide units into partials and others."""
        partials: list[Range] = []
        others: list[Range] = []
        for first, count in ranges:
            ahead = min(count, max(self.partials - first, 0))
            partials += [(first, ahead)] if ahead else []
            others += [(first + ahead, count - ahead)] if count > ahead else []
        return partials, others

    # What a plan may give, and what it gave.

    def choice(self, loose: Sequence[Range]) -> tuple[Range, ...]:
        """Return what a planner may choose of: what is loose, and the partials by which it could be had."""
        asleep = [unit for fold in self._of(loose) for unit in self._sleepers(fold)]
        return tuple(merge_ranges([*loose, *((unit, 1) for unit in asleep)]))

    def spread(
        self, plan: Plan, loose: Sequence[Range], units: int
    ) -> tuple[list[tuple[Share, list[Range]]], list[Range]]:
        """Say which units each share of a plan brings, as `sharing.spread`; partials that it names wake."""
        given, left = assign_plan(plan, [*loose, *ranges_of_marks(self._asleep, 0, self.partials)], units)
        for _, ranges in given:
            clear_marks(self._asleep, self.apart(ranges)[0])
        partials, others = self.apart(left)
        return given, [*split_by_marks(self._asleep, partials)[1], *others]

    def follow(self, loose: Sequence[Range]) -> tuple[list[Range], list[Range]]:
        """Take scales whose fold is under way out of what is loose; return the rest, and scales that are known."""
        folds, known, rest = self._folds, list[Range](), list[Range]()
        if folds is None:
            return list(loose), known
        for first, count in loose:
            for unit in range(first, min(first + count, folds.scales)):
                fold = folds.of[unit]
                if unit < self.partials or (self._left[fold] and len(self._sleepers(fold)) == self._left[fold]):
                    rest.append((unit, 1))
                elif self._left[fold]:
                    self._follows[unit] = 1
                    rest += self.request_partials([(unit, 1)])
                else:
                    known.append((unit, 1))
            ahead = max(folds.scales - first, 0)
            rest += [(first + ahead, count - ahead)] if count > ahead else []
        return merge_ranges(rest), merge_ranges(known)

    def request_partials(self, wanted: Iterable[Range]) -> list[Range]:
        """Return partials that have slept until now, and without which these units can't be had of parts of blocks."""
        found = merge_ranges((unit, 1) for fold in self._of(wanted) for unit in self._sleepers(fold))
        clear_marks(self._asleep, found)
        return found

    def defer_partials(self, partials: Iterable[Range]) -> tuple[list[Range], list[Range]]:
        """Let partials sleep that no source has; return scales that do not follow now, and values that wait in vain."""
        set_marks(self._asleep, partials)
        folds = self._folds
        if folds is None:
            return [], []
        rest = [unit for fold in self._of(partials) for unit in folds.rest_of(fold)]
        scales = [(unit, 1) for unit in rest if unit < folds.scales and self._follows[unit]]
        clear_marks(self._follows, scales)
        return scales, [(unit, 1) for unit in rest if unit >= folds.scales]

    # What came.

    def folded(self, partials: Iterable[Range]) -> tuple[list[Range], bool]:
        """Count partials; return the scales that follow of them, and whether any fold is known by that."""
        folds, scales, is_known = self._folds, list[Range](), False
        for first, count in partials:
            for unit in range(first, first + count):
                assert folds is not None
                fold = folds.of[unit]
                self._left[fold] -= 1
                if not self._left[fold]:
                    is_known = True
                    rest = folds.rest_of(fold)
                    clear_marks(self.unknown, [(each, 1) for each in rest])
                    scales += [(each, 1) for each in rest if each < folds.scales and self._follows[each]]
        clear_marks(self._follows, scales)
        return merge_ranges(scales), is_known

    def _of(self, units: Iterable[Range]) -> dict[int, None]:
        """Return the folds of units that are not known, each once."""
        folds = self._folds
        if folds is None:
            return {}
        found = (folds.of[unit] for first, count in units for unit in range(first, min(first + count, folds.values)))
        return {fold: None for fold in found if self._left[fold]}

    def _sleepers(self, fold: int) -> list[int]:
        assert self._folds is not None
        return [unit for unit in self._folds.partials_of(fold) if self._asleep[unit]]
