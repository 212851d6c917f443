"""Places of spans by small numbers, as tests name them."""

from tensorhub_common.observability.trace_context import SpanRecord, TraceContext


def place_at(trace: int, span: int) -> TraceContext:
    return TraceContext(f"{trace:032x}", f"{span:016x}")


def place_of(span: SpanRecord) -> TraceContext:
    """Where a finished span stands."""
    return TraceContext(span.trace, span.span)
