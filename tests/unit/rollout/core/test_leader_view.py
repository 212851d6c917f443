"""What policies see of versions that arrive, and of a trainer that waits; and what its own engine is told."""

import pytest

from tensorhub_common.machine import Tick
from tensorhub_common.protocol.rollout.entries import (
    Attach,
    Attempt,
    Checkpoint,
    End,
    GroupSubmitted,
    Lead,
    Payload,
    RequestEnded,
    RequestId,
    SdkSender,
    Submit,
    TokensKept,
)
from tensorhub_common.protocol.rollout.messages import PublishedVersions, Report, RunnerHeartbeat, Sampling, VersionRule
from tensorhub_rollout.core.leader import STAYS_BEHIND_MAX, Leader, LeaderLimits
from tensorhub_rollout.core.leader_events import (
    AnswerHeartbeat,
    EndSeeding,
    EntryFolded,
    HeartbeatCame,
    Place,
    PromptLoaded,
    ReportCame,
    VersionsSeen,
    Want,
)
from tensorhub_rollout.log.fold import fold
from tensorhub_rollout.log.state import RolloutState
from tensorhub_rollout.policy.view import InstanceView

MODEL, RUNNER = "policy", "runner-0"


class Job:
    """A leader with one instance."""

    def __init__(self, *, is_local: bool = False) -> None:
        self.state, self.seq, self.is_local = RolloutState("job"), 2, is_local
        fold(self.state, 1, Lead(1, "m"))
        fold(self.state, 2, Attach("main", MODEL, 0, "n"))
        self.lead(0.0)

    def lead(self, now: float) -> None:
        """Have a new leader, while version 1 is the newest."""
        self.leader = Leader(self.state, "log", LeaderLimits(gather_s=0.0), now)
        self.publish(1, now)
        self.beat(1, now)
        self.leader.handle(ReportCame(RUNNER, Report("log", 1, ())), now)
        self.leader.handle(Tick(), now + 0.1)

    def publish(self, newest: int, now: float) -> None:
        versions = PublishedVersions(newest, tuple(range(1, newest + 1)))
        self.leader.handle(VersionsSeen(MODEL, versions), now)

    def beat(self, version: int | None, now: float, loads_in_s: float | None = None) -> AnswerHeartbeat:
        beat = RunnerHeartbeat("log", 1, 0, MODEL, 8, version, is_local=self.is_local, loads_in_s=loads_in_s)
        (answer,) = (
            each for each in self.leader.handle(HeartbeatCame(RUNNER, beat), now) if isinstance(each, AnswerHeartbeat)
        )
        return answer

    def attach(self, name: str, now: float) -> int:
        self.seq += 1
        outcome = fold(self.state, self.seq, Attach(name, MODEL, 0, f"n{self.seq}")).outcome
        self.leader.handle(EntryFolded(outcome), now)
        return self.seq

    def submit(self, now: float, by: SdkSender | None = None) -> RequestId:
        self.seq += 1
        group = GroupSubmitted(f"p{self.seq}", "a" * 64, 1, 5, 40)
        entry = Submit(by or SdkSender(2, self.seq - 2), (group,), Payload("b" * 64, 1))
        self.leader.handle(EntryFolded(fold(self.state, self.seq, entry).outcome), now)
        return RequestId(self.seq, 0)

    def instance(self) -> InstanceView:
        (found,) = self.leader.view(MODEL).instances
        return found


def test_an_instance_that_has_not_changed_is_the_same_object_at_the_next_look() -> None:
    """And another one after each change: of itself, of the versions, and of what it is to have."""
    job = Job()
    of = job.submit(0.2)
    job.leader.handle(Place(of, RUNNER), 0.5)

    def beat_with_another_number_of_slots() -> None:
        beat = RunnerHeartbeat("log", 1, 0, MODEL, 16, 1, keeps_versions=True)
        job.leader.handle(HeartbeatCame(RUNNER, beat), 0.6)

    def load_a_prompt_with_its_rule() -> None:
        job.leader.handle(PromptLoaded(of, b"", Sampling(40, 7), VersionRule()), 0.7)

    for change in (
        beat_with_another_number_of_slots,
        load_a_prompt_with_its_rule,
        lambda: job.leader.handle(Want(RUNNER, 1), 0.8),
        lambda: job.publish(2, 0.9),
        lambda: job.beat(2, 1.0),
    ):
        view, before = job.leader.view(MODEL), job.instance()
        assert job.leader.view(MODEL).instances is view.instances
        change()
        assert job.instance() is not before
        job.leader.check()


