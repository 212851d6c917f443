"""The planner's spans: one for each question that says which span it belongs to, made after the answer has gone.

While a question is answered, log lines carry the ids of whoever asked.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from opentelemetry import trace

from tensorhub_common import telemetry
from tensorhub_common.bus.message import Message
from tensorhub_common.spanmaker import SpanMaker, SpansLater, new_span_id
from tensorhub_common.subjects import AskSubject, parse
from tensorhub_common.tracecontext import SpanRecord, TraceContext, Value, context_in
from tensorhub_common.wire.asks import Error
from tensorhub_common.wire.transfer import Plan, PlanAnswer, Refusal


@dataclass(slots=True)
class Asked:
    """A question that is being answered."""

    subject: str
    began_ns: int
    answer: PlanAnswer | Error | None = None


class Tracing:
    """The spans of one planner."""

    def __init__(self) -> None:
        """Make spans if this process makes any."""
        self._maker = telemetry.span_maker()
        self._later = SpansLater()

    @contextmanager
    def asked(self, question: Message) -> Iterator[Asked]:
        """Answer a question within this; its span is made later."""
        cause = None if self._maker is None else context_in(question.headers)
        asked = Asked(question.subject, time.time_ns())
        if self._maker is None or cause is None:
            yield asked
            return
        try:
            with trace.use_span(_remote(cause)):
                yield asked
        finally:
            self._later.add(partial(_tell, self._maker, asked, cause, time.time_ns()))

    def close(self) -> None:
        """Make what is left."""
        self._later.flush()


def _remote(place: TraceContext) -> trace.Span:
    flags = trace.TraceFlags(int(place.sampled))
    return trace.NonRecordingSpan(trace.SpanContext(place.trace_id, place.span_id, is_remote=True, trace_flags=flags))


def _tell(maker: SpanMaker, asked: Asked, cause: TraceContext, ended_ns: int) -> None:
    subject = parse(asked.subject)
    attributes: dict[str, Value] = {}
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
        case Error() as refused:
            error = f"{refused.error}: {refused.message}"
        case None:
            error = "it was not answered"
    record = SpanRecord(
        name="planner.plan",
        context=cause.beside(new_span_id()),
        parent=cause,
        start_ns=asked.began_ns,
        end_ns=ended_ns,
        attributes=attributes,
        error=error,
    )
    maker.make(record)
