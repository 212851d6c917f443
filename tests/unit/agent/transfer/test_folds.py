"""A read by a program with amax reductions: no value is asked for by amax before its fold is known."""

import random

import pytest
from tests.unit.agent.transfer.driver import Driven, share
from tests.unit.planner.cut_blocks import reader, sources

from tensorhub_agent.primitives.ranges import set_marks
from tensorhub_agent.transfer.transfer import TransferPhase
from tensorhub_common.programs.amax_reductions import AmaxReductions
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.protocol.plans import Share
from tensorhub_common.protocol.ranges import Range
from tensorhub_planner.compiler.compiler import compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex

LAYOUTS = sources(70, 200, 300, 390)
PROGRAM = NumberedProgram(compile_program("reader", reader(), LayoutIndex(LAYOUTS, set(LAYOUTS))))
FOLDS = AmaxReductions(PROGRAM)
UNITS = len(PROGRAM)


def units_of(ranges: tuple[Range, ...] | list[Range]) -> set[int]:
    return {unit for first, count in ranges for unit in range(first, first + count)}


def marks_of(ranges: tuple[Range, ...]) -> bytearray:
    marks = bytearray(UNITS)
    set_marks(marks, ranges)
    return marks


class Read(Driven):
    """A read by the program. Each batch that is asked for is checked against the folds that are known by then."""

    def __init__(self) -> None:
        super().__init__(
            verify=False,
            pieces=UNITS,
            transport="ucxx",
            folds=FOLDS,
            able=lambda of: marks_of(PROGRAM.given_by(of.layout or "")),
            by_amax=lambda of: marks_of(PROGRAM.by_amax(of.layout or "")),
        )
        self.folded: list[int] = []
        self.scales: list[int] = []
        self.arrived: set[int] = set()

    def settle(self) -> None:
        """Take the actions; nothing is asked for too early, and each fold counts once."""
        actions = self.take()
        for _, partials, scales in actions.fold:
            self.folded += sorted(units_of(partials))
            self.scales += sorted(units_of(scales))
            assert units_of(partials) <= self.arrived
        for number, _, ranges in actions.post:
            by_amax = units_of(PROGRAM.by_amax(self.transfer.sources[number].share.layout or ""))
            for unit in units_of(ranges) & by_amax & set(range(PROGRAM.scales, PROGRAM.values)):
                needed = set(FOLDS.partials_of(FOLDS.of[unit]))
                assert needed <= set(self.folded), f"value {unit} is asked for before its fold is known"

    def begin(self, shares: list[Share]) -> None:
        self.tick()
        for number in self.planned(*shares):
            self.transfer.opened(number, b"", self.now)
        self.settle()

    def runs(self, rng: random.Random) -> None:
        """Let sources bring what is asked of them in any order, and confirm it, until the read is done."""
        for _ in range(5_000):
            if self.phase() is TransferPhase.LEASED:
                self.transfer.start(self.now)
            if self.phase() is not TransferPhase.RUNNING:
                return
            self.settle()
            ready = [each for each in self.transfer.sources.values() if each.in_flight]
            if ready:
                source = rng.choice(ready)
                batch = rng.choice(list(source.in_flight))
                self.arrived |= units_of(list(source.in_flight[batch][0]))
                self.transfer.batch_done(source.number, batch, b"", self.now)
                continue
            for source in list(self.transfer.sources.values()):
                if source.confirming or source.confirming_early:
                    self.transfer.confirmed(source.number, holds=True, now=self.now)
            self.now += 0.1
            self.transfer.tick(self.now)
            if self.actions.plan is not None or self.transfer.plan_requests.waiting:
                self.transfer.planned(self.nobody("no planner answers"), self.now)


def shares_of(units: set[int]) -> list[Share]:
    """Return a share of each layout with those of the units that no layout before it gives."""
    shares, left = [], set(units)
    for number, layout in enumerate(LAYOUTS):
        mine = units_of(PROGRAM.given_by(layout)) & left
        left -= mine
        if mine:
            shares.append(share(f"agent-{number}", *((unit, 1) for unit in sorted(mine)), layout=layout))
    return shares


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("first", [range(UNITS), range(PROGRAM.partials, UNITS)])
def test_every_fold_counts_once_and_before_any_value_that_needs_it(seed: int, first: range) -> None:
    """Partials that the first plan left out are asked for, since values need them."""
    read = Read()
    read.begin(shares_of(set(first)))
    if len(first) < UNITS:
        while read.actions.plan is None:
            read.tick(0.1)
        asked = units_of(read.actions.plan[0])
        assert asked
        assert asked <= set(range(PROGRAM.scales))
        read.begin(shares_of(asked))
    assert read.phase() is TransferPhase.LEASED
    read.runs(random.Random(seed))
    assert read.phase() is TransferPhase.DONE
    read.settle()
    assert len(read.folded) == len(set(read.folded)), "each partial counts once"
    assert len(read.scales) == len(set(read.scales))
    assert set(read.folded) <= set(range(PROGRAM.partials))


def test_the_planner_may_choose_of_the_partials_of_what_is_missing() -> None:
    read = Read()
    plan = read.tick().plan
    assert plan is not None
    assert units_of(plan[0]) == set(range(UNITS))


def test_partials_that_nobody_has_are_left_out_of_the_next_plan_together_with_what_waits_for_them() -> None:
    read = Read()
    [first, *_] = shares_of(set(range(PROGRAM.partials, UNITS)))
    read.begin([first])
    read.transfer.planned(read.nobody(), read.now)
    read.transfer.check()
    for _ in range(5):
        plan = read.tick(0.5).plan
        if plan is not None:
            break
        read.transfer.planned(read.nobody("no planner answers"), read.now)
    read.transfer.check()