def test_requests_of_an_instance_are_seen_as_they_are_now() -> None:
    job = Job()
    of, before = job.submit(0.2), job.instance()
    job.leader.handle(Place(of, RUNNER), 0.5)
    assert job.instance() is before, "thousands of instances are not copied for it"
    assert ([*before.pending], before.free_slots) == ([of], 7)


def test_what_is_expected_of_an_arrival_is_seen_though_nothing_else_has_changed() -> None:
    job = Job()
    job.publish(2, 2.0)
    assert job.instance().arrives_in_s is None
    job.beat(1, 3.0, loads_in_s=4.0)
    assert job.instance().arrives_in_s == pytest.approx(4.0)
    job.leader.handle(Tick(), 4.0)
    assert job.instance().arrives_in_s == pytest.approx(3.0)
    job.beat(1, 4.0)
    assert job.instance().arrives_in_s is None


def test_an_instance_is_lost_as_soon_as_it_was_silent_for_long_enough_though_others_are_heard() -> None:
    job = Job()
    other = RunnerHeartbeat("log", 1, 0, MODEL, 8, 1)
    for tenth in range(2, 20):
        job.leader.handle(HeartbeatCame("runner-1", other), tenth / 10)
        if tenth <= 8:
            job.beat(1, tenth / 10)
        # The last heartbeat of the one came at 0.8 s, and half a second is silence.
        assert (RUNNER in job.leader.instances) == (tenth < 13), tenth
        assert tenth < 3 or "runner-1" in job.leader.instances


def test_a_request_is_due_once_a_version_was_published_after_it() -> None:
    job = Job()
    first = job.submit(1.0)
    assert not job.leader.facts_of(first, 9.0).is_due
    job.publish(2, 2.0)
    second = job.submit(3.0)
    assert job.leader.facts_of(first, 9.0).is_due
    assert not job.leader.facts_of(second, 9.0).is_due


def test_what_was_open_before_a_leader_began_is_due_no_later_than_what_came_to_it() -> None:
    job = Job()
    first = job.submit(1.0)
    job.lead(2.0)
    second = job.submit(3.0)
    assert not job.leader.facts_of(first, 9.0).is_due, "it may have been submitted ahead"
    job.publish(2, 4.0)
    third = job.submit(5.0)
    assert [job.leader.facts_of(each, 9.0).is_due for each in (first, second, third)] == [True, True, False]


def test_what_a_policy_is_told_of_a_request() -> None:
    job = Job()
    group = GroupSubmitted("two", "c" * 64, 2, 5, 40, priority=3)
    entry = Submit(SdkSender(2, 1), (group,), Payload("b" * 64, 1))
    job.leader.handle(EntryFolded(fold(job.state, 3, entry).outcome), 1.0)
    first, second = (job.leader.facts_of(RequestId(3, index), 1.0) for index in range(2))
    assert (first.context, first.priority, first.is_first, first.length.tokens_max) == (5, 3, True, 40)
    assert second == first._replace(is_first=False)


def test_a_context_has_the_prompt_and_the_tokens_that_the_log_has() -> None:
    job = Job()
    of = job.submit(1.0)
    assert job.leader.facts_of(of, 1.0).context == 5
    kept = Checkpoint(1, RUNNER, (TokensKept(of, Attempt(1, 1), 0, 7),), Payload("d" * 64, 1))
    job.leader.handle(EntryFolded(fold(job.state, job.seq + 1, kept).outcome), 2.0)
    assert job.leader.facts_of(of, 2.0).context == 12


