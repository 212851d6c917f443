"""What the agent asks others for one job: a registry to open it, a planner for plans, the blobs for siblings' layouts.

Invariant: nothing waits longer than its bound, and a planner's silence is an answer. Nothing is decided here.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from tensorhub_agent.control.program_cache import ProgramCache
from tensorhub_agent.primitives.program_units import PieceCompletion
from tensorhub_agent.transfer.plan_requests import NO_ANSWER
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import NoBus
from tensorhub_common.errors import TensorHubError, from_code
from tensorhub_common.jetstream.blob_store import BlobStore
from tensorhub_common.layout.layout import Layout, PieceTable, shared_mismatch
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.log.events import Sibling
from tensorhub_common.protocol.plans import PLAN_ASK_S, Plan, PlanAnswer, PlanRequest, Refusal, unpacked
from tensorhub_common.protocol.queries import JobOpened, QueryError
from tensorhub_common.protocol.subjects import query_subject
from tensorhub_common.runtime.peer_status import PeerStatus

OPEN_ASK_S: Final = 5.0

_log: Final = logging.getLogger(__name__)
_opened: Final[msgspec.json.Decoder[JobOpened | QueryError]] = msgspec.json.Decoder(JobOpened | QueryError)
_plans: Final[msgspec.json.Decoder[PlanAnswer | QueryError]] = msgspec.json.Decoder(PlanAnswer | QueryError)


class FillTarget(NamedTuple):
    """The shard that is to be filled: the digest of its layout, and its pieces."""

    layout: str
    table: PieceTable


class PlanResult(NamedTuple):
    """A planner's answer, with what it names."""

    answer: PlanAnswer
    program: NumberedProgram | None = None
    completion: PieceCompletion | None = None
    """For a read that is to turn to the program: what its units make of the shard's own pieces."""


class PlannerClient:
    """One job's questions."""

    def __init__(self, job: str, bus: Bus, blobs: BlobStore, programs: ProgramCache, planner: PeerStatus) -> None:
        """Ask nothing yet. `planner` is told whether planners answer this agent."""
        self._job, self._bus, self._blobs, self._programs = job, bus, blobs, programs
        self._planner = planner

    async def open_job(self) -> None:
        """Have a registry make the job's log if there is none. Raises `JobGone`."""
        answer = _opened.decode(await self._bus.request(query_subject(self._job, "open"), b"", OPEN_ASK_S))
        if isinstance(answer, QueryError):
            raise from_code(answer.error, answer.message)

    async def plan(self, demand: PlanRequest, headers: Mapping[str, str], target: FillTarget | None) -> PlanResult:
        """Ask a planner who brings which piece of a shard; get the program if the plan names one."""
        answer = await self._plan(demand, headers)
        if not isinstance(answer, Plan) or answer.program is None:
            return PlanResult(answer)
        try:
            program = await self._programs.get(answer.program)
            if demand.program is not None or target is None or not program.fills(target.layout):
                # The read has its completion, or has no use for one.
                return PlanResult(answer, program)
            # Of 160,000 units this takes half a second, in which leases have to be renewed.
            return PlanResult(answer, program, await asyncio.to_thread(PieceCompletion, program, target.table))
        except TensorHubError as why:
            return PlanResult(Refusal(error=NO_ANSWER, reason=f"the transfer program can't be had: {why}"))

    async def _plan(self, demand: PlanRequest, headers: Mapping[str, str]) -> PlanAnswer:
        question = msgspec.json.encode(demand)
        try:
            body = await self._bus.request(query_subject(self._job, "plan"), question, PLAN_ASK_S, headers)
            answer = _plans.decode(unpacked(body))
        except NoBus as why:
            # That says nothing of the planner; the bus itself says that NATS is away.
            return Refusal(error=NO_ANSWER, reason=f"the planner can't be asked ({why})")
        except (TensorHubError, *MALFORMED) as why:
            self._planner.is_silent(str(why))
            return Refusal(error=NO_ANSWER, reason=f"the planner does not answer ({why})")
        self._planner.answers()
        if isinstance(answer, QueryError):
            return Refusal(error=answer.error, reason=answer.message)
        return answer

    async def mismatch(self, mine: Layout, siblings: Iterable[Sibling]) -> str | None:
        """Return how a layout clashes with that of the first sibling which it clashes with."""
        for sibling in siblings:
            try:
                data = await self._blobs.get(self._job, sibling.layout)
                other = msgspec.msgpack.decode(data, type=Layout)
            except (TensorHubError, *MALFORMED) as why:
                _log.warning("the layout of sibling %d can't be compared: %s", sibling.shard, why)
                continue
            mismatch = await asyncio.to_thread(shared_mismatch, mine, other)
            if mismatch is not None:
                return mismatch
        return None
