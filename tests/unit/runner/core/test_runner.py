"""What a runner takes, begins and says; tests/unit/simulator/test_rollouts.py has the rest."""

from array import array
from typing import Literal

import pytest

from tensorhub_common.machine import Tick
from tensorhub_common.protocol.rollout.entries import Attempt, RequestId
from tensorhub_common.protocol.rollout.messages import (
    AbortRequest,
    Assign,
    AssignRequest,
    Finished,
    FrameResult,
    HeartbeatResult,
    PublishedVersions,
    RunEngine,
    Sampling,
    TokenRun,
    VersionRule,
)
from tensorhub_runner.core.runner import Runner, RunnerLimits
from tensorhub_runner.core.runner_events import (
    AbortCame,
    AnswerAbort,
    AnswerAssign,
    AssignCame,
    Begin,
    EngineStepped,
    FrameAnswered,
    HeartbeatAnswered,
    LoadWanted,
    PreemptionNoticed,
    RunnerEffect,
    SendFrame,
    SendHeartbeat,
    StepTokens,
    Stop,
    WeightsChanging,
    WeightsComing,
    WeightsLoaded,
)

ATTEMPT, NEXT = Attempt(1, 1), Attempt(1, 2)
SAMPLING = Sampling(8, 7)
TOKEN = b"\1\0\0\0"


def tokens(*numbers: int) -> bytes:
    return array("i", numbers).tobytes()


def assigned(
    *attempts: Attempt, term: int = 1, rule: VersionRule | None = None, published: tuple[int, ...] = (1,)
) -> AssignCame:
    assigns = tuple(Assign(RequestId(3, each.n), each, b"", SAMPLING, rule or VersionRule()) for each in attempts)
    return AssignCame(AssignRequest("log", term, 1, PublishedVersions(1, published), assigns))


def serving(runner: Runner) -> Runner:
    """Have a runner learn its log."""
    runner.handle(HeartbeatAnswered(HeartbeatResult("log", 1, PublishedVersions(0))), 0.0)
    return runner


@pytest.fixture
def runner() -> Runner:
    """Return a runner whose engine holds version 1."""
    made = serving(Runner("runner-0", "policy", 1, RunnerLimits(held_max=2), 0.0))
    made.handle(WeightsLoaded(1, "root-1"), 0.0)
    return made


def refusals(effects: list[RunnerEffect]) -> list[str | None]:
    (answer,) = [each for each in effects if isinstance(each, AnswerAssign)]
    return [each.refused for each in answer.results]


def begun(effects: list[RunnerEffect]) -> list[Attempt]:
    return [each.attempt for each in effects if isinstance(each, Begin)]


def frames(effects: list[RunnerEffect]) -> list[SendFrame]:
    return [each for each in effects if isinstance(each, SendFrame)]


def test_an_attempt_begins_and_its_tokens_are_sent_with_their_run(runner: Runner) -> None:
    assert begun(runner.handle(assigned(ATTEMPT), 0.0)) == [ATTEMPT]
    (sent,) = frames(runner.handle(EngineStepped((StepTokens(ATTEMPT, TOKEN, TOKEN),)), 1.0))
    assert sent.frame.runs == ((ATTEMPT, TokenRun(0, 1, "root-1", "runner-0", ATTEMPT, "fresh")),)
    assert (sent.frame.tokens, sent.frame.finished) == (TOKEN, ())


def test_a_run_names_the_engine_that_has_the_version_in_memory(runner: Runner) -> None:
    """A process of another release may say none; the core names what it was told last."""
    engine = RunEngine("torch", "torch 2.9", "float64", is_exact=True)
    runner.handle(assigned(ATTEMPT), 0.0)
    runner.handle(EngineStepped((StepTokens(ATTEMPT, TOKEN, TOKEN),)), 1.0)
    runner.handle(WeightsChanging(), 2.0)
    runner.handle(WeightsLoaded(2, "root-2", engine), 2.0)
    (sent,) = frames(runner.handle(EngineStepped((StepTokens(ATTEMPT, TOKEN, TOKEN),)), 3.0))
    # The frame before was not answered, so its run comes again.
    runs = [(run.version, run.root, run.engine) for _, run in sent.frame.runs]
    assert runs == [(1, "root-1", None), (2, "root-2", engine)]


