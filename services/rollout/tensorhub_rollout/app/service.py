"""A rollout manager on the bus: follows the rollouts of all jobs, and while it has the lease leads them.

Several managers may run. All fold, and one leads. What runners say and what the SDK asks is subscribed to only while
leading, so where no manager leads NATS itself answers that there is no responder.

Invariants:
- A job that can't go on affects no other: it is set aside, and followed anew after a while.
- An error that escapes anywhere else ends the process, which is started again. The log has all that it must know.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from secrets import token_hex
from typing import Final, TypeVar

import msgspec

from tensorhub_common.auth.permissions import ROLLOUT_BUCKET
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import UNCERTAIN
from tensorhub_common.bus.message import Message
from tensorhub_common.bus.request_server import RequestService
from tensorhub_common.config.settings import Settings
from tensorhub_common.errors import BadCommand, RolloutUnavailable, TensorHubError, public_code
from tensorhub_common.introspection.ping import answer_pings
from tensorhub_common.jetstream.leader_lease import LeaderLease
from tensorhub_common.log_follower.job_list import JobList
from tensorhub_common.log_follower.set_aside import RetryLimits, SetAside, set_aside
from tensorhub_common.observability.logs import logger
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.queries import QueryError
from tensorhub_common.protocol.rollout.messages import Frame, Report, RunnerHeartbeat
from tensorhub_common.protocol.rollout.questions import (
    FollowQuestion,
    OutcomeQuestion,
    ReadyQuestion,
    SeedingQuestion,
    WhyQuestion,
)
from tensorhub_common.runtime.supervision import Fault, Supervisor
from tensorhub_common.service.systemd import serving
from tensorhub_rollout.core.leader import LeaderLimits
from tensorhub_rollout.core.leader_events import (
    AnswerFrame,
    AnswerHeartbeat,
    AnswerReport,
    FrameCame,
    HeartbeatCame,
    LeaderInput,
    ReportCame,
)
from tensorhub_rollout.decisions.decisions import PolicyLimits
from tensorhub_rollout.jobs.job import RolloutJob
from tensorhub_rollout.policy.scale import ScaleLimits

ROLE: Final = "rollout"
LEASE_KEY: Final = "rollout"
JOBS_MAX: Final = 256
"""Limit of the jobs that a manager follows."""
LIST_AGAIN_S: Final = 0.5
"""The pause before jobs are listed again, after NATS gave no answer."""
RETRY: Final = RetryLimits(first_s=1.0, max_s=60.0)
"""When a job is followed anew that could not go on."""
FIRST_LEASE_WAIT_S: Final = 1.0
"""A manager says that it is ready once it leads, or once it has become clear that another one does."""
QUESTIONS_AT_ONCE_MAX: Final = 1024
QUESTIONS_PENDING_MAX: Final = 8192
QUESTION_AGE_S_MAX: Final = 3.0
RUNNER_MESSAGES_PENDING_MAX: Final = 8192
RUNNER_MESSAGE_AGE_S_MAX: Final = 0.5
"""What is older was sent again."""

_JOB_TOKEN: Final = 2
_RUNNER_TOKEN: Final = 5
_SILENCE: Final = b""

_log: Final = logger(__name__)

Question = TypeVar("Question")


class RolloutManager:
    """One manager on one connection: `run`, and then `close`."""

    def __init__(self, bus: Bus, settings: Settings) -> None:
        self.id = settings.rollout_id
        self.jobs: dict[str, RolloutJob] = {}
        self._bus = bus
        self._process = f"{self.id}.{token_hex(8)}"
        self._work = Supervisor(f"rollout manager {self.id!r}")
        self._lease = LeaderLease(
            bus,
            LEASE_KEY,
            self.id,
            settings.leader_ttl_s,
            bucket=ROLLOUT_BUCKET,
            replicas=settings.log_replicas,
            on_change=self._work.guarded(self._on_lease, "a change of the lease"),
        )
        self._limits = LeaderLimits()
        scale = ScaleLimits(window_s=settings.rollout_scale_window_s)
        self._policies = PolicyLimits(scale=scale).without(settings.rollout_terms_off)
        self._job_list = JobList(bus, self._work, self._take_list, LIST_AGAIN_S, UNCERTAIN)
        self._aside: dict[str, SetAside] = {}
        """Jobs that could not go on, until they have gone on for long enough."""
        self._running: dict[str, asyncio.Task[None]] = {}
        self._services: list[RequestService] = []
        self._stale = 0
        """Of subscriptions that have ended."""
        self._lease_changed = asyncio.Event()
        self._encoder, self._frames = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Frame)
        self._reports, self._beats = msgspec.msgpack.Decoder(Report), msgspec.msgpack.Decoder(RunnerHeartbeat)

    # ------------------------------------------------------------------------------------------ from outside

    async def run(self) -> None:
        """Follow all jobs, ask for the lease, answer pings, and go on until cancelled."""
        self._bus.watch(self._work.guarded(self._on_connection, "a change of the connection"))
        self._work.start(self._job_list.watch(), "looking for jobs")
        self._work.start(self._subscribe_while_leading(), "listening to runners and trainers")
        await self._lease.start()
        await self._lease.wait(held=True, timeout_s=FIRST_LEASE_WAIT_S)
        await answer_pings(self._bus, self.id, ROLE)
        async with serving(f"rollout manager {self.id} serves"):
            _log.info("ready", leads=self._lease.held, jobs=len(self.jobs))
            await asyncio.Event().wait()

    @property
    def leads(self) -> bool:
        """Whether this manager has the lease."""
        return self._lease.held

    @property
    def stopped(self) -> int:
        """How many jobs it can't go on with now."""
        return len(self._aside.keys() - self.jobs.keys())

    @property
    def stale(self) -> int:
        """How many messages were too old when their turn came."""
        return self._stale + sum(each.stale for each in list(self._services))

    async def close(self) -> None:
        """Lead no more, give the lease back so that another manager may lead at once, and end."""
        for job in self.jobs.values():
            job.stand_down()
        await self._lease.close()
        await self._work.close()
        await asyncio.gather(*(job.close() for job in self.jobs.values()))

    # ------------------------------------------------------------------------------------------ leading

    def _on_lease(self, held: bool) -> None:  # noqa: FBT001 (the lease calls it so)
        _log.info("has the lease" if held else "has the lease no more", term=self._lease.term)
        for job in self.jobs.values():
            if held:
                job.lead()
            else:
                job.stand_down()
        self._lease_changed.set()

    def _on_connection(self, connected: bool) -> None:  # noqa: FBT001 (the bus calls it so)
        for job in self.jobs.values():
            job.on_connection(is_connected=connected)

    async def _subscribe_while_leading(self) -> None:
        while True:
            await self._lease_changed.wait()
            self._lease_changed.clear()
            if self._lease.held and not self._services:
                await self._subscribe()
            elif not self._lease.held:
                for service in self._services:
                    await service.close()
                self._stale = self.stale
                self._services.clear()

    async def _subscribe(self) -> None:
        for what, on_message in (("beat", self._on_beat), ("report", self._on_report), ("tokens", self._on_frame)):
            self._services.append(
                await self._bus.serve(
                    subjects.from_runners_of_all_jobs(what),
                    on_message,
                    pending_max=RUNNER_MESSAGES_PENDING_MAX,
                    age_s_max=RUNNER_MESSAGE_AGE_S_MAX,
                )
            )
        asks: dict[str, Callable[[Message], Awaitable[bytes]]] = {
            "follow": self._on_follow,
            "outcome": self._on_outcome,
            "ready": self._on_ready,
            "seeding": self._on_seeding,
            "status": self._on_status,
            "why": self._on_why,
        }
        for what, on_question in asks.items():
            self._services.append(
                await self._bus.serve(
                    subjects.rollout_asks_of_all_jobs(what),
                    on_question,
                    concurrent_max=QUESTIONS_AT_ONCE_MAX,
                    pending_max=QUESTIONS_PENDING_MAX,
                    age_s_max=QUESTION_AGE_S_MAX,
                )
            )

    # ------------------------------------------------------------------------------------------ runners

    async def _on_beat(self, message: Message) -> bytes:
        try:
            beat = self._beats.decode(message.data)
        except MALFORMED:
            return _SILENCE
        return self._answer_to(message, HeartbeatCame(_runner_of(message), beat))

    async def _on_report(self, message: Message) -> bytes:
        try:
            report = self._reports.decode(message.data)
        except MALFORMED:
            return _SILENCE
        return self._answer_to(message, ReportCame(_runner_of(message), report))

    async def _on_frame(self, message: Message) -> bytes:
        try:
            frame = self._frames.decode(message.data)
        except MALFORMED:
            return _SILENCE
        return self._answer_to(message, FrameCame(_runner_of(message), frame))

    def _answer_to(self, message: Message, event: LeaderInput) -> bytes:
        """Return what the job's leader answers; nothing where this manager does not lead it."""
        job = self.jobs.get(message.subject.split(".")[_JOB_TOKEN])
        if job is None or not self._lease.held:
            return _SILENCE
        for effect in job.tell(event):
            if isinstance(effect, AnswerFrame | AnswerReport | AnswerHeartbeat):
                return self._encoder.encode(effect.result)
        return _SILENCE

    # ------------------------------------------------------------------------------------------ the SDK

    async def _on_follow(self, message: Message) -> bytes:
        return await _answered(message, FollowQuestion, lambda question: self._job_of(message).follow(question))

    async def _on_outcome(self, message: Message) -> bytes:
        return await _answered(message, OutcomeQuestion, lambda question: self._job_of(message).outcome(question))

    async def _on_ready(self, message: Message) -> bytes:
        return await _answered(message, ReadyQuestion, lambda question: self._job_of(message).ready(question))

    async def _on_seeding(self, message: Message) -> bytes:
        return await _answered(message, SeedingQuestion, lambda question: self._job_of(message).seeding(question))

    async def _on_status(self, message: Message) -> bytes:
        try:
            answer: msgspec.Struct = self._job_of(message).status()
        except TensorHubError as why:
            answer = QueryError(error=public_code(why), message=str(why))
        return msgspec.json.encode(answer)

    async def _on_why(self, message: Message) -> bytes:
        return await _answered(message, WhyQuestion, lambda question: self._job_of(message).why(question))

    def _job_of(self, message: Message) -> RolloutJob:
        name = message.subject.split(".")[_JOB_TOKEN]
        job = self.jobs.get(name)
        if job is None:
            raise RolloutUnavailable(f"manager {self.id!r} does not follow job {name!r} yet: ask again")
        if not self._lease.held:
            raise RolloutUnavailable(f"manager {self.id!r} does not lead: ask again")
        return job

    # ------------------------------------------------------------------------------------------ jobs

    def _take_list(self, listed: Collection[str], _: float) -> None:
        """Follow the jobs that have a log, and leave those whose log is gone."""
        for gone in self.jobs.keys() - set(listed):
            self._end(gone)
        now = time.monotonic()
        for name in sorted(listed):
            aside = self._aside.get(name)
            if name in self.jobs or len(self.jobs) >= JOBS_MAX or (aside is not None and now < aside.again_at):
                continue
            self._follow(name)

    def _follow(self, name: str) -> None:
        job = self.jobs[name] = RolloutJob(self._bus, name, self._process, self._limits, self._policies)
        if self._lease.held:
            job.lead()

        def leave(fault: Fault) -> None:
            before, now = self._aside.get(name), time.monotonic()
            self._aside[name] = set_aside(
                before,
                job.state.seq,
                now,
                RETRY,
                has_recovered=before is None or job.state.seq > before.seq or before.has_lasted(now),
            )
            _log.error("the job is set aside", job=name, why=repr(fault.error))
            self._end(name)

        self._running[name] = self._work.start(job.run(), f"following the rollouts of job {name!r}", on_fault=leave)

    def _end(self, name: str) -> None:
        self._running.pop(name).cancel()
        self._work.start(self.jobs.pop(name).close(), "leaving a job")


def _runner_of(message: Message) -> str:
    return message.subject.split(".")[_RUNNER_TOKEN]


async def _answered(
    message: Message, kind: type[Question], answer: Callable[[Question], Awaitable[msgspec.Struct]]
) -> bytes:
    """Return the answer to a question, or the error that was raised."""
    try:
        try:
            question = msgspec.json.decode(message.data, type=kind)
        except MALFORMED as why:
            raise BadCommand(f"the question can't be read: {why}"[:500]) from None
        said = await answer(question)
    except TensorHubError as why:
        said = QueryError(error=public_code(why), message=str(why))
    return msgspec.json.encode(said)
