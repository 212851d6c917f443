"""The planner's spans: one for each request that names the span it belongs to, made after the answer was sent.

While a request is answered, log lines carry the trace ids of its sender.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from tensorhub_common.bus.message import Message
from tensorhub_common.observability import logs
from tensorhub_common.observability.deferred_spans import new_span_id
from tensorhub_common.observability.trace_context import AttributeValue, context_in, finished_span
from tensorhub_common.protocol.plans import Plan, PlanAnswer, Refusal
from tensorhub_common.protocol.queries import QueryError
from tensorhub_common.protocol.subjects import AskSubject, parse_subject
from tensorhub_common.telemetry.process_spans import JobSpans
from tensorhub_common.telemetry.span_maker import SpanMaker


@dataclass(slots=True)
class TracedRequest:
    """A request that is being answered."""

    subject: str
    began_ns: int
    answer: PlanAnswer | QueryError | None = None


class RequestSpans:
    """The spans of one planner."""

    def __init__(self) -> None:
        """Make spans if this process makes any."""
        self._spans = JobSpans()

    @contextmanager
    def asked(self, question: Message) -> Iterator[TracedRequest]:
        """Answer a request within this; its span is made later."""
        headers = question.headers
        asked = TracedRequest(question.subject, time.time_ns())
        if not self._spans.is_on or not headers:
            yield asked
            return
        token = logs.REQUEST_HEADERS.set(headers)
        try:
            yield asked
        finally:
            logs.REQUEST_HEADERS.reset(token)
            # The headers are read later too.
            self._spans.add(partial(_make_span, asked, headers, time.time_ns()))

    def close(self) -> None:
        """Make the spans that wait."""
        self._spans.close()


def _make_span(asked: TracedRequest, headers: Mapping[str, str], ended_ns: int, maker: SpanMaker) -> None:
    cause = context_in(headers)
    if cause is None or not cause.sampled:
        return
    subject = parse_subject(asked.subject)
    attributes: dict[str, AttributeValue] = {}
    if isinstance(subject, AskSubject) and subject.job is not None:
        attributes["tensorhub.job"] = subject.job
    error = None
    match asked.answer:
        case Plan() as plan:
            attributes |= {
                "tensorhub.version": plan.version,
                "tensorhub.sources": len(plan.shares),
                "tensorhub.why": plan.why,
            }
        case Refusal() as refusal:
            error = f"{refusal.error}: {refusal.reason}"
        case QueryError() as refused:
            error = f"{refused.error}: {refused.message}"
        case None:
            error = "it was not answered"
    place, times_ns = cause.beside(new_span_id()), (asked.began_ns, ended_ns)
    maker.make(finished_span("planner.plan", place, cause, times_ns, attributes, error=error))
