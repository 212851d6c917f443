"""What is told of one response at its end, and the spans that are made of it. Pure.

The leader notes times where an attempt is placed, makes its first token and is over. All else is read at the end of the
response from what the leader holds of it. A leader that took over knows the attempts before it by their runs alone.
"""

from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from tensorhub_common.observability.trace_context import AttributeValue, SpanRecord, TraceContext, finished_span
from tensorhub_common.protocol.rollout.entries import Attempt, RequestId
from tensorhub_common.protocol.rollout.messages import TokenRun
from tensorhub_common.protocol.spans import ATTEMPT, DELIVERY, QUEUE, RESPONSE, STORE
from tensorhub_rollout.core.leader import Leader
from tensorhub_rollout.core.placement import AttemptTransition, PastAttempt
from tensorhub_rollout.log.state import StoredEnd

QUEUE_S_MIN: Final = 0.001
"""A wait for an instance that is shorter has no span."""
NS_PER_S: Final = 1_000_000_000

NewId = Callable[[], str]


class ResponseStory(msgspec.Struct, frozen=True):
    """One response that has ended. Times are the leader's own, in seconds."""

    request: RequestId
    job: str
    consumer: str
    model: str
    group: str
    index: int
    end: StoredEnd
    runs: tuple[TokenRun, ...]
    attempts: tuple[PastAttempt, ...]


def story_of(leader: Leader, of: RequestId, now: float) -> ResponseStory | None:
    """Return what the leader knows of a response whose end is folded and which it has not forgotten yet."""
    state, request = leader.state, leader.requests.get(of)
    stored = state.request(of)
    if request is None or stored is None or stored.end is None:
        return None
    submission = state.submissions[of.submission]
    group, response = submission.groups[stored.group], leader.responses.get(of)
    tokens = 0 if response is None else response.count
    return ResponseStory(
        of,
        state.job,
        submission.consumer,
        state.consumers[submission.consumer].model,
        group.id,
        of.index - group.first,
        stored.end,
        () if response is None else tuple(response.runs),
        request.attempts(tokens, now),
    )


def spans_of(
    story: ResponseStory,
    place: TraceContext,
    submit: TraceContext | None,
    submitted_ns: int | None,
    ended_ns: int,
    clock_ns: int,
    new_id: NewId,
) -> Iterator[SpanRecord]:
    """Yield a response's spans: `place` is that of their root, which is linked to the trainer's `submit`.

    `submitted_ns`: when the log took its submission. `ended_ns`: when its end was folded. Both are in ns since the
    epoch; `clock_ns` is added to a time of the leader to have it so. `new_id` gives an id that no other span has.
    """
    whole = _whole(story)
    attempts = [(each, _ns(each.placed_at, clock_ns), _ns(each.over_at, clock_ns)) for each in story.attempts]
    known = [submitted_ns] if submitted_ns is not None else [placed for _, placed, _ in attempts]
    began_ns = min(known, default=ended_ns)
    links = () if submit is None else (submit,)
    yield finished_span(RESPONSE, place, None, (began_ns, ended_ns), whole, links=links, error=story.end.error)
    seen = {each.attempt for each, _, _ in attempts}
    # Where attempts of another leader came before, that leader alone knows when they were over.
    waits_from = submitted_ns if all(run.attempt in seen for run in story.runs) else None
    for each, placed_ns, over_ns in attempts:
        if waits_from is not None and placed_ns - waits_from >= QUEUE_S_MIN * NS_PER_S:
            yield finished_span(QUEUE, place.beside(new_id()), place, (waits_from, placed_ns), {})
        yield _attempt_span(story, each, (place.beside(new_id()), place), (placed_ns, over_ns))
        waits_from = over_ns
    if waits_from is not None and story.end.reason in {"stop", "length"}:
        yield finished_span(STORE, place.beside(new_id()), place, (waits_from, ended_ns), {})
    elif waits_from is not None and ended_ns - waits_from >= QUEUE_S_MIN * NS_PER_S:
        yield finished_span(QUEUE, place.beside(new_id()), place, (waits_from, ended_ns), {})


def delivery_span(root: TraceContext, span_id: str, ended_ns: int, done_ns: int) -> SpanRecord:
    """Return the span from a response's end to its trainer's `done`, below the response's own."""
    return finished_span(DELIVERY, root.beside(span_id), root, (ended_ns, done_ns), {})


def _whole(story: ResponseStory) -> dict[str, AttributeValue]:
    return {
        "tensorhub.job": story.job,
        "tensorhub.model": story.model,
        "tensorhub.consumer": story.consumer,
        "tensorhub.group": story.group,
        "tensorhub.index": story.index,
        "tensorhub.request": f"{story.request.submission}/{story.request.index}",
        "tensorhub.reason": story.end.reason,
        "tensorhub.tokens": story.end.tokens,
        "tensorhub.versions": _versions(story.runs),
        "tensorhub.attempts": len({run.attempt for run in story.runs} | {each.attempt for each in story.attempts}),
    }


def _attempt_span(
    story: ResponseStory, each: PastAttempt, places: tuple[TraceContext, TraceContext], times_ns: tuple[int, int]
) -> SpanRecord:
    attributes: dict[str, AttributeValue] = {
        "tensorhub.instance": each.runner,
        "tensorhub.attempt": _named(each.attempt),
        "tensorhub.tokens_from": each.began_at,
        "tensorhub.tokens": max(0, each.tokens - each.began_at),
        "tensorhub.versions": _versions(run for run in story.runs if run.attempt == each.attempt),
        "tensorhub.end": end_of(each),
    }
    if each.reason:
        attributes["tensorhub.why"] = each.reason
    if each.withdrawn_why:
        attributes["tensorhub.withdrawn_why"] = each.withdrawn_why
    if each.first_token_at is not None:
        attributes["tensorhub.first_token_s"] = round(each.first_token_at - each.placed_at, 4)
    return finished_span(ATTEMPT, *places, times_ns, attributes, error=each.why)


def end_of(each: PastAttempt) -> str:
    """Return the word that users have for how an attempt was over."""
    match each.ended_by:
        case AttemptTransition.STOPPED if each.finished not in {None, "stop", "length"}:
            return str(each.finished)
        case (
            AttemptTransition.STOPPED | AttemptTransition.REFUSED | AttemptTransition.COMPLETED | AttemptTransition.LOST
        ):
            return str(each.ended_by)
        case _:
            return str(AttemptTransition.CLOSED)


def _versions(runs: "Iterator[TokenRun] | tuple[TokenRun, ...]") -> tuple[str, ...]:
    return tuple(str(each) for each in sorted({run.version for run in runs}))


def _named(attempt: Attempt) -> str:
    return f"{attempt.term}/{attempt.n}"


def _ns(at: float, clock_ns: int) -> int:
    return int(at * NS_PER_S) + clock_ns
