"""How old a response may be: where it may begin, when it begins anew, and as what it is delivered.

Versions 1 to 9 are published one after the other. The age of a token is how many are newer than its own.
"""

from array import array
from dataclasses import dataclass, field

import pytest
from tests.unit.rollout.one_response import frame_of

from tensorhub_common.machine import Tick
from tensorhub_common.protocol.rollout.entries import (
    Attach,
    Attempt,
    GroupSubmitted,
    Lead,
    Payload,
    RequestId,
    SdkSender,
    Submit,
)
from tensorhub_common.protocol.rollout.messages import (
    AbortResult,
    AssignResult,
    Finished,
    HeldAttempt,
    PublishedVersions,
    Report,
    RunnerHeartbeat,
    Sampling,
    VersionRule,
)
from tensorhub_common.protocol.rollout.payloads import SubmittedPrompt, SubmittedPrompts
from tensorhub_rollout.core.leader import Leader, LeaderLimits
from tensorhub_rollout.core.leader_events import (
    AbortAnswered,
    AssignAnswered,
    HeartbeatCame,
    LeaderEffect,
    LeaderInput,
    LoadPrompt,
    Place,
    PromptLoaded,
    ReportCame,
    SendAssign,
    StoreEnd,
    VersionsSeen,
    Withdraw,
)
from tensorhub_rollout.log.fold import fold
from tensorhub_rollout.log.state import RolloutState

OF, MODEL, RUNNER, OTHER = RequestId(3, 0), "policy", "runner-0", "runner-1"
TOKENS_MAX = 8


@dataclass
class Job:
    """A leader with one request and two instances, both on version 1."""

    staleness: int = 0
    age_max: int | None = None
    pinned: int | None = None
    now: float = 0.0
    said: list[LeaderEffect] = field(default_factory=list)
    leader: Leader = field(init=False)

    def __post_init__(self) -> None:
        state = RolloutState("job")
        fold(state, 1, Lead(1, "m"))
        fold(state, 2, Attach("main", MODEL, 0, "n"))
        group = GroupSubmitted("p", "a" * 64, 1, 1, TOKENS_MAX, version=self.pinned)
        fold(state, 3, Submit(SdkSender(2, 1), (group,), Payload("b" * 64, 1)))
        self.leader = Leader(state, "log", LeaderLimits(gather_s=0.0, silence_s=100.0), 0.0)
        self.publish(1)
        for runner in (RUNNER, OTHER):
            self.beat(runner, 1)
            self.tell(ReportCame(runner, Report("log", 1, ())))
        self.now += 0.05
        self.tell(Tick())

    def tell(self, event: LeaderInput) -> list[LeaderEffect]:
        self.now += 0.001
        said = self.leader.handle(event, self.now)
        self.leader.check()
        self.said += said
        return said

    def publish(self, newest: int) -> None:
        self.tell(VersionsSeen(MODEL, PublishedVersions(newest, tuple(range(1, newest + 1))), frozenset({1, newest})))

    def beat(self, runner: str, version: int) -> None:
        self.tell(HeartbeatCame(runner, RunnerHeartbeat("log", 1, 0, MODEL, 8, version, keeps_versions=True)))

    def place(self, runner: str) -> Attempt | None:
        """Place the request; None: its rule forbids the version there."""
        self.tell(Place(OF, runner))
        said = self.load()
        if not any(isinstance(each, SendAssign) for each in said):
            return None
        placement = self.leader.requests[OF].placement
        assert placement is not None
        self.tell(AssignAnswered(runner, 1, (AssignResult(placement.attempt, placement.began_at),)))
        return placement.attempt

    def load(self) -> list[LeaderEffect]:
        prompts = SubmittedPrompts(
            Sampling(TOKENS_MAX, 7),
            VersionRule(staleness=self.staleness),
            (SubmittedPrompt(b"1234"),),
            "n",
            self.age_max,
        )
        rule = prompts.rule_of(self.pinned)
        return self.tell(PromptLoaded(OF, b"1234", prompts.sampling, rule, prompts.age_max))

    def made(
        self,
        runner: str,
        attempt: Attempt,
        start: int,
        tokens: list[int],
        version: int | None = None,
        *,
        ends: bool = False,
    ) -> None:
        """Have an attempt make tokens. `version`: they begin a run on it; None: the run goes on."""
        finished = Finished(attempt, start + len(tokens), "stop") if ends else None
        self.tell(frame_of(runner, attempt, start, tokens, version, finished))

    def stop(self, runner: str, attempt: Attempt, tokens: int) -> None:
        self.tell(AbortAnswered(runner, 1, (AbortResult(attempt, tokens),), ()))

    @property
    def tokens(self) -> list[int]:
        return array("i", bytes(self.leader.responses[OF].tokens)).tolist()

    @property
    def ends(self) -> list[StoreEnd]:
        return [each for each in self.said if isinstance(each, StoreEnd)]

    def discarded(self) -> dict[str, int]:
        return {str(why): count for why, count in self.leader.counts.discarded.items()}


def placed(job: Job, runner: str = RUNNER) -> Attempt:
    attempt = job.place(runner)
    assert attempt is not None
    return attempt


@pytest.mark.parametrize(
    ("staleness", "age_max", "newest", "begins"),
    [
        (1, None, 2, True),
        (1, None, 3, False),
        (9, 1, 2, True),
        (9, 1, 3, False),
        (0, 9, 2, False),
    ],
)
def test_a_response_begins_on_no_version_that_is_too_old_by_either_bound(
    staleness: int, age_max: int | None, newest: int, *, begins: bool
) -> None:
    job = Job(staleness, age_max)
    job.publish(newest)
    assert (job.place(RUNNER) is not None) is begins


