"""What is told of a response at its end: its waits, its attempts with instance and versions, and how each ended."""

from collections.abc import Iterator

import pytest
from tests.unit.rollout.one_response import CAUSE, CLOCK_NS, REQUEST, ROOT, Job, ended, ns

from tensorhub_common.observability.trace_context import SpanRecord
from tensorhub_common.protocol.rollout.entries import Cancel, End, Lead, Payload, RequestEnded, RequestId, SdkSender
from tensorhub_common.protocol.rollout.messages import AbortResult, Finished, HeldAttempt
from tensorhub_rollout.answers.response_story import delivery_span, story_of
from tensorhub_rollout.core.leader_events import AbortAnswered, Withdraw


def drawn(spans: list[SpanRecord]) -> Iterator[tuple[str, float, float]]:
    for each in spans:
        yield each.name, (each.start_ns - CLOCK_NS) / 1e9, (each.end_ns - CLOCK_NS) / 1e9


@pytest.fixture
def job() -> Job:
    return Job()


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


def test_attempts_tell_why_they_were_placed_and_why_they_were_taken_away(job: Job) -> None:
    job.runner("one", 1.5)
    job.runner("other", 1.5)
    first = job.place("one", 2.0, "one is done soonest")
    job.tokens("one", first, 0, 3, 3.0)
    job.leader.handle(Withdraw(REQUEST, "other", "one is done later than other"), 3.5)
    job.leader.handle(AbortAnswered("one", 1, (AbortResult(first, 3),), ()), 4.0)
    job.fold(Cancel(SdkSender(2, 2), ("p-17",)))
    attempts = [each.attributes for each in job.spans(5.0) if each.name == "attempt"]
    assert [(each["tensorhub.instance"], each["tensorhub.why"]) for each in attempts] == [
        ("one", "one is done soonest"),
        ("other", "one is done later than other"),
    ]
    assert [each.get("tensorhub.withdrawn_why") for each in attempts] == ["one is done later than other", None]


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
