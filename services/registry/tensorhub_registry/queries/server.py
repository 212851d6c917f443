"""The questions that the leading registry answers: opening a job, and what its catalog and its history say.

The subjects are subscribed to only while leading, so where no registry leads NATS itself answers at once that there is
no responder. A reply is one JSON object: the answer, or a `QueryError`.

Invariants:
- An answer comes from a fold that has read the log as it was when this registry began to lead, and that leads at the
  moment of the answer. A registry that was stopped for longer than its lease does not answer.
- Questions about one job do not wait for those about another: each job has bounds of its own.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol, TypeVar
from weakref import WeakSet

import msgspec

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import NotPermitted
from tensorhub_common.bus.message import Message
from tensorhub_common.bus.request_server import CONCURRENT_MAX, PENDING_MAX, RequestServer
from tensorhub_common.bus.subscription import Subscription
from tensorhub_common.errors import BadCommand, TensorHubError, VersionUnavailable, gone
from tensorhub_common.observability import logs
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL
from tensorhub_common.protocol.queries import (
    STORY_LINES_MAX,
    Health,
    JobForgotten,
    JobOpened,
    ModelAsk,
    OpenAsk,
    Outcome,
    OutcomeAsk,
    Pong,
    QueryError,
    Replicas,
    Status,
    Story,
    StoryAsk,
    Versions,
)
from tensorhub_registry.jobs.job import Job
from tensorhub_registry.queries import views
from tensorhub_registry.queries.version_history import story

READY_WAIT_S_MAX: Final = 5.0
"""A question that comes while the log is still being read waits at most so long for its answer."""

BEGIN_WAIT_S_MAX: Final = 2.0
"""An open is answered once the job's log has begun, so that the next command is folded at the job's level; after this
time in any case."""
RAISE_S_MAX: Final = 5.0
"""A job is raised within this, or there is no answer; asked again, it says how far it is."""

OPEN: Final = "open"
FORGET: Final = "forget"
OUTCOME: Final = "outcome"
HEALTH: Final = "health.registry"

_SILENCE: Final = b""
_JOB_TOKEN: Final = 2
_NEW: Final = ""
"""Questions about jobs that are not known here share this name's bounds; no job has it."""

Ask = TypeVar("Ask")
Answer = Callable[[Job, Message], msgspec.Struct]
Behind = Callable[[int], Awaitable[list[Pong]]]
"""Returns the registries and planners that can't fold a level."""

_log: Final = logs.logger(__name__)


class JobDirectory(Protocol):
    """The jobs of a registry."""

    jobs: dict[str, Job]

    async def find(self, name: str) -> Job:
        """Return a job that is folded here, or was set aside; raise where there is none."""
        ...

    async def open(self, name: str) -> Job:
        """Return the job, which is made where there is none."""
        ...

    async def forget(self, job: Job) -> None:
        """Remove what is left of a deleted job."""
        ...

    def health_of(self, job: Job) -> Health:
        """Say how one job gets on."""
        ...

    def health(self) -> Health:
        """Name the jobs that are not well."""
        ...


