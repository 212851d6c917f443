"""The spans of a job's responses: each response is one trace, made once its end is in the log.

Nothing is made for a token or a frame. What ends is looked at once, and its spans are made a little later; of the
responses that end within a second, `TRACED_PER_S_MAX` have spans.
"""

import time
from collections import OrderedDict
from functools import partial
from typing import Final, NamedTuple

from tensorhub_common.jetstream.rollout_log import RolloutLogEntry
from tensorhub_common.observability.deferred_spans import new_span_id
from tensorhub_common.observability.trace_context import TraceContext, context_in
from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_common.protocol.spans import RESPONSE
from tensorhub_common.telemetry.process_spans import JobSpans
from tensorhub_common.telemetry.span_maker import SpanMaker
from tensorhub_rollout.answers.response_story import NS_PER_S, ResponseStory, delivery_span, spans_of, story_of
from tensorhub_rollout.core.leader import Leader
from tensorhub_rollout.log.outcomes import Acknowledged, Cancelled, Ended, Outcome, Submitted

TRACED_PER_S_MAX: Final = 100
"""Limit of the responses that have spans, of those that end in one second: they take 0.3 % of a core."""
SUBMISSIONS_NOTED_MAX: Final = 16_384
"""Limit of the submissions whose time and cause are remembered, the latest."""
DELIVERIES_MAX: Final = 16_384
"""Limit of the responses that ended and whose `done` is waited for, the latest."""


class _Submission(NamedTuple):
    """When the log took a submission, and which span of its trainer was the cause."""

    taken_ns: int
    cause: TraceContext | None


class ResponseSpans:
    """The spans of one job's responses."""

    def __init__(self) -> None:
        """Make spans if this process makes any."""
        self._spans = JobSpans()
        self._submissions: OrderedDict[int, _Submission] = OrderedDict()
        self._deliveries: OrderedDict[RequestId, tuple[TraceContext, int]] = OrderedDict()
        """The root of each response that ended, and when."""
        self._second, self._traced = 0, 0

    def take(self, leader: Leader | None, stored: RolloutLogEntry, outcome: Outcome) -> None:
        """Note what an entry did. `leader`, if this manager leads, has not heard of the entry yet."""
        if not self._spans.is_on:
            return
        match outcome:
            case Submitted():
                self._submissions[stored.seq] = _Submission(int(stored.time * NS_PER_S), context_in(stored.headers))
                if len(self._submissions) > SUBMISSIONS_NOTED_MAX:
                    self._submissions.popitem(last=False)
            case Ended(requests=ended) | Cancelled(requests=ended) if leader is not None:
                for of in ended:
                    self._end(leader, of)
            case Acknowledged(requests=done):
                for of in done:
                    self._deliver(of)
            case _:
                pass

    def close(self) -> None:
        """Make the spans that wait."""
        self._spans.close()

    def _end(self, leader: Leader, of: RequestId) -> None:
        submission = self._submissions.get(of.submission)
        cause = None if submission is None else submission.cause
        if (cause is not None and not cause.sampled) or not self._may_trace():
            return
        place = self._spans.new_trace(RESPONSE)
        story = story_of(leader, of, time.monotonic())
        if place is None or story is None:
            return
        ended_ns = time.time_ns()
        self._deliveries[of] = (place, ended_ns)
        if len(self._deliveries) > DELIVERIES_MAX:
            self._deliveries.popitem(last=False)
        clock_ns = ended_ns - time.monotonic_ns()
        submitted_ns = None if submission is None else submission.taken_ns
        self._spans.add(partial(_make, story, place, cause, submitted_ns, ended_ns, clock_ns))

    def _may_trace(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._traced = second, 0
        self._traced += 1
        return self._traced <= TRACED_PER_S_MAX

    def _deliver(self, of: RequestId) -> None:
        found = self._deliveries.pop(of, None)
        if found is not None:
            self._spans.add(partial(_make_delivery, *found, time.time_ns()))


def _make(
    story: ResponseStory,
    place: TraceContext,
    cause: TraceContext | None,
    submitted_ns: int | None,
    ended_ns: int,
    clock_ns: int,
    maker: SpanMaker,
) -> None:
    maker.make_all(spans_of(story, place, cause, submitted_ns, ended_ns, clock_ns, new_span_id))


def _make_delivery(place: TraceContext, ended_ns: int, done_ns: int, maker: SpanMaker) -> None:
    maker.make(delivery_span(place, new_span_id(), ended_ns, done_ns))
