"""A read by a program with amax reductions: no value is asked for by amax before its fold is known."""

import random

import pytest
from tests.unit.agent.transfer.driver import SILENCE, Driven, numbers_of, reading, share
from tests.unit.planner.cut_blocks import reader, sources

from tensorhub_agent.primitives.ranges import set_marks
from tensorhub_agent.transfer.source_pool import TransferActions
from tensorhub_agent.transfer.transfer import TransferPhase
from tensorhub_common.programs.amax_reductions import AmaxReductions
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.protocol.plans import Refusal, Share
from tensorhub_common.protocol.ranges import Range
from tensorhub_planner.compiler.compiler import compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex

LAYOUTS = sources(70, 200, 300, 390)
PROGRAM = NumberedProgram(compile_program("reader", reader(), LayoutIndex(LAYOUTS, set(LAYOUTS))))
FOLDS = AmaxReductions(PROGRAM)
UNITS = len(PROGRAM)


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

    def take(self) -> TransferActions:
        """Take the actions; nothing is asked for too early, and only what has arrived is folded."""
        actions = super().take()
        for _, partials, scales in actions.fold:
            self.folded += numbers_of(partials)
            self.scales += numbers_of(scales)
            assert set(numbers_of(partials)) <= self.arrived
        for number, _, ranges in actions.post:
            by_amax = numbers_of(PROGRAM.by_amax(self.source(number).share.layout or ""))
            for unit in {*numbers_of(ranges)} & {*by_amax} & {*range(PROGRAM.scales, PROGRAM.values)}:
                needed = set(FOLDS.partials_of(FOLDS.of[unit]))
                assert needed <= set(self.folded), f"value {unit} is asked for before its fold is known"
        return actions

    def begin(self, shares: list[Share]) -> None:
        self.tick()
        for number in self.planned(*shares):
            self.opened(number, b"")

    def runs(self, rng: random.Random) -> None:
        """Let sources bring what is asked of them in any order, and confirm it, until the read is done."""
        self.start()
        for _ in range(5_000):
            if self.phase() is not TransferPhase.RUNNING:
                return
            ready = [each for each in self.transfer.sources.values() if each.in_flight]
            if ready:
                source = rng.choice(ready)
                batch = rng.choice(list(source.in_flight))
                self.arrived.update(numbers_of(source.in_flight[batch][0]))
                self.done(source.number, b"", batch)
                continue
            for source in list(self.transfer.sources.values()):
                if source.confirming or source.confirming_early:
                    self.confirmed(source.number, holds=True)
            self.tick(0.1)


def shares_of(units: set[int]) -> list[Share]:
    """Return a share of each layout with those of the units that no layout before it gives."""
    shares, left = [], set(units)
    for number, layout in enumerate(LAYOUTS):
        mine = {*numbers_of(PROGRAM.given_by(layout))} & left
        left -= mine
        if mine:
            shares.append(share(f"agent-{number}", *((unit, 1) for unit in sorted(mine)), layout=layout))
    return shares


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("first", [range(UNITS), range(PROGRAM.partials, UNITS)])
def test_every_fold_counts_once_and_before_any_value_that_needs_it(seed: int, first: range) -> None:
    """Partials that the first plan left out are asked for, since values need them; and the planner may choose."""
    read = Read()
    plan = read.tick().plan
    assert plan is not None
    assert numbers_of(plan[0]) == list(range(UNITS))
    read.begin(shares_of(set(first)))
    if len(first) < UNITS:
        while read.actions.plan is None:
            read.tick(0.1)
        asked = set(numbers_of(read.actions.plan[0]))
        assert asked
        assert asked <= set(range(PROGRAM.scales))
        read.begin(shares_of(asked))
    read.runs(random.Random(seed))
    assert read.phase() is TransferPhase.DONE
    assert len(read.folded) == len(set(read.folded)), "each partial counts once"
    assert len(read.scales) == len(set(read.scales))
    assert set(read.folded) <= set(range(PROGRAM.partials))


def test_partials_that_nobody_has_are_left_out_of_the_next_plan_together_with_what_waits_for_them() -> None:
    """They may be chosen of once more, and so may what could be had without them."""
    read = Read()
    [first, *_] = shares_of(set(range(PROGRAM.partials, UNITS)))
    read.begin([first])
    assert read.source(1).awaiting_fold
    read.refused(Refusal(error="VersionUnavailable", reason="busy", is_held=True))
    assert (read.transfer.pool.loose, read.pieces_of(1)) == ([(PROGRAM.partials, UNITS - PROGRAM.partials)], set())
    assert read.tick(0.5).plan == (((0, UNITS),), ())


def test_as_soon_as_partials_that_nobody_has_are_left_out_idle_sources_take_over_what_others_have_waiting() -> None:
    """Until then no source is relieved: what is loose comes first."""
    values, gone_layout = (PROGRAM.partials, UNITS - PROGRAM.partials), next(iter(LAYOUTS))

    def given(of: Share) -> bytearray:
        return marks_of(PROGRAM.given_by(of.layout) if of.layout else (values,))

    read, [busy, idle, gone] = reading(
        share("busy", (values[0], values[1] - 1)),
        share("idle", (UNITS - 1, 1)),
        share("gone", *PROGRAM.given_by(gone_layout)[:1], layout=gone_layout),
        verify=False,
        pieces=UNITS,
        folds=FOLDS,
        able=given,
    )
    read.is_gone(gone)
    read.brings(idle)
    read.confirmed(idle, holds=True)
    assert read.transfer.pool.loose
    assert read.pieces_of(idle) == set()
    before = read.pieces_of(busy)
    read.refused(Refusal(error="VersionUnavailable", reason="busy", is_held=True))
    assert read.transfer.pool.loose == []
    assert read.pieces_of(idle)
    assert read.pieces_of(idle) | read.pieces_of(busy) == before


def test_partials_that_sleep_wake_for_the_sources_that_there_are_only_while_no_planner_answers() -> None:
    """A planner that says that nobody has them is believed, and where no source is open they are of no use yet."""
    read = Read()
    read.begin(shares_of(set(range(UNITS))))
    read.start()
    first, *others = read.transfer.sources
    for number in others:
        read.is_gone(number)
    busy = Refusal(error="VersionUnavailable", reason="busy", is_held=True)
    for refusal, is_awake in ((busy, False), (SILENCE, True), (busy, False)):
        read.refused(refusal)
        awake = {*numbers_of(read.transfer.pool.loose)} & {*range(PROGRAM.partials)}
        assert awake == ({*range(2, PROGRAM.partials)} if is_awake else set())
        assert read.tick(0.5).plan is not None
    read.is_gone(first)
    for refusal in (busy, SILENCE):
        read.tick(0.5)
        read.refused(refusal)
        assert min(numbers_of(read.transfer.pool.loose)) == PROGRAM.partials