class QueryServer:
    """Answers while subscribed. A handler is called only for a job that is ready."""

    def __init__(
        self, bus: Bus, registry: str, jobs: JobDirectory, holds_lease: Callable[[], bool], behind: Behind
    ) -> None:
        self._bus, self._registry, self._jobs = bus, registry, jobs
        self._holds_lease, self._behind = holds_lease, behind
        self._answering: dict[str, RequestServer] = {}
        """By job."""
        self._left: WeakSet[RequestServer] = WeakSet()
        """Of jobs that are gone, with questions in progress: to forget a job is one."""
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
        for what in (OPEN, FORGET, HEALTH, *self._answers):
            subject = subjects.asks_of_all_jobs(what)
            try:
                self._subscriptions.append(await self._bus.subscribe(subject, self._take))
            except NotPermitted as why:
                if what != HEALTH:
                    raise
                # The permissions are of a release that did not know this question. The others work.
                _log.warning("the health of jobs can't be asked for", why=str(why))

    async def unsubscribe(self) -> None:
        """Answer nothing more."""
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.close()
        answering = [*self._answering.values(), *self._left]
        self._answering.clear()
        await asyncio.gather(*(each.stop() for each in answering))

    def drop(self, job: str) -> None:
        """The job is gone from here. Questions in progress are still answered."""
        answering = self._answering.pop(job, None)
        if answering is not None:
            self._left.add(answering)

    def _take(self, question: Message) -> None:
        name = question.subject.split(".")[_JOB_TOKEN]
        name = name if name in self._jobs.jobs else _NEW
        answering = self._answering.get(name)
        if answering is None:
            answering = self._answering[name] = RequestServer(
                self._reply_to, self._respond, self._bus.work, concurrent_max=CONCURRENT_MAX, pending_max=PENDING_MAX
            )
        answering.take(question)

    async def _respond(self, question: Message, body: bytes, headers: Mapping[str, str]) -> None:
        if body != _SILENCE and self._holds_lease():
            await self._bus.publish(question.reply, body, headers)

    async def _reply_to(self, question: Message) -> bytes:
        try:
            answer = await self._answer(question)
        except TensorHubError as no:
            answer = QueryError(error=no.code, message=str(no))
        return _SILENCE if answer is None else msgspec.json.encode(answer)

    async def _answer(self, question: Message) -> msgspec.Struct | None:
        ask = subjects.parse_subject(question.subject)
        if not isinstance(ask, subjects.AskSubject):
            raise BadCommand(f"there is nothing to be asked on {question.subject}")
        if ask.what == HEALTH:
            return self._jobs.health() if ask.job is None else self._jobs.health_of(await self._jobs.find(ask.job))
        if ask.job is None:
            raise BadCommand(f"a question belongs to a job, so it can't be asked on {question.subject}")
        if ask.what == OPEN:
            return await self._opened(await self._jobs.open(ask.job), question)
        job = await self._jobs.find(ask.job)
        if not await job.is_ready(READY_WAIT_S_MAX) and job.failure is None:
            return None
        job.refuse()
        if ask.what == FORGET:
            return await self._forgotten(job)
        if job.is_deleted and ask.what != OUTCOME:
            raise gone(job.name)
        return self._answers[ask.what](job, question)

    async def _opened(self, job: Job, question: Message) -> JobOpened | None:
        level = (_read(question, OpenAsk) if question.data else OpenAsk()).level
        if level <= 0:
            await job.has_begun(BEGIN_WAIT_S_MAX)
            return JobOpened(job=job.name)
        if level > NEWEST_LEVEL:
            raise BadCommand(
                f"level {level} is not known to the leading registry {self._registry!r}, which folds levels up to "
                f"{int(NEWEST_LEVEL)}: upgrade the registries first"
            )
        if not await job.is_ready(READY_WAIT_S_MAX):
            return None
        behind = await self._behind(level)
        if behind:
            named = ", ".join(f"{each.role} {each.id} (release {each.release}, level {each.level})" for each in behind)
            raise BadCommand(f"job {job.name!r} can't be raised to level {level}, which {named} can't fold: upgrade it")
        if not await job.raise_to(level, RAISE_S_MAX):
            return None
        return JobOpened(job=job.name, level=job.fold.catalog.level)

    async def _forgotten(self, job: Job) -> JobForgotten:
        if not job.is_deleted:
            raise BadCommand(f"job {job.name!r} is not deleted: 'tensorhub delete --job {job.name}' does that first")
        await self._jobs.forget(job)
        return JobForgotten(job=job.name)

    def _status(self, job: Job, _: Message) -> Status:
        return views.status(job.fold.catalog, job.fold.seq, self._registry, job.claim.term or job.term or 0)


def _versions(job: Job, question: Message) -> Versions:
    return views.versions(job.fold.catalog, _read(question, ModelAsk).model)


def _replicas(job: Job, question: Message) -> Replicas:
    return views.replicas(job.fold.catalog, _read(question, ModelAsk).model)


def _outcome(job: Job, question: Message) -> Outcome:
    seq = _read(question, OutcomeAsk).seq
    events = job.fold.history.outcome(seq)
    if events is not None:
        return Outcome(seq=seq, events=events)
    if job.fold.is_pending(seq):
        return Outcome(seq=seq, events=())
    if seq <= job.fold.history.forgotten:
        raise VersionUnavailable(f"the outcome of command {seq} is too old to be remembered: read it in the log")
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