def test_only_so_much_is_held_and_a_machine_that_goes_away_takes_nothing(runner: Runner) -> None:
    third = Attempt(1, 3)
    assert refusals(runner.handle(assigned(ATTEMPT, NEXT, third), 0.0)) == [None, None, "there is no room"]
    leaving = serving(Runner("runner-1", "policy", 1, RunnerLimits(), 0.0))
    leaving.handle(PreemptionNoticed(), 0.0)
    assert refusals(leaving.handle(assigned(ATTEMPT), 0.0)) == ["the machine goes away"]


def test_a_leader_of_a_lower_term_is_not_answered(runner: Runner) -> None:
    runner.handle(assigned(ATTEMPT, term=2), 0.0)
    assert runner.handle(assigned(NEXT, term=1), 0.01) == []
    late = AbortCame(AbortRequest("log", 1, 1, stop=(ATTEMPT,)))
    assert not [each for each in runner.handle(late, 0.02) if isinstance(each, AnswerAbort)]
    assert ATTEMPT in runner.held
    for other in (AbortRequest("another log", 2, 1, forget=(ATTEMPT,)), AbortRequest("log", 2, 9, forget=(ATTEMPT,))):
        runner.handle(AbortCame(other), 0.03)
        assert ATTEMPT in runner.held


@pytest.mark.parametrize(
    ("rule", "published", "begins"),
    [
        (VersionRule(), (1,), True),
        (VersionRule(), (1, 2), False),
        (VersionRule(staleness=1), (1, 2), True),
        (VersionRule(staleness=1), (1, 2, 3), False),
        (VersionRule(pinned=1), (1, 2, 3), True),
        (VersionRule(pinned=2), (1, 2), False),
    ],
)
def test_what_its_rule_forbids_does_not_begin_and_is_given_back(
    runner: Runner, rule: VersionRule, published: tuple[int, ...], *, begins: bool
) -> None:
    assert begun(runner.handle(assigned(ATTEMPT, rule=rule, published=published), 0.0)) == [ATTEMPT] * begins
    given_back = [each for sent in frames(runner.handle(EngineStepped(()), 1.0)) for each in sent.frame.finished]
    assert given_back == [Finished(ATTEMPT, 0, "superseded")] * (not begins)


def test_a_run_that_got_no_token_is_replaced(runner: Runner) -> None:
    runner.handle(assigned(ATTEMPT, rule=VersionRule(staleness=9)), 0.0)
    for version in (2, 3):
        runner.handle(WeightsChanging(), 0.0)
        runner.handle(WeightsLoaded(version, f"root-{version}"), 0.0)
    (sent,) = frames(runner.handle(EngineStepped((StepTokens(ATTEMPT, TOKEN, TOKEN),)), 1.0))
    assert [(run.start, run.version) for _, run in sent.frame.runs] == [(0, 3)]


@pytest.mark.parametrize(("asked_s", "expected_s"), [(0.0, 0.05), (0.3, 0.3), (1e9, 2.0)])
def test_a_leader_of_a_large_fleet_has_frames_come_more_seldom_within_bounds(
    runner: Runner, asked_s: float, expected_s: float
) -> None:
    made = EngineStepped((StepTokens(ATTEMPT, TOKEN, TOKEN),))
    runner.handle(assigned(ATTEMPT), 0.0)
    runner.handle(HeartbeatAnswered(HeartbeatResult("log", 1, PublishedVersions(0), flush_s=asked_s)), 0.0)
    assert frames(runner.handle(made, 1.0)), "the one before is long ago"
    assert not frames(runner.handle(made, 1.001))
    assert not frames(runner.handle(Tick(), 1.0 + expected_s - 0.001))
    assert runner.deadline() <= 1.0 + expected_s + 1e-9
    assert frames(runner.handle(Tick(), 1.0 + expected_s + 0.001))


