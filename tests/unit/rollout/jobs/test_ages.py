"""How old what is done is, as metrics have it: counted by hand."""

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from tests.unit.rollout import one_response
from tests.unit.rollout.one_response import frame_of

from tensorhub_common.protocol.rollout.entries import (
    AnyEntry,
    Done,
    End,
    Payload,
    RequestEnded,
    RequestId,
    SdkSender,
)
from tensorhub_common.protocol.rollout.messages import (
    PublishedVersions,
)
from tensorhub_rollout.core.leader_events import (
    EntryFolded,
    VersionsSeen,
)
from tensorhub_rollout.jobs.ages import AGE_MAX, ResponseAges

FIRST, SECOND = RequestId(3, 0), RequestId(3, 1)
RUNNER = "runner-0"


class Job(one_response.Job):
    """A leader whose one group has two requests, submitted when version 1 was the newest, and what is counted of it."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader], Resource.get_empty(), shutdown_on_exit=False)
        self.ages = ResponseAges("run-7", self.provider.get_meter("test"))
        super().__init__(newest=1)
        self.runner(RUNNER, 0.0)
        self.attempts = {of: self.place(RUNNER, 0.1, of=of) for of in (FIRST, SECOND)}

    def say(self, entry: AnyEntry) -> None:
        """Have an entry folded and counted, then told to the leader, if there is one."""
        outcome = self.fold(entry)
        self.ages.take(self.leader, outcome)
        if self.leader is not None:
            self.leader.handle(EntryFolded(outcome), 1.0)

    def publish(self, newest: int) -> None:
        self.leader.handle(VersionsSeen("policy", PublishedVersions(newest, tuple(range(1, newest + 1)))), 0.0)

    def ends(self, of: RequestId, *runs: tuple[int, int]) -> None:
        """Have a response made of runs of (version, number of tokens), and end."""
        attempt, count = self.attempts[of], 0
        for version, number in runs:
            self.leader.handle(frame_of(RUNNER, attempt, count, range(number), version), 0.5)
            count += number
        self.say(End(1, (RequestEnded(of, attempt, "stop", count),), Payload(f"{of.index}" * 64, 1)))

    def done(self, n: int, *requests: RequestId) -> None:
        self.say(Done(SdkSender(2, n), requests))

    def recorded(self, name: str) -> list[float] | None:
        """Return how many were recorded, and the sum; None: none."""
        data = self.reader.get_metrics_data()
        found = [
            point
            for resource in ([] if data is None else data.resource_metrics)
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]
        if not found:
            return None
        (point,) = found
        assert isinstance(point, HistogramDataPoint)
        assert point.attributes == {"job": "run-7"}
        return [point.count, point.sum]


@pytest.fixture
def job() -> Job:
    return Job()


def test_tokens_responses_and_groups_are_counted_once_their_trainer_has_them(job: Job) -> None:
    """Three tokens of version 1 and two of 2, then four of 3. One is done while 4 is the newest, and one at 5."""
    job.ends(FIRST, (1, 3), (2, 2))
    assert job.ages.tokens == {}, "it has ended, and waits for its trainer"
    job.publish(4)
    job.done(2, FIRST)
    assert job.ages.tokens == {3: 3, 2: 2}
    assert job.recorded("tensorhub.rollout.response.age") == [1, 3]
    assert job.recorded("tensorhub.rollout.group.age") is None, "the second one of its group is open"
    job.ends(SECOND, (3, 4))
    job.publish(5)
    job.done(3, SECOND)
    assert job.ages.tokens == {3: 3, 2: 2 + 4}
    assert job.recorded("tensorhub.rollout.response.age") == [2, 3 + 2]
    assert job.recorded("tensorhub.rollout.group.age") == [1, 4], "it was submitted when 1 was the newest"


def test_a_group_that_is_done_at_once_is_counted_once_and_what_is_very_old_with_the_oldest(job: Job) -> None:
    job.ends(FIRST, (1, 3))
    job.ends(SECOND, (1, 1))
    job.publish(100)
    job.done(2, FIRST, SECOND)
    assert job.ages.tokens == {AGE_MAX: 4}
    assert job.recorded("tensorhub.rollout.group.age") == [1, 99]


def test_what_ended_under_an_earlier_leader_is_left_out(job: Job) -> None:
    job.ends(FIRST, (1, 3))
    job.ages.forget()
    job.done(2, FIRST)
    assert (job.ages.tokens, job.recorded("tensorhub.rollout.response.age")) == ({}, None)


def test_a_manager_that_does_not_lead_counts_nothing(job: Job) -> None:
    job.ends(FIRST, (1, 3))
    leader, job.leader = job.leader, None  # type: ignore[assignment]
    job.done(2, FIRST)
    assert job.ages.tokens == {}
    assert leader.state is job.state
