"""What is told of a response at its end: its waits, its attempts with instance and versions, and how each ended."""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import pytest
from tests.unit.span_places import place_at

from tensorhub_common.machine import Tick
from tensorhub_common.observability.trace_context import SpanRecord, TraceContext
from tensorhub_common.protocol.rollout.entries import (
    AnyEntry,
    Attach,
    Attempt,
    Cancel,
    End,
    GroupSubmitted,
    Lead,
    Payload,
    RequestEnded,
    RequestId,
    SdkSender,
    Submit,
)
from tensorhub_common.protocol.rollout.messages import (
    AssignResult,
    Finished,
    Frame,
    HeldAttempt,
    PublishedVersions,
    Report,
    RunnerHeartbeat,
    Sampling,
    TokenRun,
    VersionRule,
    attempt_key,
)
from tensorhub_rollout.core.fold import fold
from tensorhub_rollout.core.leader import Leader, LeaderLimits
from tensorhub_rollout.core.leader_events import (
    AssignAnswered,
    FrameCame,
    HeartbeatCame,
    Place,
    PromptLoaded,
    ReportCame,
    VersionsSeen,
)
from tensorhub_rollout.core.response_story import delivery_span, spans_of, story_of
from tensorhub_rollout.core.state import RolloutState

REQUEST = RequestId(3, 1)
ROOT, CAUSE = place_at(0xAAAA, 0xA1), place_at(0xBBBB, 0xB1)
LOG, TOKENS_MAX = "log", 8
CLOCK_NS = 1_000_000_000_000
"""What is added to the leader's time."""


@dataclass
class Job:
    """A leader whose one group has two requests, and the entries that it has folded. Version 5 is published."""

    state: RolloutState = field(default_factory=lambda: RolloutState("run-7"))
    seq: int = 0
    leader: Leader = field(init=False)

    def __post_init__(self) -> None:
        self.fold(Lead(1, "m"))
        self.fold(Attach("main", "policy", 0, "n"))
        group = GroupSubmitted("p-17", "a" * 64, 2, 1, TOKENS_MAX)
        self.fold(Submit(SdkSender(2, 1), (group,), Payload("b" * 64, 1)))
        self.lead(0.0)

    def lead(self, now: float) -> None:
        self.leader = Leader(self.state, LOG, LeaderLimits(gather_s=0.0, silence_s=100.0), now)
        self.leader.handle(VersionsSeen("policy", PublishedVersions(1, (5,))), now)

    def fold(self, entry: AnyEntry) -> None:
        self.seq += 1
        fold(self.state, self.seq, entry)

    def runner(self, runner: str, now: float, incarnation: int = 1, held: tuple[HeldAttempt, ...] = ()) -> None:
        beat = RunnerHeartbeat(LOG, incarnation, 0, "policy", 8, 5)
        self.leader.handle(HeartbeatCame(runner, beat), now)
        self.leader.handle(ReportCame(runner, Report(LOG, incarnation, held)), now)
        self.leader.handle(Tick(), now + 0.05)

    def place(self, runner: str, now: float) -> Attempt:
        self.leader.handle(Place(REQUEST, runner), now)
        self.leader.handle(PromptLoaded(REQUEST, b"", Sampling(TOKENS_MAX, 7), VersionRule()), now)
        placement = self.leader.requests[REQUEST].placement
        assert placement is not None
        result = AssignResult(placement.attempt, placement.began_at)
        self.leader.handle(AssignAnswered(runner, 1, (result,)), now)
        return placement.attempt

    def tokens(
        self, runner: str, attempt: Attempt, start: int, number: int, now: float, finished: Finished | None = None
    ) -> None:
        attempts, starts, counts = (array("q", [each]).tobytes() for each in (attempt_key(attempt), start, number))
        body = array("i", range(number)).tobytes()
        run = (attempt, TokenRun(start, 5, "root", runner, attempt))
        ends = () if finished is None else (finished,)
        self.leader.handle(FrameCame(runner, Frame(LOG, 1, 1, attempts, starts, counts, body, body, (run,), ends)), now)

    def spans(
        self, now: float, *, submitted: float | None = 1.0, cause: TraceContext | None = None
    ) -> list[SpanRecord]:
        story = story_of(self.leader, REQUEST, now)
        assert story is not None
        taken_ns = None if submitted is None else ns(submitted)
        return list(spans_of(story, ROOT, cause, taken_ns, ns(now), CLOCK_NS, ids()))


def ns(at: float) -> int:
    return int(at * 1e9) + CLOCK_NS


def ids() -> Callable[[], str]:
    numbers = count(1)
    return lambda: f"{next(numbers):016x}"


def drawn(spans: list[SpanRecord]) -> Iterator[tuple[str, float, float]]:
    for each in spans:
        yield each.name, (each.start_ns - CLOCK_NS) / 1e9, (each.end_ns - CLOCK_NS) / 1e9


@pytest.fixture
def job() -> Job:
    return Job()


def ended(attempt: Attempt, tokens: int) -> End:
    return End(1, (RequestEnded(REQUEST, attempt, "stop", tokens),), Payload("c" * 64, 9))


