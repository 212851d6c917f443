"""The planner's ear: questions in, plans out. I/O only; `plan` decides.

Several planners may run: each follows all logs and any of them answers a question (they are one queue group). A planner
that lags behind the log sequence which a demand names folds on first, for a bounded time, and says so when it can't.
"""

import asyncio
import time
from typing import Final

import msgspec

from tensorhub_common import telemetry
from tensorhub_common.bus.blobs import Blobs
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.message import Message
from tensorhub_common.bus.pings import answer_pings
from tensorhub_common.errors import BadCommand, TensorHubError
from tensorhub_common.layout import Layout
from tensorhub_common.service_manager import serving
from tensorhub_common.subjects import AskSubject, asks_of_all_jobs, parse
from tensorhub_common.wire.asks import Error
from tensorhub_common.wire.transfer import Demand, PlanAnswer, Refusal
from tensorhub_planner.deciding import Question, found_in
from tensorhub_planner.following import Catalogs
from tensorhub_planner.layouts import Layouts
from tensorhub_planner.limits import Limits
from tensorhub_planner.load import Ledger
from tensorhub_planner.metrics import AnswerCounts
from tensorhub_planner.mismatch import explain
from tensorhub_planner.plan import LayoutsDiffer
from tensorhub_planner.tracing import Tracing

ROLE: Final = "planner"
QUEUE: Final = "planners"
"""Of the planners in this queue group one gets each question."""
ASKS_AT_ONCE_MAX: Final = 1024
"""Most of these wait for a log; deciding takes well under a millisecond."""
ASKS_PENDING_MAX: Final = 8192

_demands: Final = msgspec.json.Decoder(Demand)
_log: Final = telemetry.logger(__name__)


class Planner:
    """Answers `ask.plan` of every job."""

    def __init__(self, bus: Bus, limits: Limits, name: str) -> None:
        self._bus = bus
        self._limits = limits
        self._name = name
        self.counts = AnswerCounts()
        self._ledger = Ledger(limits)
        self._tracing = Tracing()
        self._layouts = Layouts(Blobs(bus))
        self._catalogs = Catalogs(bus, self._ledger.see)

    async def run(self) -> None:
        """Follow the logs, answer questions, say that we live, and go on. Raises what makes going on impossible."""
        self._catalogs.start()
        await self._bus.serve(
            asks_of_all_jobs("plan"),
            self.answer,
            queue=QUEUE,
            concurrent_max=ASKS_AT_ONCE_MAX,
            pending_max=ASKS_PENDING_MAX,
        )
        await answer_pings(self._bus, self._name, ROLE)
        _log.info("ready")
        async with serving(f"planner {self._name} answers"):
            await self._catalogs.broken

    async def close(self) -> None:
        """Follow nothing any more; the questions end with the connection."""
        await self._catalogs.stop()
        self._tracing.close()

    async def answer(self, question: Message) -> bytes:
        """Return the plan, the refusal or the error for one question."""
        began = time.monotonic()
        with self._tracing.asked(question) as asked:
            try:
                answer: PlanAnswer | Error = await self._answer(question)
            except TensorHubError as error:
                answer = Error(error=_code(error), message=str(error))
            asked.answer = answer
        self.counts.add(answer, time.monotonic() - began)
        return msgspec.json.encode(answer)

    async def _answer(self, question: Message) -> PlanAnswer:
        subject = parse(question.subject)
        if not isinstance(subject, AskSubject) or subject.job is None:
            raise BadCommand(f"a plan belongs to a job, so it can't be asked for on {question.subject}")
        try:
            demand = _demands.decode(question.data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as why:
            raise BadCommand(f"the question is no demand: {why}"[:500]) from None
        try:
            return await self._plan(subject.job, demand)
        except TensorHubError as why:
            # Whoever has sent a good demand gets a Refusal, of which its read knows what to do next.
            return Refusal(error=_code(why), reason=str(why))

    async def _plan(self, job: str, demand: Demand) -> PlanAnswer:
        found = found_in(await self._catalogs.at(job, demand.at_seq), demand, self._limits)
        if isinstance(found, Refusal):
            return found
        sizes = await self._layouts.sizes(job, found.seat.layout)
        answer = Question(job, demand, found, sizes).decide(self._ledger, self._limits, time.monotonic())
        if isinstance(answer, LayoutsDiffer):
            return await self._mismatch(job, demand, answer)
        return answer

    async def _mismatch(self, job: str, demand: Demand, differ: LayoutsDiffer) -> Refusal:
        mine, theirs = [await self._layout(job, digest) for digest in (differ.seat.layout, differ.holder.layout)]
        return await asyncio.to_thread(explain, demand, differ, mine, theirs)

    async def _layout(self, job: str, digest: str) -> Layout | None:
        """Return a layout, or None: a refusal that names no tensors is better than none."""
        try:
            return await self._layouts.layout(job, digest)
        except TensorHubError as why:
            _log.warning("a layout can't be compared", job=job, layout=digest, why=str(why))
            return None


def _code(error: TensorHubError) -> str:
    """Name an error by the class that everybody knows: the bus has narrower ones of its own."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == TensorHubError.__module__)