def test_a_runner_is_drained_once_a_leader_has_all_of_what_it_stopped(runner: Runner) -> None:
    def is_drained() -> bool:
        return runner.is_drained

    assert is_drained()
    runner.handle(assigned(ATTEMPT), 0.0)
    assert not is_drained(), "it runs"
    runner.handle(EngineStepped((StepTokens(ATTEMPT, TOKEN, TOKEN),)), 0.01)
    runner.handle(AbortCame(AbortRequest("log", 1, 1, stop=(ATTEMPT,))), 0.02)
    (sent,) = frames(runner.handle(Tick(), 1.0))
    assert not is_drained(), "its token is under way"
    runner.handle(FrameAnswered(FrameResult("log", 1, sent.frame.number)), 1.01)
    assert is_drained()
    assert runner.held, "it is kept until a leader lets it be forgotten"


def told(
    version: int | Literal["newest"] | None, *, term: int = 1, retired: tuple[tuple[int, int], ...] = ()
) -> HeartbeatAnswered:
    versions = PublishedVersions(term + len(retired), (1, 2), retired)
    return HeartbeatAnswered(HeartbeatResult("log", term, versions, version_wanted=version))


@pytest.fixture
def keeper() -> Runner:
    """Return a runner that keeps versions, with version 1."""
    made = serving(Runner("runner-0", "policy", 1, RunnerLimits(), 0.0, keeps_versions=True))
    made.handle(WeightsLoaded(1, "root-1"), 0.0)
    return made


def test_a_version_that_is_wanted_stays_and_what_is_for_it_begins_although_a_newer_one_is_ready(keeper: Runner) -> None:
    keeper.handle(told(1), 0.1)
    keeper.handle(LoadWanted(), 0.2)
    assert keeper.may_load is False
    pinned = assigned(ATTEMPT, rule=VersionRule(pinned=1), published=(1, 2))
    assert begun(keeper.handle(pinned, 0.3)) == [ATTEMPT]
    keeper.handle(EngineStepped((StepTokens(ATTEMPT, TOKEN, TOKEN),)), 0.4)
    keeper.handle(told(None), 0.5)
    assert keeper.may_load is False, "None says nothing new"
    keeper.handle(told("newest", term=0), 0.6)
    assert keeper.may_load is False, "an earlier leader is not heard"
    keeper.handle(told("newest"), 0.7)
    assert keeper.may_load is True


def test_a_version_that_is_retired_does_not_stay(keeper: Runner) -> None:
    keeper.handle(told(1), 0.1)
    assert keeper.may_load is False
    keeper.handle(told(1, retired=((1, 1),)), 0.2)
    assert keeper.may_load is True


def test_a_runner_that_follows_the_newest_version_alone_is_not_told_another(runner: Runner) -> None:
    runner.handle(told(1), 0.1)
    assert (runner.version_wanted, runner.may_load) == (None, True)


def test_a_response_does_not_go_on_with_an_older_version_than_its_rule_lets_it_begin_on(keeper: Runner) -> None:
    keeper.handle(WeightsChanging(), 0.1)
    keeper.handle(WeightsLoaded(2, "root-2"), 0.1)
    for attempt, staleness in ((ATTEMPT, 0), (NEXT, 1)):
        keeper.handle(assigned(attempt, rule=VersionRule(staleness=staleness), published=(1, 2)), 0.2)
    made = tuple(StepTokens(attempt, TOKEN, TOKEN) for attempt in (ATTEMPT, NEXT))
    keeper.handle(EngineStepped(made), 0.3)
    keeper.handle(WeightsChanging(), 0.4)
    assert begun(keeper.handle(WeightsLoaded(1, "root-1"), 0.4)) == [NEXT]
    assert keeper.held[ATTEMPT].finished == Finished(ATTEMPT, 1, "superseded")


