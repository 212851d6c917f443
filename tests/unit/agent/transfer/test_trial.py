"""A read behind a slow middle tries another source, and keeps it only where that is far faster."""

import pytest
from tests.unit.agent.transfer.driver import ALL, NOBODY, PIECES, Driven, numbers_of, planning, share, source_id

from tensorhub_agent.transfer.limits import DEFAULT_LIMITS, TransferLimits
from tensorhub_agent.transfer.plan_requests import PLAN_S_MAX
from tensorhub_agent.transfer.source import SourcePhase
from tensorhub_agent.transfer.source_pool import TransferActions
from tensorhub_agent.transfer.transfer import TransferPhase
from tensorhub_agent.transfer.trial import NO_FASTER, TrialState
from tensorhub_common.protocol.ranges import Range

TRIAL_S = DEFAULT_LIMITS.trial_s
MIDDLE = source_id("middle")


class Behind:
    """A read whose one source, `middle`, is half-filled; it has a piece, and says each time that it lives."""

    def __init__(self, *there: Range, limits: TransferLimits = DEFAULT_LIMITS) -> None:
        self.read = planning(transport="ucxx", limits=limits)
        [self.middle] = self.read.planned(share("middle", *ALL))
        self.read.opened(self.middle, there=there or ((0, 1),))
        self.read.start()

    @property
    def state(self) -> TrialState:
        return self.read.transfer.pool.trial.state

    def lives(self, seconds: float, *pieces: Range) -> bool:
        """Let time pass in which the middle says that it lives, and has these pieces more; tells of a question."""
        end = self.read.now + seconds
        is_asked, self.read.actions = False, TransferActions()
        while self.read.now < end - 1e-9 and not is_asked:
            self.read.wait_exactly(min(0.2, end - self.read.now))
            is_asked = self.read.actions.plan is not None or self.read.available(self.middle).plan is not None
        asked = self.read.actions.plan
        self.read.available(self.middle, *pieces)
        self.read.actions.plan = self.read.actions.plan or asked
        return is_asked

    def tries(self, *names: str) -> list[int]:
        """Bring the first piece, wait for the trial, and let the planner name sources, each for a part of it."""
        self.read.brings(self.middle)
        assert self.lives(1.2 * TRIAL_S)
        assert self.read.actions.plan == (((4, 2),), (MIDDLE,))
        count = 2 // len(names)
        shares = [share(name, (4 + number, count)) for number, name in enumerate(names)]
        return self.read.planned(*shares)

    def opens(self, *names: str) -> list[int]:
        numbers = self.tries(*names)
        for number in numbers:
            self.read.opened(number)
        return numbers

    def ends(self) -> None:
        """Let the middle bring the rest."""
        self.read.available(self.middle, *ALL)
        while self.read.phase() is TransferPhase.RUNNING:
            self.read.brings(self.middle)
        assert self.read.phase() is TransferPhase.DONE


def test_whoever_is_far_faster_is_kept_and_takes_over() -> None:
    behind = Behind()
    read = behind.read
    [ready] = behind.opens("ready")
    assert read.posts == [(ready, ((4, 2),))]
    read.brings(ready, after_s=0.01)
    assert (behind.state, read.posts) == (TrialState.KEPT, [(ready, ((2, 2),))])
    read.brings(ready, after_s=0.01)
    read.brings(ready, after_s=0.01)
    assert read.phase() is TransferPhase.DONE
    assert read.source(behind.middle).got_bytes == 10


def test_whoever_is_no_faster_is_closed_and_has_not_failed() -> None:
    behind = Behind()
    read = behind.read
    [ready] = behind.opens("ready")
    behind.lives(0.8, (1, 1))
    read.brings(behind.middle)
    read.brings(ready)
    assert (read.actions.close, read.posts, read.left_out, behind.state) == ([ready], [], (), TrialState.RESTING)
    assert read.source(ready).lost == NO_FASTER
    read.closed(ready)
    assert not behind.lives(TRIAL_S), "the next trial comes later"
    behind.ends()


def test_of_several_that_are_no_faster_none_stays() -> None:
    """Whoever has brought its part is closed at once: it would take from the chain while the others bring theirs."""
    behind = Behind()
    read = behind.read
    one, other = behind.opens("ready", "near")
    behind.lives(0.8, (1, 3))
    read.brings(one)
    assert (read.actions.close, behind.state) == ([one], TrialState.TRYING)
    assert one not in [number for number, _ in read.posts]
    read.brings(other)
    assert (read.actions.close, behind.state) == ([other], TrialState.RESTING)
    for number in (one, other):
        read.closed(number)
    assert read.left_out == ()
    behind.ends()