def test_a_response_that_was_moved_is_one_trace_with_each_wait_and_each_attempt(job: Job) -> None:
    job.runner("one", 1.5)
    first = job.place("one", 2.0)
    job.tokens("one", first, 0, 3, 3.0)
    # Its process begins anew, so what it had is lost.
    job.runner("one", 4.0, incarnation=2)
    job.runner("other", 4.0)
    second = job.place("other", 6.0)
    job.tokens("other", second, 3, 2, 7.0)
    job.tokens("other", second, 5, 1, 8.0, Finished(second, 6, "stop"))
    job.fold(ended(second, 6))
    spans = job.spans(9.0, cause=CAUSE)
    assert [*drawn(spans)] == [
        ("response", 1.0, 9.0),
        ("queue", 1.0, 2.0),
        ("attempt", 2.0, 4.0),
        ("queue", 4.0, 6.0),
        ("attempt", 6.0, 8.0),
        ("store", 8.0, 9.0),
    ]
    root, attempts = spans[0], [each for each in spans if each.name == "attempt"]
    assert (root.trace, root.span, root.parent, root.links) == (ROOT.trace_id, ROOT.span_id, None, (CAUSE,))
    assert all((each.trace, each.parent) == (ROOT.trace_id, ROOT.span_id) for each in spans[1:])
    assert len({each.span for each in spans}) == len(spans)
    assert root.attributes == {
        "tensorhub.job": "run-7",
        "tensorhub.model": "policy",
        "tensorhub.consumer": "main",
        "tensorhub.group": "p-17",
        "tensorhub.index": 1,
        "tensorhub.request": "3/1",
        "tensorhub.reason": "stop",
        "tensorhub.tokens": 6,
        "tensorhub.versions": ("5",),
        "tensorhub.attempts": 2,
    }
    assert attempts[0].attributes == {
        "tensorhub.instance": "one",
        "tensorhub.attempt": "1/1",
        "tensorhub.tokens_from": 0,
        "tensorhub.tokens": 3,
        "tensorhub.versions": ("5",),
        "tensorhub.first_token_s": 1.0,
        "tensorhub.end": "lost",
    }
    assert attempts[0].error == "one was lost: it began anew"
    assert (attempts[1].attributes["tensorhub.tokens_from"], attempts[1].attributes["tensorhub.tokens"]) == (3, 3)
    assert (attempts[1].attributes["tensorhub.end"], attempts[1].error) == ("completed", None)


def test_a_cancelled_response_tells_what_its_attempt_had_made(job: Job) -> None:
    job.runner("one", 1.5)
    attempt = job.place("one", 2.0)
    job.tokens("one", attempt, 0, 3, 3.0)
    job.fold(Cancel(SdkSender(2, 2), ("p-17",)))
    spans = job.spans(4.0)
    assert [*drawn(spans)] == [("response", 1.0, 4.0), ("queue", 1.0, 2.0), ("attempt", 2.0, 4.0)]
    assert (spans[0].attributes["tensorhub.reason"], spans[0].attributes["tensorhub.tokens"]) == ("cancelled", 0)
    assert (spans[2].attributes["tensorhub.end"], spans[2].attributes["tensorhub.tokens"]) == ("closed", 3)


def test_one_that_never_ran_has_waited_only_and_one_that_failed_says_why(job: Job) -> None:
    job.fold(End(1, (RequestEnded(REQUEST, None, "failed", 0, "its prompt can't be read"),)))
    spans = job.spans(4.0)
    assert [*drawn(spans)] == [("response", 1.0, 4.0), ("queue", 1.0, 4.0)]
    assert spans[0].error == "its prompt can't be read"


def test_an_attempt_that_begins_anew_tells_how_many_tokens_that_cost(job: Job) -> None:
    job.runner("one", 1.5)
    first = job.place("one", 2.0)
    job.tokens("one", first, 0, 3, 3.0, Finished(first, 3, "restart"))
    second = job.place("one", 4.0)
    job.tokens("one", second, 0, 2, 5.0, Finished(second, 2, "stop"))
    job.fold(ended(second, 2))
    attempts = [each.attributes for each in job.spans(6.0) if each.name == "attempt"]
    assert [each["tensorhub.end"] for each in attempts] == ["restart", "completed"]
    assert [each["tensorhub.tokens"] for each in attempts] == [3, 2]
    assert dict(job.leader.counts.discarded) == {"restart": 3}


def test_a_leader_that_took_over_tells_what_it_saw_and_guesses_no_wait(job: Job) -> None:
    job.runner("one", 1.5)
    first = job.place("one", 2.0)
    job.fold(Lead(2, "other"))
    job.lead(5.0)
    job.runner("one", 5.0, held=(HeldAttempt(REQUEST, first, 0, "running"),))
    job.tokens("one", first, 0, 3, 5.5, Finished(first, 3, "stop"))
    job.fold(End(2, (RequestEnded(REQUEST, first, "stop", 3),), Payload("c" * 64, 9)))
    spans = job.spans(6.0, submitted=None)
    assert [*drawn(spans)] == [("response", 5.0, 6.0), ("attempt", 5.0, 5.5), ("store", 5.5, 6.0)]


def test_what_the_leader_has_forgotten_has_no_story(job: Job) -> None:
    assert story_of(job.leader, REQUEST, 1.0) is None
    assert story_of(job.leader, RequestId(99, 0), 1.0) is None


def test_a_delivery_is_from_the_end_in_the_log_to_done() -> None:
    span = delivery_span(ROOT, "00000000000000d1", ns(1.0), ns(3.0))
    assert [*drawn([span])] == [("delivery", 1.0, 3.0)]
    assert (span.trace, span.parent, span.span) == (ROOT.trace_id, ROOT.span_id, "00000000000000d1")