def test_a_runner_without_weights_gives_back_what_it_has_and_what_comes_and_says_so_first(runner: Runner) -> None:
    """While weights only change it keeps all. What a leader has stopped stays as it is."""
    runner.handle(assigned(ATTEMPT), 0.0)
    runner.handle(EngineStepped((StepTokens(ATTEMPT, TOKEN, TOKEN),)), 0.01)
    runner.handle(WeightsChanging(), 0.02)
    assert runner.held[ATTEMPT].is_running
    effects = runner.handle(WeightsLoaded(None), 0.03)
    assert [type(each) for each in effects] == [Stop, SendHeartbeat]
    assert [each.beat.version for each in effects if isinstance(each, SendHeartbeat)] == [None]
    runner.handle(assigned(NEXT), 0.04)
    (sent,) = frames(runner.handle(Tick(), 1.0))
    assert sent.frame.finished == (Finished(ATTEMPT, 1, "superseded"), Finished(NEXT, 0, "superseded"))
    assert sent.frame.tokens == TOKEN, "what was made goes with it"
    runner.check()


def test_what_was_stopped_is_not_given_back_where_the_weights_go(runner: Runner) -> None:
    runner.handle(assigned(ATTEMPT), 0.0)
    runner.handle(AbortCame(AbortRequest("log", 1, 1, stop=(ATTEMPT,))), 0.01)
    runner.handle(WeightsChanging(), 0.02)
    runner.handle(WeightsLoaded(None), 0.03)
    assert runner.held[ATTEMPT].finished is None
    runner.handle(WeightsChanging(), 0.04)
    runner.handle(WeightsLoaded(2, "root-2"), 0.05)
    assert begun(runner.handle(assigned(NEXT), 0.06)) == [NEXT]


def test_a_runner_that_is_told_that_it_is_enough_knows_it_from_then_on() -> None:
    runner = serving(Runner("trainer", "policy", 1, RunnerLimits(), 0.0, is_local=True))
    assert not runner.is_enough
    runner.handle(HeartbeatAnswered(HeartbeatResult("log", 1, PublishedVersions(0), is_enough=True)), 1.0)
    runner.handle(HeartbeatAnswered(HeartbeatResult("log", 1, PublishedVersions(0))), 2.0)
    assert runner.is_enough


def test_heartbeats_tell_in_how_many_seconds_the_next_version_is_here_until_it_is() -> None:
    runner = serving(Runner("runner-0", "policy", 1, RunnerLimits(heartbeat_s=1.0), 0.0))

    def told(event: WeightsComing | WeightsLoaded | Tick, now: float) -> float | None:
        effects = runner.handle(event, now)
        return next(each.beat.loads_in_s for each in effects if isinstance(each, SendHeartbeat))

    assert told(WeightsLoaded(1, "root"), 10.0) is None
    assert told(WeightsComing(7.5), 20.0) == 7.5
    assert told(WeightsComing(2.5), 30.0) == 2.5
    assert told(Tick(), 31.0) == 1.5
    # It stands still, has failed, or waits for what runs.
    assert told(Tick(), 33.0) is None
    assert told(WeightsComing(9.0), 40.0) == 9.0
    assert told(WeightsLoaded(2, "root"), 41.0) is None


def test_the_rule_of_age_is_of_the_first_token_alone(runner: Runner) -> None:
    """Begun while one newer version is allowed and none is there; then five come, before and after its first token."""
    late, made = ATTEMPT, NEXT
    runner.handle(assigned(late, made, rule=VersionRule(staleness=1), published=(1,)), 0.0)
    runner.handle(EngineStepped((StepTokens(made, tokens(7, 8), tokens(0, 0)),)), 0.1)
    runner.handle(HeartbeatAnswered(HeartbeatResult("log", 1, PublishedVersions(2, (1, 2, 3, 4, 5, 6)))), 0.2)
    runner.handle(EngineStepped(tuple(StepTokens(each, tokens(9), tokens(0)) for each in (late, made))), 0.3)
    assert runner.held[late].finished == Finished(late, 0, "superseded"), "its first token would be too old"
    runner.handle(WeightsChanging(), 0.4)
    assert begun(runner.handle(WeightsLoaded(3, "root-3"), 0.4)) == [made], "three newer ones are there"
    runner.handle(EngineStepped((StepTokens(made, tokens(10), tokens(0)),)), 0.5)
    held = runner.held[made]
    assert array("i", bytes(held.tokens)).tolist() == [7, 8, 9, 10]
    assert [(run.start, run.version) for run in held.runs] == [(0, 1), (3, 3)]
    assert held.finished is None
