"""From a plan request to its answer: by holders of the reader's layout, or by a transfer program. Pure.

`JobContext` provides what has to be fetched: a log folded far enough, layouts, programs, and sources' reports. The
service implements it by the bus and the blob store, and the simulator by its world. Both make the decisions here in the
same order.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

from tensorhub_common.errors import BadCommand, LayoutMismatch, TensorHubError, VersionUnavailable
from tensorhub_common.protocol.plans import Plan, PlanAnswer, PlanRequest, Refusal
from tensorhub_common.protocol.ranges import merge_ranges, total_count
from tensorhub_planner.catalog_view.catalog_replica import CatalogReplica
from tensorhub_planner.catalog_view.holders import Candidates, is_held, registered_layouts, replica_layouts
from tensorhub_planner.compiler.compiler import CompiledProgram
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.planning.decision import PlanDecision, ProgramPlanDecision, found_in
from tensorhub_planner.planning.plan import OnlyOtherLayouts
from tensorhub_planner.planning.plan_cache import PlanCache
from tensorhub_planner.planning.resharding import (
    cannot_be_filled,
    no_holder_refusal,
    program_sources,
    reads_by_program,
    turns_to_program,
)
from tensorhub_planner.planning.unregistered import NOTHING, Unregistered
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_planner.primitives.piece_sizes import PieceSizes
from tensorhub_planner.primitives.source_set import LayoutSet


class JobContext(Protocol):
    """What a planner finds out about one job; each may take a while, and raise a `TensorHubError`."""

    async def fold(self, at_seq: int) -> CatalogReplica:
        """Return the log, folded at least so far."""
        ...

    async def sizes(self, layout: str) -> PieceSizes:
        """Return the sizes of a layout's pieces."""
        ...

    async def compiled(self, layout: str, sources: LayoutSet) -> CompiledProgram:
        """Return the program that fills a layout from those. Raises `LayoutMismatch` that names what they lack."""
        ...

    async def program(self, digest: str) -> CompiledProgram:
        """Return a program that a reader names."""
        ...

    async def unregistered(self, layouts: Sequence[str], sources: LayoutSet) -> Unregistered:
        """Return of which of the sources' tensors none of these layouts has anything. Raises what `compiled` raises."""
        ...

    async def heard(self, agents: Collection[str]) -> None:
        """Return once these agents have reported their readers, or had their time."""
        ...

    def now(self) -> float:
        """Return the planner's time."""
        ...


class DemandPlanner:
    """Answers the requests of one job."""

    def __init__(
        self, job: str, knowledge: JobContext, ledger: LoadLedger, limits: PlanLimits, kept: PlanCache | None = None
    ) -> None:
        """Decide by this knowledge, and count each plan in the ledger. `kept` are plans that may be used again."""
        self._job, self._knowledge, self._ledger, self._limits = job, knowledge, ledger, limits
        self._kept = PlanCache() if kept is None else kept

    async def answer(self, demand: PlanRequest) -> PlanAnswer:
        """Return the plan, or a refusal. Raises what `JobContext` raises, and `BadCommand`."""
        answer = await self._answer(demand)
        if isinstance(answer, Refusal) and answer.error == VersionUnavailable.__name__:
            fold = await self._knowledge.fold(demand.at_seq)
            return msgspec.structs.replace(answer, is_held=is_held(fold.catalog, demand))
        return answer

    async def _answer(self, demand: PlanRequest) -> PlanAnswer:
        if demand.mapped and demand.program is not None:
            raise BadCommand("what is mapped is not filled, so a demand for it names no program")
        if not reads_by_program(demand):
            found = await self._found(demand, any_layout=False)
            if isinstance(found, Refusal):
                return found
            sizes = await self._knowledge.sizes(found.seat.layout)
            answer = self._decide(PlanDecision(self._job, demand, found, sizes))
            whole = demand.pieces is None or total_count(merge_ranges(demand.pieces)) == len(sizes)
            if not turns_to_program(demand, answer, whole=whole):
                assert not isinstance(answer, OnlyOtherLayouts)
                return answer
        return await self._reshard(demand)

    async def _found(self, demand: PlanRequest, *, any_layout: bool) -> Candidates | Refusal:
        """Look up which shards can serve the request; where there is a choice, wait for their reports."""
        found = found_in(await self._knowledge.fold(demand.at_seq), demand, self._limits, any_layout=any_layout)
        if not isinstance(found, Refusal):
            roll = found.roll
            sources = {each.source.agent for each in found.holders.able} if roll is None else roll.agents
            if len(sources) > 1:
                await self._knowledge.heard(sources)
        return found

    def _decide(self, question: PlanDecision) -> PlanAnswer | OnlyOtherLayouts:
        return question.decide(self._ledger, self._limits, self._knowledge.now())

    async def _reshard(self, demand: PlanRequest) -> PlanAnswer:
        """Plan for a reader that is filled from other layouts than its own."""
        found = await self._found(demand, any_layout=True)
        if isinstance(found, Refusal):
            return found
        if not found.holders.able:
            return no_holder_refusal(demand, found.holders)
        try:
            compiled = await self._program(demand, found)
        except LayoutMismatch as why:
            return cannot_be_filled(demand, why, found.holders, could_be=await self._could_be(demand, found))
        pieces = demand.pieces if demand.program is not None else None
        asked = msgspec.structs.replace(demand, program=compiled.digest, pieces=pieces)
        question = ProgramPlanDecision(self._job, asked, found, compiled.execution, compiled.sizes)
        answer = question.decide(self._kept, self._ledger, self._limits, self._knowledge.now())
        if isinstance(answer, Plan) and demand.program is None:
            unregistered = await self._unregistered(demand, found, compiled)
            names, count = unregistered.names, unregistered.count
            return msgspec.structs.replace(answer, unregistered=names, unregistered_count=count)
        return answer

    async def _unregistered(self, demand: PlanRequest, found: Candidates, compiled: CompiledProgram) -> Unregistered:
        """Return what no shard of the reader's replica has registered, to one of them, which reports it to its user.

        It waits for its siblings' programs. They request them as well, and none begins before all have a plan.
        """
        if not compiled.execution.program.unread_count:
            return NOTHING
        fold = await self._knowledge.fold(demand.at_seq)
        layouts = replica_layouts(fold.catalog, demand)
        if not layouts:
            return NOTHING
        try:
            return await self._knowledge.unregistered(layouts, program_sources(demand, found))
        except TensorHubError:
            # A sibling can't be filled, and reports why itself: the replica will have nothing.
            return NOTHING

    async def _program(self, demand: PlanRequest, found: Candidates) -> CompiledProgram:
        if demand.program is None:
            return await self._knowledge.compiled(found.seat.layout, program_sources(demand, found))
        try:
            named = await self._knowledge.program(demand.program)
        except LayoutMismatch as why:
            raise BadCommand(f"the demand names a program that can't be read: {why}") from None
        if not named.execution.fills(found.seat.layout):
            raise BadCommand(f"program {demand.program[:12]} of the demand fills another layout than the reader's")
        return named

    async def _could_be(self, demand: PlanRequest, found: Candidates) -> bool:
        """Tell whether shards could fill the reader that are registered as the publisher's were, and lost or empty now.

        Other readers do not count: two that lack the same tensor would wait for each other.
        """
        fold = await self._knowledge.fold(demand.at_seq)
        registered = registered_layouts(fold.catalog, demand)
        again = tuple(layout for layout in found.of_replica.originals if layout in registered)
        try:
            await self._knowledge.compiled(found.seat.layout, LayoutSet(again, again))
        except LayoutMismatch:
            return False
        return True