def test_a_response_that_has_begun_goes_on_however_many_versions_are_published_since() -> None:
    """`staleness` is of the first token. Three tokens on version 1, then two on 5, elsewhere: one response of five."""
    job = Job(staleness=1)
    first = placed(job)
    job.made(RUNNER, first, 0, [10, 11, 12], 1)
    job.publish(5)
    assert job.tokens == [10, 11, 12]
    job.tell(Withdraw(OF, None, "it is done sooner elsewhere"))
    job.stop(RUNNER, first, 3)
    job.beat(OTHER, 5)
    second = placed(job, OTHER)
    job.made(OTHER, second, 3, [13, 14], 5, ends=True)
    (end,) = job.ends
    assert array("i", end.tokens).tolist() == [10, 11, 12, 13, 14]
    assert [(run.start, run.version) for run in end.runs] == [(0, 1), (3, 5)]
    assert (end.ended.reason, job.discarded()) == ("stop", {})


def test_a_response_that_becomes_too_old_begins_anew_at_once_and_only_once() -> None:
    """What it would still make is not waited for. The second time it is delivered, as old as it is."""
    job = Job(staleness=9, age_max=1)
    first = placed(job)
    job.made(RUNNER, first, 0, [10, 11, 12], 1)
    job.publish(2)
    assert job.leader.requests[OF].void is None, "it is as old as it may be"
    job.publish(3)
    assert job.leader.requests[OF].void == "age"
    job.made(RUNNER, first, 3, [13])
    job.stop(RUNNER, first, 4)
    assert (job.tokens, job.discarded()) == ([], {"age": 4})
    assert job.place(RUNNER) is None, "version 1 is too old to begin on"
    job.beat(OTHER, 3)
    second = placed(job, OTHER)
    job.made(OTHER, second, 0, [20, 21], 3)
    job.publish(9)
    assert job.leader.requests[OF].void is None
    job.made(OTHER, second, 2, [22], ends=True)
    (end,) = job.ends
    assert array("i", end.tokens).tolist() == [20, 21, 22]
    assert [(run.start, run.version) for run in end.runs] == [(0, 3)]
    assert job.discarded() == {"age": 4}


def test_a_response_that_ends_while_it_is_being_stopped_for_its_age_begins_anew_all_the_same() -> None:
    job = Job(staleness=9, age_max=0)
    first = placed(job)
    job.made(RUNNER, first, 0, [10, 11], 1)
    job.publish(2)
    job.made(RUNNER, first, 2, [12], ends=True)
    assert (job.ends, job.discarded(), job.leader.requests[OF].restarts) == ([], {"age": 3}, 1)
    assert [*job.leader.view(MODEL).waiting] == [OF]


def test_a_response_that_waits_begins_anew_as_soon_as_it_is_too_old() -> None:
    job = Job(staleness=9, age_max=0)
    first = placed(job)
    job.made(RUNNER, first, 0, [10, 11], 1)
    job.tell(Withdraw(OF, None, "its machine goes away"))
    job.stop(RUNNER, first, 2)
    assert job.tokens == [10, 11]
    job.publish(2)
    assert (job.tokens, job.discarded()) == ([], {"age": 2})


def test_the_last_token_of_an_old_response_may_be_here_before_its_age_is_known() -> None:
    """A leader that takes over knows how old a response may be once it has read its prompt."""
    job = Job(staleness=9, age_max=0)
    first = placed(job)
    job.made(RUNNER, first, 0, [*range(TOKENS_MAX)], 1)
    job.leader.requests[OF].age_max = None
    job.tell(Withdraw(OF, None, "its machine goes away"))
    job.stop(RUNNER, first, TOKENS_MAX)
    job.publish(2)
    assert len(job.tokens) == TOKENS_MAX
    job.beat(OTHER, 2)
    job.tell(Place(OF, OTHER))
    job.load()
    assert (job.ends, job.tokens, job.discarded()) == ([], [], {"age": TOKENS_MAX})


def test_a_new_leader_reads_how_old_what_it_finds_on_an_instance_may_be() -> None:
    job = Job(staleness=9, age_max=0)
    attempt = placed(job)
    fold(job.leader.state, 4, Lead(2, "m"))
    job.leader = Leader(job.leader.state, "log", LeaderLimits(gather_s=0.0, silence_s=100.0), job.now)
    job.publish(1)
    job.beat(RUNNER, 1)
    said = job.tell(ReportCame(RUNNER, Report("log", 1, (HeldAttempt(OF, attempt, 2, "running"),))))
    assert LoadPrompt(OF) in said
    job.made(RUNNER, attempt, 0, [10, 11], 1)
    job.publish(2)
    job.load()
    assert job.leader.requests[OF].void == "age"
    job.stop(RUNNER, attempt, 2)
    assert (job.tokens, job.discarded()) == ([], {"age": 2})


def test_a_response_for_one_version_alone_does_not_begin_anew_for_its_age() -> None:
    """It would begin on the same version again."""
    job = Job(age_max=0, pinned=1)
    first = placed(job)
    job.made(RUNNER, first, 0, [10, 11], 1)
    job.publish(4)
    job.made(RUNNER, first, 2, [12], ends=True)
    (end,) = job.ends
    assert (array("i", end.tokens).tolist(), job.discarded()) == ([10, 11, 12], {})
