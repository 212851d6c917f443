"""The span maker of each service of this process, and the store of its recent spans."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from tensorhub_common.observability.deferred_spans import DeferredSpans
from tensorhub_common.observability.span_cost import SPAN_CPU
from tensorhub_common.observability.trace_context import TraceContext
from tensorhub_common.protocol.spans import FinishedSpan
from tensorhub_common.telemetry.span_maker import SpanMaker
from tensorhub_common.telemetry.span_store import SpanStore

_keepers: Final[list[SpanStore]] = []
"""The keeper of this process's spans; none before `start`, and none with telemetry off."""


_makers: Final[list[SpanMaker]] = []
"""The maker of this process's spans; none before `start`, and none with telemetry off."""


def span_store() -> SpanStore | None:
    """Return what keeps this process's spans, if anything does."""
    return _keepers[0] if _keepers else None


def span_maker() -> SpanMaker | None:
    """Return what makes this process's spans, if anything does."""
    return _makers[0] if _makers else None


class JobSpans:
    """The spans of one owner in this process: each is made a little after the work that it tells of."""

    def __init__(self) -> None:
        """Make spans if this process makes any."""
        self._maker = span_maker()
        self._later = DeferredSpans()

    @property
    def is_on(self) -> bool:
        """Whether spans are made at all."""
        return self._maker is not None

    def new_trace(self, name: str) -> TraceContext | None:
        """Give out the place of a root span with this name; None where none is made of its trace."""
        place = None if self._maker is None else self._maker.new_trace(name)
        return place if place is not None and place.sampled else None

    def add(self, make: Callable[[SpanMaker], None]) -> None:
        """Have these spans made later, if any are made."""
        if self._maker is not None:
            self._later.add(partial(make, self._maker))

    def close(self) -> None:
        """Make the spans that wait."""
        self._later.flush()


def store_worker_spans(spans: Iterable[FinishedSpan]) -> None:
    """Keep finished spans of a process that has no store of its own: a worker's, which it hands to its agent."""
    with SPAN_CPU.counted():
        for each in _keepers:
            for span in spans:
                each.take(span)