@pytest.mark.parametrize("is_fast", [True, False])
def test_of_several_one_is_lost_and_the_other_judged(*, is_fast: bool) -> None:
    """Who is far faster takes over at once, and the trial is over when the other one is judged, or lost."""
    behind = Behind()
    read = behind.read
    tried, other = behind.opens("ready", "near")
    if is_fast:
        read.brings(tried, after_s=0.01)
        assert [number for number, _ in read.posts] == [tried]
        assert (read.actions.close, behind.state) == ([], TrialState.TRYING)
    read.is_gone(other)
    if not is_fast:
        behind.lives(0.8)
        read.brings(tried)
    assert behind.state is (TrialState.KEPT if is_fast else TrialState.RESTING)
    assert (read.source(tried).phase is SourcePhase.OPEN) is is_fast


@pytest.mark.parametrize("refuses", [True, False])
def test_where_nobody_else_has_them_or_no_planner_answers_the_pieces_go_back(refuses: bool) -> None:  # noqa: FBT001
    behind = Behind()
    behind.read.brings(behind.middle)
    assert behind.lives(1.2 * TRIAL_S)
    if refuses:
        behind.read.refused()
    else:
        assert not behind.lives(PLAN_S_MAX + 0.2)
    behind.read.available(behind.middle, *ALL)
    assert behind.state is TrialState.RESTING
    behind.read.brings(behind.middle)
    assert behind.read.phase() is TransferPhase.DONE


def test_whoever_is_tried_takes_everything_when_the_middle_goes() -> None:
    behind = Behind()
    [ready] = behind.opens("ready")
    behind.read.is_gone(behind.middle)
    assert behind.state is TrialState.RESTING
    behind.read.brings(ready)
    behind.read.brings(ready)
    assert behind.read.phase() is TransferPhase.DONE


def test_whoever_is_tried_and_lost_is_no_end_of_the_read() -> None:
    behind = Behind()
    [ready] = behind.tries("ready")
    assert behind.read.lost(ready).plan == (((4, 2),), (source_id("ready"),))
    behind.read.closed(ready)
    assert behind.state is TrialState.RESTING
    assert behind.read.planned(share("middle", (4, 2))) == []
    behind.ends()


def test_a_read_that_ends_soon_tries_nobody() -> None:
    """At a pace of 40 bytes in 0.4 s the two pieces that are left take less than as long again."""
    behind = Behind((0, 2), limits=TransferLimits(trial_s=0.4))
    behind.read.brings(behind.middle)
    behind.lives(0.2, (2, 2))
    behind.read.brings(behind.middle)
    assert not behind.lives(0.3)
    assert behind.lives(0.6), "it has come to a halt since"


def test_trials_come_ever_later_and_end() -> None:
    behind = Behind((0, 1))
    read = behind.read
    read.brings(behind.middle)
    for number in range(DEFAULT_LIMITS.trials_max):
        wait_s = TRIAL_S * DEFAULT_LIMITS.trial_times**number
        began = read.now
        while read.transfer.pool.trial.count == number:
            read.source(behind.middle).last_new_at = read.now
            behind.lives(0.2)
        assert wait_s <= read.now - began + 0.3 < wait_s + 1.0
        read.refused(NOBODY)
    for _ in range(100):
        read.source(behind.middle).last_new_at = read.now
        assert not behind.lives(5.0)


def ends_after(middle_s: float, origin_s: float, tries_max: int) -> float:
    """Return when a read ends whose middle gets a piece each `middle_s`; the origin needs `origin_s` for one."""
    behind, there, next_at = Behind(limits=TransferLimits(trials_max=tries_max)), 1, middle_s
    read, busy_until = behind.read, dict[tuple[int, int], float]()
    while read.phase() is TransferPhase.RUNNING:
        read.now = round(read.now + 0.05, 2)
        read.transfer.tick(read.now)
        if read.now >= next_at and there < PIECES:
            there, next_at = there + 1, next_at + middle_s
        actions = read.available(behind.middle, (0, there))
        for number in read.planned(share("origin", *actions.plan[0])) if actions.plan is not None else ():
            read.opened(number)
        for number, source in list(read.transfer.sources.items()):
            each_s = 0.01 if number == behind.middle else origin_s
            for batch, (ranges, _) in list(source.in_flight.items()):
                due = busy_until.setdefault((number, batch), read.now + each_s * len(numbers_of(ranges)))
                if read.now >= due:
                    land(read, number, batch)
            if source.phase is SourcePhase.CLOSING:
                read.closed(number)
    assert read.phase() is TransferPhase.DONE
    return read.now


def land(read: Driven, number: int, batch: int) -> None:
    pieces = numbers_of(read.source(number).in_flight[batch][0])
    read.done(number, b"".join(read.right[piece] for piece in pieces), batch)


def test_a_read_behind_a_slow_middle_ends_soon_after_it_has_found_a_better_source() -> None:
    assert ends_after(4.0, 0.1, 0) >= 5 * 4.0, "alone"
    assert ends_after(4.0, 0.1, DEFAULT_LIMITS.trials_max) < TRIAL_S + 2.0


def test_a_read_behind_a_middle_that_is_as_fast_as_the_network_stays_with_it() -> None:
    """The origin seems half as fast: it is tried, and let go of, and the read ends as it would have."""
    assert ends_after(1.0, 2.0, DEFAULT_LIMITS.trials_max) <= ends_after(1.0, 2.0, 0) + 0.5
