"""A read behind a slow middle tries another source, and keeps it only where that is far faster."""

from tests.unit.agent.transfer.driver import LIST, PIECES, Driven, digests_of, source_id

from tensorhub_agent.primitives.ranges import total_count
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS, TransferLimits
from tensorhub_agent.transfer.plan_requests import PLAN_S_MAX
from tensorhub_agent.transfer.source import SourcePhase
from tensorhub_agent.transfer.source_pool import TransferActions
from tensorhub_agent.transfer.transfer import TransferPhase
from tensorhub_agent.transfer.trial import TrialState
from tensorhub_common.protocol.plans import Plan, Refusal, Share
from tensorhub_common.protocol.ranges import Range

ALL: tuple[Range, ...] = ((0, PIECES),)
NOBODY = Refusal(error="VersionUnavailable", reason="nobody else has it")


def plan_of(name: str, pieces: tuple[Range, ...]) -> Plan:
    share = Share(source=source_id(name), transport="ucxx", pieces=pieces, nbytes=0, why="")
    return Plan(version=3, shares=(share,), why="")


class Behind(Driven):
    """A read whose one source, `middle`, is half-filled; it has brought piece 0, and says each time that it lives."""

    def __init__(self, *there: Range, limits: TransferLimits = DEFAULT_LIMITS) -> None:
        super().__init__(transport="ucxx", limits=limits)
        self.tick()
        (self.middle,) = self.planned(("middle", ALL))
        self.transfer.opened(self.middle, LIST, self.now, there or ((0, 1),))
        self.transfer.start(self.now)
        self.take()

    def lives(self, seconds: float, *pieces: Range) -> TransferActions:
        """Let time pass in which the middle says that it lives, and at its end has these pieces more."""
        actions, end = TransferActions(), self.now + seconds
        self.actions = TransferActions()
        while self.now < end - 1e-9 and actions.plan is None:
            self.wait_exactly(min(0.2, end - self.now))
            self.transfer.available(self.middle, (), self.now)
            plan = self.actions.plan
            actions = self.take()
            actions.plan = actions.plan or plan
        self.transfer.available(self.middle, pieces, self.now)
        return actions

    def tries(self) -> int:
        """Wait for the trial, and let the planner name a ready source; returns its number."""
        self.brings(self.middle)
        actions = self.lives(1.2 * DEFAULT_LIMITS.trial_s)
        assert actions.plan == (((4, 2),), (source_id("middle"),))
        (number,) = self.planned(("ready", ((4, 2),)))
        return number

    @property
    def state(self) -> TrialState:
        return self.transfer.pool.trial.state


def test_whoever_is_far_faster_is_kept_and_takes_over() -> None:
    behind = Behind()
    ready = behind.tries()
    assert [post[2] for post in behind.opened(ready).post] == [((4, 2),)]
    posts = behind.brings(ready, after_s=0.01).post
    assert behind.state is TrialState.KEPT
    assert [(number, ranges) for number, _, ranges in posts] == [(ready, ((2, 2),))]
    behind.brings(ready, after_s=0.01)
    behind.brings(ready, after_s=0.01)
    assert behind.phase() is TransferPhase.DONE
    assert behind.transfer.sources[behind.middle].got_bytes == 10


def test_whoever_is_no_faster_is_closed_and_has_not_failed() -> None:
    behind = Behind()
    ready = behind.tries()
    behind.opened(ready)
    behind.lives(0.8, (1, 1))
    behind.take()
    behind.brings(behind.middle)
    behind.brings(ready)
    assert (behind.actions.close, behind.actions.post) == ([ready], [])
    assert behind.transfer.pool.exclusions.left_out() == ()
    assert behind.state is TrialState.RESTING
    behind.closed(ready)
    assert behind.lives(DEFAULT_LIMITS.trial_s).plan is None, "the next trial comes later"
    behind.transfer.available(behind.middle, ALL, behind.now)
    behind.take()
    while behind.phase() is TransferPhase.RUNNING:
        behind.brings(behind.middle)
    assert behind.phase() is TransferPhase.DONE


