"""The planner's ear: questions in, plans out. I/O only; `plan` decides.

Several planners may run: each follows all logs and any of them answers a question (they are one queue group). A planner
that lags behind the log sequence which a demand names folds on first, for a bounded time, and says so when it can't.
"""

import time
from typing import Final

import msgspec

from tensorhub_common import telemetry
from tensorhub_common.bus.blobs import Blobs
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.message import Message
from tensorhub_common.bus.pings import answer_pings
from tensorhub_common.errors import BadCommand, LayoutMismatch, TensorHubError
from tensorhub_common.service_manager import serving
from tensorhub_common.subjects import AskSubject, asks_of_all_jobs, parse
from tensorhub_common.wire.asks import Error
from tensorhub_common.wire.transfer import Demand, PlanAnswer, Refusal
from tensorhub_planner.compiling import SourceSet
from tensorhub_planner.deciding import Question, found_in
from tensorhub_planner.following import Catalogs
from tensorhub_planner.hearing import Hearing
from tensorhub_planner.layouts import Layouts
from tensorhub_planner.limits import Limits
from tensorhub_planner.load import Ledger
from tensorhub_planner.metrics import AnswerCounts
from tensorhub_planner.plan import LayoutsDiffer
from tensorhub_planner.programs import Compiled, Programs
from tensorhub_planner.ranges import count_of, normal
from tensorhub_planner.resharding import (
    cannot_be_filled,
    in_units,
    nobody_has_it,
    reads_by_program,
    source_set,
    turns_to_program,
)
from tensorhub_planner.sources import Found, registered_layouts
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
        self.ledger = Ledger(limits)
        self._tracing = Tracing()
        blobs = Blobs(bus)
        self._layouts = Layouts(blobs)
        self._programs = Programs(blobs, self._layouts)
        self._hearing = Hearing(bus, self.ledger)
        self._catalogs = Catalogs(bus, self.ledger.see)

    async def run(self) -> None:
        """Follow the logs, answer questions, say that we live, and go on. Raises what makes going on impossible."""
        self._catalogs.start()
        # Before the first question: what is under way was planned by others, or by this planner before it was killed.
        await self._hearing.start()
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
        await self._hear_sources(found)
        if not reads_by_program(demand):
            sizes = await self._layouts.sizes(job, found.seat.layout)
            answer = Question(job, demand, found, sizes).decide(self.ledger, self._limits, time.monotonic())
            whole = demand.pieces is None or count_of(normal(demand.pieces)) == len(sizes)
            if not turns_to_program(demand, answer, whole=whole):
                assert not isinstance(answer, LayoutsDiffer)
                return answer
        return await self._reshard(job, demand)

    async def _reshard(self, job: str, demand: Demand) -> PlanAnswer:
        """Plan for a reader that is filled from other layouts than its own."""
        found = found_in(await self._catalogs.at(job, demand.at_seq), demand, self._limits, any_layout=True)
        if isinstance(found, Refusal):
            return found
        if not found.holders.able:
            return nobody_has_it(demand, found.holders)
        await self._hear_sources(found)
        try:
            compiled = await self._program(job, demand, found)
        except LayoutMismatch as why:
            return cannot_be_filled(demand, why, found.holders, could_be=await self._could_be(job, demand, found))
        pieces = demand.pieces if demand.program is not None else None
        asked = msgspec.structs.replace(demand, program=compiled.digest, pieces=pieces)
        question = Question(job, asked, in_units(found, compiled.execution), compiled.sizes)
        answer = question.decide(self.ledger, self._limits, time.monotonic())
        assert not isinstance(answer, LayoutsDiffer)
        return answer

    async def _hear_sources(self, found: Found) -> None:
        """Where there is a choice, have heard who reads from whom."""
        sources = {holder.source.agent for holder in found.holders.able}
        if len(sources) > 1:
            await self._hearing.wait_for(sources)

    async def _program(self, job: str, demand: Demand, found: Found) -> Compiled:
        if demand.program is not None:
            return await self._programs.known(job, demand.program)
        return await self._programs.compiled(job, found.seat.layout, source_set(found))

    async def _could_be(self, job: str, demand: Demand, found: Found) -> bool:
        """Tell whether all shards that are registered, also those that are lost or empty now, could fill the reader."""
        fold = await self._catalogs.at(job, demand.at_seq)
        every = SourceSet(registered_layouts(fold.catalog, demand), found.originals)
        try:
            await self._programs.compiled(job, found.seat.layout, every)
        except LayoutMismatch:
            return False
        return True


def _code(error: TensorHubError) -> str:
    """Name an error by the class that everybody knows: the bus has narrower ones of its own."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == TensorHubError.__module__)
