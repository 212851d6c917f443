"""Where a span stands in a trace, and what a finished one says. Pure: making spans is `spanmaker.py`.

Ids are given out before a span is made: whoever asks another process names the span that it will make of the question
when all is over, so nothing has to be made while anybody waits.
"""

import re
from collections.abc import Mapping
from typing import Final

import msgspec

TRACEPARENT: Final = "traceparent"
"""W3C's header: the span that caused this message."""

PUBLISH: Final = "tensorhub-publish"
"""The header of a decision that stands in a trace of its own: the traceparent of the version's publish span."""

SAMPLED: Final = 1
HEX: Final = 16

_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)

Value = str | int | float | bool | tuple[str, ...]


class TraceContext(msgspec.Struct, frozen=True):
    """A span's place: its trace and itself."""

    trace_id: int
    span_id: int
    sampled: bool = True

    @property
    def traceparent(self) -> str:
        """Return the W3C header that names this span."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{'01' if self.sampled else '00'}"

    def beside(self, span_id: int) -> "TraceContext":
        """Return the place of another span of this trace."""
        return TraceContext(self.trace_id, span_id, self.sampled)


class SpanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A finished span; times in ns since the epoch."""

    name: str
    context: TraceContext
    parent: TraceContext | None
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    links: tuple[TraceContext, ...] = ()
    error: str | None = None


def parse(traceparent: str | None) -> TraceContext | None:
    """Read a W3C traceparent. What is none counts as absent."""
    found = _FORM.fullmatch(traceparent) if traceparent else None
    if found is None:
        return None
    form, trace_id, span_id, flags, more = found.groups()
    place = TraceContext(int(trace_id, HEX), int(span_id, HEX), bool(int(flags, HEX) & SAMPLED))
    is_known = form != "ff" and (form != "00" or more is None)
    return place if is_known and place.trace_id and place.span_id else None


def context_in(headers: Mapping[str, str], name: str = TRACEPARENT) -> TraceContext | None:
    """Return the context that a message's headers carry. Clients in other languages write `Traceparent`."""
    value = headers.get(name)
    if value is None:
        value = next((value for key, value in headers.items() if key.lower() == name), None)
    return parse(value)


def headers_of(context: TraceContext | None) -> dict[str, str]:
    """Return the headers that name a span as the cause of a message."""
    return {} if context is None else {TRACEPARENT: context.traceparent}