def test_requests_may_start_on_a_version_as_their_rule_says_once_that_is_known() -> None:
    job = Job()
    of = job.submit(1.0)
    job.publish(2, 2.0)
    assert job.instance().may_start
    job.publish(1, 3.0)
    job.leader.handle(Place(of, RUNNER), 4.0)
    job.leader.handle(PromptLoaded(of, b"", Sampling(4, 1), VersionRule(staleness=1)), 4.0)
    job.publish(2, 5.0)
    assert job.instance().may_start
    job.publish(3, 6.0)
    assert not job.instance().may_start
    job.beat(2, 6.1)
    assert job.instance().may_start


def test_a_runner_tells_when_its_version_arrives() -> None:
    job = Job()
    job.publish(2, 2.0)
    assert job.instance().arrives_in_s is None
    job.beat(1, 3.0, loads_in_s=4.0)
    assert job.instance().arrives_in_s == pytest.approx(4.0)
    job.beat(2, 7.0)
    assert job.instance().arrives_in_s is None
    # It took five seconds, and will again.
    job.publish(3, 20.0)
    assert job.instance().arrives_in_s == pytest.approx(5.0)


def test_the_trainers_own_engine_is_told_that_it_is_enough_and_no_other() -> None:
    for is_local in (True, False):
        job = Job(is_local=is_local)
        assert not job.beat(1, 1.0).result.is_enough
        job.leader.handle(EndSeeding(RUNNER), 1.1)
        assert [job.beat(1, at).result.is_enough for at in (1.2, 1.3)] == [is_local, is_local]


@pytest.mark.parametrize("how", ["another attached, and the first has nothing open", "the same attached anew"])
def test_a_strict_rule_of_before_keeps_no_laxer_one_from_beginning(how: str) -> None:
    """The newest version does not come: by the strict rule nothing may begin on the one before, by the laxer it may."""
    job = Job()
    strict = job.submit(1.0)
    job.leader.handle(Place(strict, RUNNER), 1.0)
    job.leader.handle(PromptLoaded(strict, b"", Sampling(4, 1), VersionRule(staleness=0)), 1.0)
    job.publish(2, 2.0)
    assert not job.instance().may_start
    if how == "the same attached anew":
        job.submit(2.1, SdkSender(job.attach("main", 2.0), 1))
    else:
        job.submit(2.1, SdkSender(job.attach("evaluator", 2.0), 1))
        assert not job.instance().may_start, "what is open of the first would be asked for in vain again and again"
        ended = RequestEnded(strict, None, "stop", 1)
        job.seq += 1
        outcome = fold(job.state, job.seq, End(1, (ended,), Payload("c" * 64, 1))).outcome
        job.leader.handle(EntryFolded(outcome), 2.2)
    assert job.instance().may_start


def test_an_instance_may_stay_on_its_version_while_it_lacks_few_newer_ones_whatever_its_rule_allows() -> None:
    job = Job()
    of = job.submit(1.0)
    job.leader.handle(Place(of, RUNNER), 1.0)
    job.leader.handle(PromptLoaded(of, b"", Sampling(4, 1), VersionRule(staleness=9)), 1.0)
    found = [job.instance().may_stay]
    for newest in range(2, 7):
        job.publish(newest, float(newest))
        found.append(job.instance().may_stay)
    assert found == [lacks <= STAYS_BEHIND_MAX for lacks in range(6)]
    assert job.instance().may_start, "a request may begin all the same"


def test_what_came_after_a_step_is_none_of_its_tokens() -> None:
    """With responses submitted ahead tokens never cease: the last one of the step that has ended is kept."""
    job = Job()
    meter = job.leader.models[MODEL].meter
    for at, version in ((10.0, 2), (20.0, 3)):
        meter.last_token_at = at - 1
        job.publish(version, at)
    meter.last_token_at = 21.0
    assert meter.last is not None
    assert (meter.last.last_token_at, meter.last.remote_s) == (19.0, 9.0)