class BehindWithTwo(Behind):
    """The planner names two for the trial, since both are as busy; each has one piece to bring."""

    def tries_two(self) -> list[int]:
        self.brings(self.middle)
        actions = self.lives(1.2 * DEFAULT_LIMITS.trial_s)
        assert actions.plan == (((4, 2),), (source_id("middle"),))
        numbers = self.planned(("ready", ((4, 1),)), ("near", ((5, 1),)))
        for number in numbers:
            self.opened(number)
        return numbers


def test_of_several_that_are_no_faster_none_stays() -> None:
    """Whoever has brought its part is closed at once: it would take from the chain while the others bring theirs."""
    behind = BehindWithTwo()
    one, other = behind.tries_two()
    behind.lives(0.8, (1, 3))
    behind.take()
    behind.brings(one)
    assert (behind.actions.close, behind.state) == ([one], TrialState.TRYING)
    assert not any(post[0] == one for post in behind.actions.post)
    behind.brings(other)
    assert (behind.actions.close, behind.state) == ([other], TrialState.RESTING)
    for number in (one, other):
        behind.closed(number)
    assert behind.transfer.pool.exclusions.left_out() == ()
    while behind.phase() is TransferPhase.RUNNING:
        behind.brings(behind.middle)
    assert behind.phase() is TransferPhase.DONE


def test_of_several_the_one_that_is_far_faster_stays() -> None:
    """It takes over at once, and the trial is over when the other one is judged, or lost."""
    behind = BehindWithTwo()
    fast, other = behind.tries_two()
    posts = behind.brings(fast, after_s=0.01).post
    assert [number for number, _, _ in posts] == [fast]
    assert (behind.actions.close, behind.state) == ([], TrialState.TRYING)
    behind.transfer.lost(other, "it refused", behind.now)
    behind.closed(other)
    assert behind.state is TrialState.KEPT
    assert behind.transfer.sources[fast].phase is SourcePhase.OPEN


def test_of_several_one_is_lost_and_the_other_judged() -> None:
    behind = BehindWithTwo()
    gone, other = behind.tries_two()
    behind.transfer.lost(gone, "it refused", behind.now)
    behind.closed(gone)
    behind.lives(0.8)
    behind.brings(other)
    assert behind.transfer.sources[other].phase is not SourcePhase.OPEN
    assert behind.state is TrialState.RESTING


def test_where_nobody_else_has_them_the_pieces_go_back() -> None:
    behind = Behind()
    behind.brings(behind.middle)
    assert behind.lives(1.2 * DEFAULT_LIMITS.trial_s).plan is not None
    behind.transfer.planned(NOBODY, behind.now)
    behind.take()
    behind.transfer.available(behind.middle, ALL, behind.now)
    behind.take()
    assert behind.state is TrialState.RESTING
    behind.brings(behind.middle)
    assert behind.phase() is TransferPhase.DONE


def test_a_planner_that_is_silent_costs_nothing() -> None:
    behind = Behind()
    behind.brings(behind.middle)
    assert behind.lives(1.2 * DEFAULT_LIMITS.trial_s).plan is not None
    assert behind.lives(PLAN_S_MAX + 0.2, *ALL).plan is None
    behind.take()
    behind.brings(behind.middle)
    assert behind.phase() is TransferPhase.DONE


def test_whoever_is_tried_takes_everything_when_the_middle_goes() -> None:
    behind = Behind()
    ready = behind.tries()
    behind.opened(ready)
    behind.transfer.lost(behind.middle, "its fill was given up", behind.now)
    behind.closed(behind.middle)
    assert behind.state is TrialState.RESTING
    behind.brings(ready)
    behind.brings(ready)
    assert behind.phase() is TransferPhase.DONE


