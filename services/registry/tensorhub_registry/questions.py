"""The questions that the leading registry answers: opening a job, and what its catalog and its history say.

The subjects are subscribed to only while leading, so where no registry leads NATS itself tells the asker at once that
nobody listens. A reply is one JSON object: the answer, or an `Error`. Always true: an answer comes from a fold that has
read all that stood in the log when this registry began to lead, and that leads at the moment of the answer: one that
was asleep for longer than its lease keeps silent, whatever it was asked meanwhile. In doubt there is no answer.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeVar

import msgspec

from tensorhub_common import subjects
from tensorhub_common.bus.answering import CONCURRENT_MAX, PENDING_MAX, Answering
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.message import Message
from tensorhub_common.bus.subscription import Subscription
from tensorhub_common.catalog.story import story
from tensorhub_common.errors import BadCommand, RegistryUnavailable, TensorHubError, VersionUnavailable, gone
from tensorhub_common.malformed import MALFORMED
from tensorhub_common.wire.asks import (
    STORY_LINES_MAX,
    Error,
    JobForgotten,
    JobOpened,
    ModelAsk,
    Outcome,
    OutcomeAsk,
    Replicas,
    Status,
    Story,
    StoryAsk,
    Versions,
)
from tensorhub_registry import answers
from tensorhub_registry.job import Job

READY_WAIT_S_MAX: Final = 5.0
"""A question that comes while the log is still being read waits at most so long for its answer."""

OPEN: Final = "open"
FORGET: Final = "forget"
OUTCOME: Final = "outcome"

_SILENCE: Final = b""

Ask = TypeVar("Ask")
FindJob = Callable[[str], Awaitable[Job]]
"""Returns a job that is being folded; raises where there is none."""
Forget = Callable[[Job], Awaitable[None]]
"""Removes what is left of a deleted job."""
OpenTheJob = Callable[[str], Awaitable[Job]]
Answer = Callable[[Job, Message], msgspec.Struct]


class Questions:
    """Answers while subscribed. A handler is called only for a job that is ready."""

    def __init__(
        self,
        bus: Bus,
        registry: str,
        find: FindJob,
        open_the_job: OpenTheJob,
        forget: Forget,
        holds_lease: Callable[[], bool],
    ) -> None:
        self._bus = bus
        self._holds_lease = holds_lease
        self._registry = registry
        self._find = find
        self._open_the_job = open_the_job
        self._forget = forget
        self._answering = Answering(
            self._reply_to, self._respond, concurrent_max=CONCURRENT_MAX, pending_max=PENDING_MAX
        )
        self._subscriptions: list[Subscription] = []
        self._answers: Mapping[str, Answer] = {
            "versions": _versions,
            "replicas": _replicas,
            "status": self._status,
            OUTCOME: _outcome,
            "story": _story,
        }

    async def subscribe(self) -> None:
        """Answer from now on."""
        if self._subscriptions:
            return
        for what in (OPEN, FORGET, *self._answers):
            subject = subjects.asks_of_all_jobs(what)
            self._subscriptions.append(await self._bus.subscribe(subject, self._answering.take))

    async def unsubscribe(self) -> None:
        """Answer nothing more."""
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.close()
        await self._answering.stop()

    async def _respond(self, question: Message, body: bytes, headers: Mapping[str, str]) -> None:
        if body != _SILENCE and self._holds_lease():
            await self._bus.publish(question.reply, body, headers)

    async def _reply_to(self, question: Message) -> bytes:
        try:
            answer = await self._answer(question)
        except TensorHubError as no:
            answer = Error(error=no.code, message=str(no))
        return _SILENCE if answer is None else msgspec.json.encode(answer)

    async def _answer(self, question: Message) -> msgspec.Struct | None:
        ask = subjects.parse(question.subject)
        if not isinstance(ask, subjects.AskSubject) or ask.job is None:
            raise BadCommand(f"a question belongs to a job, so it can't be asked on {question.subject}")
        if ask.what == OPEN:
            return JobOpened(job=(await self._open_the_job(ask.job)).name)
        job = await self._find(ask.job)
        if not await job.is_ready(READY_WAIT_S_MAX) and job.failure is None:
            return None
        if job.failure is not None:
            raise RegistryUnavailable(f"job {job.name!r} is stopped, since {job.failure}")
        if ask.what == FORGET:
            return await self._forgotten(job)
        if job.is_deleted and ask.what != OUTCOME:
            raise gone(job.name)
        return self._answers[ask.what](job, question)

    async def _forgotten(self, job: Job) -> JobForgotten:
        if not job.is_deleted:
            raise BadCommand(f"job {job.name!r} is not deleted: 'tensorhub delete --job {job.name}' does that first")
        await self._forget(job)
        return JobForgotten(job=job.name)

    def _status(self, job: Job, _: Message) -> Status:
        return answers.status(job.fold.catalog, job.fold.seq, self._registry, job.claim.term or job.term or 0)


def _versions(job: Job, question: Message) -> Versions:
    return answers.versions(job.fold.catalog, _read(question, ModelAsk).model)


def _replicas(job: Job, question: Message) -> Replicas:
    return answers.replicas(job.fold.catalog, _read(question, ModelAsk).model)


def _outcome(job: Job, question: Message) -> Outcome:
    seq = _read(question, OutcomeAsk).seq
    events = job.fold.history.outcome(seq)
    if events is not None:
        return Outcome(seq=seq, events=events)
    if job.fold.is_pending(seq):
        return Outcome(seq=seq, events=())
    if seq <= job.fold.history.forgotten:
        raise VersionUnavailable(f"the outcome of command {seq} is too long ago to be remembered: read it in the log")
    raise BadCommand(f"entry {seq} of the log is no command: ask with the sequence that acknowledged yours")


def _story(job: Job, question: Message) -> Story:
    ask = _read(question, StoryAsk)
    lines = list(story(job.fold.history.events(), ask.model, ask.version))
    return Story(lines=tuple(lines[-STORY_LINES_MAX:]))


def _read(question: Message, kind: type[Ask]) -> Ask:
    try:
        return msgspec.json.decode(question.data, type=kind)
    except MALFORMED as why:
        raise BadCommand(f"the question on {question.subject} can't be read: {why}"[:500]) from None
