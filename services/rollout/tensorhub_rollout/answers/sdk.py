"""Answers to what the SDK asks: what became of an entry, and which responses have ended. Pure.

The caller waits until the state has the entry that a question names.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from msgspec.structs import replace

from tensorhub_common.errors import RolloutUnavailable, StaleSender
from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_common.protocol.rollout.messages import PublishedVersions
from tensorhub_common.protocol.rollout.questions import (
    EndedRequest,
    OutcomeAnswer,
    OutcomeQuestion,
    ReadyAnswer,
    ReadyQuestion,
    SeedingAnswer,
    SeedingQuestion,
)
from tensorhub_rollout.core.model_versions import Models
from tensorhub_rollout.log.outcomes import Attached, Outcome, Refused, Repeated, Submitted
from tensorhub_rollout.log.state import Consumer, RolloutState
from tensorhub_rollout.policy.seeding import SeedingSettings, StepTimes, after_step, first

LOCAL_ENGINES: Final = 1
"""A trainer seeds with one engine; instances are counted in units of it."""


REPLACED: Final = "another trainer has attached to this consumer since: only the latest gets its responses"


def answer_outcome(state: RolloutState, recent: Mapping[int, Outcome], question: OutcomeQuestion) -> OutcomeAnswer:
    """Say what became of an entry. `recent`: outcomes of the latest entries; the state remembers the senders' last."""
    outcome = recent.get(question.seq)
    consumer = consumer_of(state, question.attachment or question.seq)
    epoch = 0 if consumer is None else consumer.epoch
    match outcome:
        case Refused(error=error, message=message):
            return OutcomeAnswer(error, message, epoch)
        case Repeated(error=error, message=message):
            return OutcomeAnswer(error, message or "", epoch)
        case Submitted(known=known):
            return OutcomeAnswer(None, "", epoch, known)
        case Attached():
            return OutcomeAnswer(None, "", outcome.epoch)
        case None:
            return _remembered(consumer, question, epoch)
        case _:
            return OutcomeAnswer(None, "", epoch)


def newest_of(state: RolloutState, question: OutcomeQuestion, versions: Mapping[str, PublishedVersions]) -> int | None:
    """Return the newest version of the asking consumer's model. `versions`: by model."""
    consumer = consumer_of(state, question.attachment or question.seq)
    known = None if consumer is None else versions.get(consumer.model)
    return None if known is None else max(known.published, default=None)


def _remembered(consumer: Consumer | None, question: OutcomeQuestion, epoch: int) -> OutcomeAnswer:
    """Say what the state remembers of an entry."""
    if consumer is None:
        return OutcomeAnswer(StaleSender.__name__, "another trainer has attached to this consumer since")
    if question.n == consumer.n:
        return OutcomeAnswer(consumer.error, consumer.message or "", epoch)
    if question.n < consumer.n:
        return OutcomeAnswer(
            RolloutUnavailable.__name__, f"entry {question.seq} was answered before, and is not remembered"
        )
    return OutcomeAnswer(StaleSender.__name__, f"entry {question.seq} is none of this attachment")


def answer_ready(
    state: RolloutState,
    question: ReadyQuestion,
    instances: Mapping[str, int],
    versions: Mapping[str, PublishedVersions],
    *,
    is_full: bool = False,
) -> ReadyAnswer:
    """Return what has ended behind the question's cursor.

    `instances`: by model, those that take requests. `is_full`: no group begins until some responses are done.
    """
    consumer = consumer_of(state, question.attachment)
    if consumer is None:
        return ReadyAnswer(error=StaleSender.__name__, message=REPLACED)
    ended = _ended_behind(state, consumer, question)
    page = [each for each, _ in zip(ended, range(question.count_max), strict=False)]
    known = versions.get(consumer.model)
    return ReadyAnswer(
        tuple(page),
        _open_of(state, consumer, question.groups),
        len(page) < question.count_max,
        instances.get(consumer.model, 0),
        () if known is None else known.published,
        # Where others have some as well, their `done` may make room.
        is_full=is_full and all(each is consumer for each in state.consumers.values() if each.ended),
    )