def test_whoever_is_tried_and_lost_is_no_end_of_the_read() -> None:
    behind = Behind()
    ready = behind.tries()
    behind.transfer.lost(ready, "it refused", behind.now)
    behind.closed(ready)
    assert behind.state is TrialState.RESTING
    assert behind.actions.plan == (((4, 2),), (source_id("ready"),))
    assert behind.planned(("middle", ((4, 2),))) == []
    behind.transfer.available(behind.middle, ALL, behind.now)
    behind.take()
    behind.brings(behind.middle)
    assert behind.phase() is TransferPhase.DONE


def test_a_read_that_ends_soon_tries_nobody() -> None:
    """At a pace of 40 bytes in 0.4 s the two pieces that are left take less than as long again."""
    behind = Behind((0, 2), limits=TransferLimits(trial_s=0.4))
    behind.brings(behind.middle)
    behind.lives(0.2, (2, 2))
    behind.take()
    behind.brings(behind.middle)
    assert behind.lives(0.3).plan is None
    assert behind.lives(0.6).plan is not None, "it has come to a halt since"


def test_trials_come_ever_later_and_end() -> None:
    behind = Behind((0, 1))
    behind.brings(behind.middle)
    for number in range(DEFAULT_LIMITS.trials_max):
        behind.transfer.sources[behind.middle].last_new_at = behind.now
        wait_s = DEFAULT_LIMITS.trial_s * DEFAULT_LIMITS.trial_times**number
        while behind.transfer.pool.trial.count == number:
            began = behind.now
            assert behind.now - began < 2 * wait_s
            behind.lives(0.2)
            behind.transfer.sources[behind.middle].last_new_at = behind.now
        behind.transfer.planned(NOBODY, behind.now)
    assert behind.now >= DEFAULT_LIMITS.trial_s * (DEFAULT_LIMITS.trial_times**DEFAULT_LIMITS.trials_max - 1)
    for _ in range(100):
        assert behind.lives(5.0).plan is None
        behind.transfer.sources[behind.middle].last_new_at = behind.now


def ends_after(middle_s: float, origin_s: float, tries_max: int) -> float:
    """Return when a read ends whose middle gets a piece each `middle_s`; the origin needs `origin_s` for one."""
    behind, there, next_at = Behind(limits=TransferLimits(trials_max=tries_max)), 1, middle_s
    busy_until: dict[tuple[int, int], float] = {}
    while behind.phase() is TransferPhase.RUNNING:
        behind.now = round(behind.now + 0.05, 2)
        behind.transfer.tick(behind.now)
        if behind.now >= next_at and there < PIECES:
            there, next_at = there + 1, next_at + middle_s
        behind.transfer.available(behind.middle, ((0, there),), behind.now)
        actions = behind.take()
        if actions.plan is not None:
            behind.transfer.planned(plan_of("origin", actions.plan[0]), behind.now)
        for number, _ in behind.take().open:
            behind.transfer.opened(number, LIST, behind.now)
        for number, source in list(behind.transfer.sources.items()):
            each_s = 0.01 if number == behind.middle else origin_s
            for batch, (ranges, _) in list(source.in_flight.items()):
                due = busy_until.setdefault((number, batch), behind.now + each_s * total_count(ranges))
                if behind.now >= due:
                    behind.transfer.batch_done(number, batch, digests_of(ranges), behind.now)
            if source.phase is SourcePhase.CLOSING:
                behind.transfer.closed(number, behind.now)
        behind.take()
    assert behind.phase() is TransferPhase.DONE
    return behind.now


def test_a_read_behind_a_slow_middle_ends_soon_after_it_has_found_a_better_source() -> None:
    alone_s = ends_after(4.0, 0.1, 0)
    assert alone_s >= 5 * 4.0
    assert ends_after(4.0, 0.1, DEFAULT_LIMITS.trials_max) < DEFAULT_LIMITS.trial_s + 2.0


def test_a_read_behind_a_middle_that_is_as_fast_as_the_network_stays_with_it() -> None:
    """The origin seems half as fast: it is tried, and let go of, and the read ends as it would have."""
    alone_s = ends_after(1.0, 2.0, 0)
    assert ends_after(1.0, 2.0, DEFAULT_LIMITS.trials_max) <= alone_s + 0.5
