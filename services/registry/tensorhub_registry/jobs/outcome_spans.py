"""The registry's spans: from a command to its stored outcome, of published versions and decided rounds.

A span begins when the command was stored, by JetStream's clock, and ends when its outcome is stored.
"""

import time
from functools import partial
from typing import Final

from tensorhub_common.observability.deferred_spans import new_span_id
from tensorhub_common.observability.trace_context import AttributeValue, SpanRecord, TraceContext, finished_span
from tensorhub_common.protocol.log.events import VersionPublished, kind_of
from tensorhub_common.telemetry.process_spans import JobSpans
from tensorhub_common.telemetry.span_maker import SpanMaker
from tensorhub_registry.core.trace_causes import TraceCause

NS_PER_S: Final = 1_000_000_000


class OutcomeSpans:
    """The spans of one job."""

    def __init__(self, job: str) -> None:
        """Make spans if this process makes any."""
        self._job = job
        self._spans = JobSpans()

    def stored(self, causes: tuple[TraceCause, ...]) -> None:
        """Make the spans of events that this registry has stored just now, where they are traced."""
        if self._spans.is_on and any(each.parent is not None and each.parent.sampled for each in causes):
            self._spans.add(partial(self._make, causes, time.time_ns()))

    def close(self) -> None:
        """Make the spans that wait."""
        self._spans.close()

    def _make(self, causes: tuple[TraceCause, ...], ended_ns: int, maker: SpanMaker) -> None:
        for each in causes:
            if each.parent is not None and each.parent.sampled:
                maker.make(self._record(each, each.parent, ended_ns))

    def _record(self, cause: TraceCause, parent: TraceContext, ended_ns: int) -> SpanRecord:
        event = cause.event
        attributes: dict[str, AttributeValue] = {
            "tensorhub.job": self._job,
            "tensorhub.model": event.model,
            "tensorhub.version": event.version,
            "tensorhub.replica": event.replica,
            "tensorhub.cmd": event.cmd,
        }
        if not isinstance(event, VersionPublished):
            attributes |= {"tensorhub.round": event.round, "tensorhub.attempt": event.attempt}
        times_ns = (int(event.time * NS_PER_S), ended_ns)
        place = parent.beside(new_span_id())
        return finished_span(kind_of(event), place, parent, times_ns, attributes, links=cause.links)