def answer_seeding(
    state: RolloutState,
    question: SeedingQuestion,
    models: Models,
    root_of: Callable[[str, int], str],
    *,
    is_watched: bool = False,
) -> SeedingAnswer:
    """Say how long to seed in the step that begins; each step is learnt from once, if leader and trainer saw it whole.

    `root_of` a model and a version: empty where it is not known. `is_watched`: the seeding before did not end by its
    time but as the manager said, so that it is learnt from how long it took.
    """
    consumer = consumer_of(state, question.attachment)
    if consumer is None:
        return SeedingAnswer(error=StaleSender.__name__, message=REPLACED)
    settings = SeedingSettings(gain=question.gain, initial_s=question.initial_s)
    meter, root = models[consumer.model].meter, root_of(consumer.model, question.version)
    # A trainer that asks first has not measured the steps before: those of another process, or without seeding.
    known, step = question.state or first(settings, LOCAL_ENGINES), meter.last
    if question.state is None or step is None or step.version <= known.version:
        return SeedingAnswer(known, root, has_others=bool(meter.instances))
    # Where none was there in the whole step, none has waited for the trainer: the time would fall to nothing else.
    had_none = step.is_steady and not step.instances
    times = StepTimes(
        train_wait_s=question.train_wait_s,
        train_s=max(0.0, step.whole_s - question.train_wait_s - question.seeded_s),
        remote_s=step.remote_s,
        remote_wait_s=0.0 if had_none else step.remote_wait_s,
        remote_units=step.instances / LOCAL_ENGINES,
        is_steady=step.is_steady,
    )
    if is_watched:
        known = replace(known, seed_s=question.seeded_s)
    learnt = after_step(known, times, settings, LOCAL_ENGINES, meter.instances / LOCAL_ENGINES)
    learnt = replace(learnt, version=step.version, train_s=times.train_s)
    return SeedingAnswer(learnt, root, has_others=bool(meter.instances))


def has_ready(state: RolloutState, question: ReadyQuestion) -> bool:
    """Tell whether a question would be answered otherwise than by 'nothing yet'."""
    consumer = consumer_of(state, question.attachment)
    return (
        consumer is None
        or not _open_of(state, consumer, question.groups)
        or next(_ended_behind(state, consumer, question), None) is not None
    )


def _open_of(state: RolloutState, consumer: Consumer, groups: tuple[str, ...] | None) -> int:
    """Return how many requests of these groups are open; None: of all."""
    if groups is None:
        return consumer.open
    places = (consumer.ids[each] for each in groups if each in consumer.ids)
    return sum(state.submissions[submission].groups[index].open for submission, index in places)


def consumer_of(state: RolloutState, attachment: int) -> Consumer | None:
    """Return the consumer whose live attachment this is."""
    return next((each for each in state.consumers.values() if each.attachment == attachment), None)


def _ended_behind(state: RolloutState, consumer: Consumer, question: ReadyQuestion) -> Iterator[EndedRequest]:
    """Yield what ended behind the cursor, by entry and within one by request."""
    cursor = (question.after, question.after_request or RequestId(0, 0))
    newest = next(reversed(consumer.ended), 0)
    if newest < question.after:
        return
    for seq, requests in consumer.ended.items():
        if seq < question.after:
            continue
        for of in sorted(requests):
            if (seq, of) > cursor:
                yield _ended(state, seq, of)


def _ended(state: RolloutState, seq: int, of: RequestId) -> EndedRequest:
    submission = state.submissions[of.submission]
    request = submission.requests[of.index]
    group, end = submission.groups[request.group], request.end
    assert end is not None
    return EndedRequest(
        request=of,
        ended_seq=seq,
        group=group.id,
        index_in_group=of.index - group.first,
        group_size=group.size,
        group_open=group.open,
        prompts=submission.payload,
        group_index=request.group,
        reason=end.reason,
        tokens=end.tokens,
        attempt=end.attempt,
        payload=end.payload,
        index=end.index,
        error=end.error,
        version=group.version,
    )
