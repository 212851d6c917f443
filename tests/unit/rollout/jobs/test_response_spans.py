"""Which responses have spans: those that the trainer's sampler takes, and a hundred of those that end in one second."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import TracerProvider
from tests.unit.rollout.one_response import CAUSE, REQUEST, Job, ended

from tensorhub_common.jetstream.rollout_log import RolloutLogEntry
from tensorhub_common.observability.trace_context import SpanRecord, TraceContext, headers_of
from tensorhub_common.protocol.rollout.entries import AnyEntry, Attempt, Done, SdkSender
from tensorhub_common.telemetry import process_spans
from tensorhub_common.telemetry.span_maker import SpanMaker
from tensorhub_rollout.jobs import response_spans
from tensorhub_rollout.jobs.response_spans import ResponseSpans
from tensorhub_rollout.log.outcomes import Submitted

ATTEMPT = Attempt(1, 1)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SpanRecord]]:
    """The spans that this process makes."""
    found: list[SpanRecord] = []
    provider = TracerProvider(shutdown_on_exit=False)
    monkeypatch.setattr(process_spans, "_makers", [SpanMaker.own(provider, None, found.append)])
    yield found
    provider.shutdown()


def take(job: Job, spans: ResponseSpans, entry: AnyEntry) -> None:
    """Fold an entry as a manager does that leads."""
    outcome = job.fold(entry)
    spans.take(job.leader, RolloutLogEntry(job.seq, 1.0, entry), outcome)


def submitted(job: Job, spans: ResponseSpans, cause: TraceContext | None) -> None:
    """Tell of the submission again, as it is read from the log, now with the span that caused it."""
    entry = RolloutLogEntry(REQUEST.submission, 1.0, ended(ATTEMPT, 1), headers_of(cause))
    spans.take(job.leader, entry, Submitted((REQUEST,)))


@pytest.fixture
def job() -> Job:
    return Job()


async def test_a_response_is_traced_and_its_delivery_told_once(job: Job, made: list[SpanRecord]) -> None:
    spans = ResponseSpans()
    submitted(job, spans, CAUSE)
    take(job, spans, ended(ATTEMPT, 2))
    take(job, spans, Done(SdkSender(2, 2), (REQUEST,)))
    take(job, spans, Done(SdkSender(2, 3), (REQUEST,)))
    assert made == [], "nothing is made while the entry is folded"
    spans.close()
    assert [each.name for each in made] == ["response", "store", "delivery"]
    root, *below = made
    assert root.links == (CAUSE,)
    assert {(each.trace, each.parent) for each in below} == {(root.trace, root.span)}


async def test_a_submission_that_is_not_sampled_has_no_trace(job: Job, made: list[SpanRecord]) -> None:
    spans = ResponseSpans()
    submitted(job, spans, TraceContext(CAUSE.trace_id, CAUSE.span_id, sampled=False))
    take(job, spans, ended(ATTEMPT, 2))
    spans.close()
    assert made == []


async def test_one_without_a_cause_is_traced_without_a_link(job: Job, made: list[SpanRecord]) -> None:
    spans = ResponseSpans()
    take(job, spans, ended(ATTEMPT, 2))
    spans.close()
    assert [(each.name, each.links) for each in made if each.parent is None] == [("response", ())]


async def test_of_those_that_end_in_one_second_a_hundred_are_traced(
    made: list[SpanRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [7.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], monotonic_ns=lambda: 0, time_ns=lambda: 0)
    monkeypatch.setattr(response_spans, "time", clock)
    spans = ResponseSpans()
    for now[0] in [7.5] * 130 + [8.0] * 3:
        take(Job(), spans, ended(ATTEMPT, 2))
    spans.close()
    assert sum(each.parent is None for each in made) == response_spans.TRACED_PER_S_MAX + 3


async def test_without_telemetry_nothing_is_noted(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_spans, "_makers", [])
    spans = ResponseSpans()
    submitted(job, spans, CAUSE)
    take(job, spans, ended(ATTEMPT, 2))
    assert (len(spans._submissions), len(spans._deliveries)) == (0, 0)
