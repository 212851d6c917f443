"""The context of a span in a trace, and what a finished one says. Pure: making spans is `telemetry/span_maker.py`.

Ids are given out before a span is made: a request to another process names the span that will be made of it when all
is over, so no span has to be made while a caller waits.
"""

import re
from collections.abc import Mapping
from typing import Final

import msgspec

TRACEPARENT: Final = "traceparent"
"""W3C's header: the span that caused this message."""

PUBLISH_HEADER: Final = "tensorhub-publish"
"""The header of a decision that has a trace of its own: the traceparent of the version's publish span."""

SAMPLED: Final = 1
HEX: Final = 16
NO_TRACE: Final = "0" * 32
NO_SPAN: Final = "0" * 16

_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)

AttributeValue = str | int | float | bool | tuple[str, ...]


class TraceContext(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, rename={"trace_id": "trace", "span_id": "span"}
):
    """A span's place: its trace and itself, by ids of 32 and 16 lower-case hexadecimal digits.

    Ids are text from the beginning, since they are put into headers and lines of JSON and hardly anywhere else.
    """

    trace_id: str
    span_id: str
    sampled: bool = True

    @property
    def traceparent(self) -> str:
        """Return the W3C header that names this span."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

    def beside(self, span_id: str) -> "TraceContext":
        """Return the place of another span of this trace."""
        return TraceContext(self.trace_id, span_id, self.sampled)


class SpanRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A finished span of this process; times in ns since the epoch. Its keys are those of `wire.traces.Span`.

    Nothing in it leads back to it, so the garbage collector need not look through the hundreds that wait to be kept.
    """

    trace: str
    span: str
    parent: str | None
    name: str
    start_ns: int
    end_ns: int
    error: str | None
    attributes: Mapping[str, AttributeValue]
    links: tuple[TraceContext, ...]


def finished_span(
    name: str,
    context: TraceContext,
    parent: TraceContext | None,
    times_ns: tuple[int, int],
    attributes: Mapping[str, AttributeValue],
    *,
    links: tuple[TraceContext, ...] = (),
    error: str | None = None,
) -> SpanRecord:
    """Return the record of a span that is over. It never ends before it begins, and its parent is of its trace."""
    assert context.sampled, "nothing of a trace that is not sampled is recorded"
    assert parent is None or parent.trace_id == context.trace_id, "a span's parent is of the same trace"
    start_ns, end_ns = times_ns
    return SpanRecord(
        trace=context.trace_id,
        span=context.span_id,
        parent=None if parent is None else parent.span_id,
        name=name,
        start_ns=start_ns,
        end_ns=max(end_ns, start_ns),
        error=error,
        attributes=attributes,
        links=links,
    )


def parse_traceparent(traceparent: str | None) -> TraceContext | None:
    """Read a W3C traceparent. What is none counts as absent."""
    found = _FORM.fullmatch(traceparent) if traceparent else None
    if found is None:
        return None
    form, trace_id, span_id, flags, more = found.groups()
    is_known = form != "ff" and (form != "00" or more is None) and trace_id != NO_TRACE and span_id != NO_SPAN
    return TraceContext(trace_id, span_id, bool(int(flags, HEX) & SAMPLED)) if is_known else None


def context_in(headers: Mapping[str, str], name: str = TRACEPARENT) -> TraceContext | None:
    """Return the context that a message's headers carry. Clients in other languages write `Traceparent`."""
    value = headers.get(name)
    if value is None:
        value = next((value for key, value in headers.items() if key.lower() == name), None)
    return parse_traceparent(value)


def headers_of(context: TraceContext | None) -> dict[str, str]:
    """Return the headers that name a span as the cause of a message."""
    return {} if context is None else {TRACEPARENT: context.traceparent}


ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""OpenTelemetry's variables that name where spans are exported to."""

SAMPLER: Final = "OTEL_TRACES_SAMPLER"
"""OpenTelemetry's variable that says which traces are sampled; without it all are."""


def is_disabled(environ: Mapping[str, str]) -> bool:
    """Tell whether OpenTelemetry's own switch turns all telemetry but the logs off."""
    return environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
