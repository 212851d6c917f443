"""The planner on the bus: requests in, plans out. I/O only; `planning.request` decides.

Several planners may run: each follows all logs, and one of them answers a request (they are one queue group). A planner
whose fold is behind the log sequence that a request names folds on first, for a bounded time, and refuses after it.
"""

import asyncio
import contextlib
import time
from typing import Final

import msgspec

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import NotPermitted
from tensorhub_common.bus.message import Message
from tensorhub_common.errors import BadCommand, TensorHubError, public_code
from tensorhub_common.introspection.ping import answer_follower_survey, answer_pings
from tensorhub_common.jetstream.blob_store import BlobStore
from tensorhub_common.observability import logs
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.log.events import Event
from tensorhub_common.protocol.plans import PLAN_ASK_S, PlanAnswer, PlanRequest, Refusal, packed
from tensorhub_common.protocol.queries import HEALTH_JOBS_MAX, Health, QueryError
from tensorhub_common.protocol.subjects import AskSubject, asks_of_all_jobs, hub_ask, parse_subject
from tensorhub_common.runtime.supervision import Supervisor, log_only
from tensorhub_common.service.systemd import serving
from tensorhub_planner.app.metrics import AnswerCounts
from tensorhub_planner.app.request_spans import RequestSpans
from tensorhub_planner.context.catalogs import CatalogReplicas
from tensorhub_planner.context.job_context import BusJobContext
from tensorhub_planner.context.layout_store import LayoutStore
from tensorhub_planner.context.load_subscriber import LoadSubscriber
from tensorhub_planner.context.prefetch import ProgramPrefetcher
from tensorhub_planner.context.program_store import ProgramStore
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.planning.plan_cache import PlanCache
from tensorhub_planner.planning.request import DemandPlanner
from tensorhub_planner.primitives.limits import PlanLimits

ROLE: Final = "planner"
QUEUE: Final = "planners"
"""One of the planners in this queue group gets each request."""
ASKS_AT_ONCE_MAX: Final = 1024
"""Most of these wait for a log; deciding takes well under a millisecond."""
ASKS_PENDING_MAX: Final = 8192

_demands: Final = msgspec.json.Decoder(PlanRequest)
_log: Final = logs.logger(__name__)


class PlannerService:
    """Answers `ask.plan` of every job."""

    def __init__(self, bus: Bus, limits: PlanLimits, name: str) -> None:
        self._bus = bus
        self._limits = limits
        self._name = name
        self.counts = AnswerCounts()
        self.ledger = LoadLedger(limits)
        self._plan_cache = PlanCache()
        self._spans = RequestSpans()
        self._work = Supervisor("the planner", on_fault=log_only)
        blobs = BlobStore(bus)
        self._layouts = LayoutStore(blobs, self._work)
        self._programs = ProgramStore(blobs, self._layouts, self._work)
        self._load_subscriber = LoadSubscriber(bus, self.ledger)
        self._catalogs = CatalogReplicas(bus, self._see, self._forget)
        self._prefetcher = ProgramPrefetcher(self._programs, self._catalogs.folded, self._work)

    async def run(self) -> None:
        """Follow the logs, answer requests and pings, and go on until cancelled."""
        await answer_follower_survey(self._bus, self._name, ROLE)
        self._catalogs.start()
        # Before the first request: current reads were planned by others, or by this planner before it was killed.
        await self._load_subscriber.start()
        await self._bus.serve(
            asks_of_all_jobs("plan"),
            self.answer,
            queue=QUEUE,
            concurrent_max=ASKS_AT_ONCE_MAX,
            pending_max=ASKS_PENDING_MAX,
            age_s_max=PLAN_ASK_S,
        )
        for subject in (asks_of_all_jobs("health.planner"), hub_ask("health.planner")):
            # Users of NATS that an earlier release made do not let it answer; the bus has logged what to do.
            with contextlib.suppress(NotPermitted):
                await self._bus.serve(subject, self._on_health_ask, queue=QUEUE)
        await answer_pings(self._bus, self._name, ROLE)
        _log.info("ready")
        async with serving(f"planner {self._name} answers"):
            await asyncio.Event().wait()

    async def close(self) -> None:
        """Stop following; requests end with the connection."""
        await self._work.close()
        await self._catalogs.stop()
        self._spans.close()

    async def _on_health_ask(self, question: Message) -> bytes:
        """Return the health of one job, or of all that are not healthy; those that are due are tried again."""
        subject = parse_subject(question.subject)
        ailing = self._catalogs.ailing
        asked = subject.job if isinstance(subject, AskSubject) else None
        jobs = ailing[:HEALTH_JOBS_MAX] if asked is None else [asked]
        jobs_health = tuple(self._catalogs.health(job) for job in jobs)
        self._catalogs.try_due()
        return msgspec.json.encode(Health(id=self._name, role=ROLE, ailing=len(ailing), jobs=jobs_health))

    def _see(self, job: str, seq: int, event: Event) -> None:
        self.ledger.see(job, seq, event)
        self._prefetcher.see(job, event)

    def _forget(self, job: str) -> None:
        self.ledger.ended.forget(job)
        self._programs.forget(job)

    async def answer(self, question: Message) -> bytes:
        """Return the plan, the refusal or the error for one question."""
        began = time.monotonic()
        packs = False
        with self._spans.asked(question) as asked:
            try:
                job, demand = self._demand(question)
                packs = demand.packs
                answer: PlanAnswer | QueryError = await self._answer(job, demand)
            except TensorHubError as error:
                answer = QueryError(error=public_code(error), message=str(error))
            asked.answer = answer
        self.counts.add(answer, time.monotonic() - began)
        message = msgspec.json.encode(answer)
        return packed(message) if packs else message

    def _demand(self, question: Message) -> tuple[str, PlanRequest]:
        subject = parse_subject(question.subject)
        if not isinstance(subject, AskSubject) or subject.job is None:
            raise BadCommand(f"a plan belongs to a job, so it can't be asked for on {question.subject}")
        try:
            return subject.job, _demands.decode(question.data)
        except MALFORMED as why:
            raise BadCommand(f"the question is no demand: {why}"[:500]) from None

    async def _answer(self, job: str, demand: PlanRequest) -> PlanAnswer:
        try:
            return await self._answering(job).answer(demand)
        except TensorHubError as why:
            # The sender of a valid request gets a Refusal, which tells its read what to do next.
            return Refusal(error=public_code(why), reason=str(why))

    def _answering(self, job: str) -> DemandPlanner:
        known = BusJobContext(job, self._catalogs, self._layouts, self._programs, self._load_subscriber)
        return DemandPlanner(job, known, self.ledger, self._limits, self._plan_cache)
