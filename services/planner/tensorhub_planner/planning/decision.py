"""One request, from the log and the ledger to an answer. Pure, and the same for production and the simulator.

Readers of one publication are decided by one command and send their requests in any order. The planner reserves a place
for readers of earlier turns that have not sent theirs yet. Otherwise the first request would take the one idle holder,
and the readers of earlier turns, which may read from no other source, would share that holder with it.
"""

from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import msgspec

from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.protocol.plans import Plan, PlanAnswer, PlanRequest, Refusal
from tensorhub_common.protocol.ranges import merge_ranges, total_count
from tensorhub_planner.catalog_view.catalog_replica import CatalogReplica
from tensorhub_planner.catalog_view.holders import Candidates, Holder, HolderSet, ReaderShard, find_candidates
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.load.load import ReaderId
from tensorhub_planner.planning.fp8_strategies import fp8_strategies, prove_folds
from tensorhub_planner.planning.plan import OnlyOtherLayouts, PlanOutcome, make_plan
from tensorhub_planner.planning.plan_cache import PlanCache
from tensorhub_planner.planning.resharding import in_units
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_planner.primitives.piece_sizes import PieceSizes


def found_in(
    fold: CatalogReplica, demand: PlanRequest, limits: PlanLimits, *, any_layout: bool
) -> Candidates | Refusal:
    """Look up in the log who can serve the demand."""
    return find_candidates(fold.catalog, demand, pipelining=limits.pipelining, any_layout=any_layout, rolls=fold.rolls)


@dataclass(frozen=True, slots=True)
class PlanDecision:
    """A demand, and what is known of it. `sizes` are those of the reader's layout, or of the units of its program."""

    job: str
    demand: PlanRequest
    found: Candidates
    sizes: PieceSizes
    program: NumberedProgram | None = None

    def decide(self, ledger: LoadLedger, limits: PlanLimits, now: float) -> PlanOutcome:
        """Answer, and count the plan in the ledger."""
        demand, reader = self.demand, self._reader(self.demand.replica)
        if demand.pieces is None or total_count(merge_ranges(demand.pieces)) == len(self.sizes):
            # It begins anew: what it was given before is void, and no load on anybody.
            ledger.done(reader)
        else:
            ledger.failed(reader, demand.avoid)
        for holder in self._not_asked_yet(ledger, limits):
            self._reserve(holder, ledger, limits, now)
        answer = self._plan(demand, self.found.seat, ledger, limits, now)
        if isinstance(answer, Plan):
            ledger.assign(reader, answer, now)
        return answer

    def _reader(self, replica: str) -> ReaderId:
        return ReaderId(self.job, self.demand.model, replica, self.demand.shard)

    def _not_asked_yet(self, ledger: LoadLedger, limits: PlanLimits) -> list[Holder]:
        """Return whose turn is earlier and of whom this planner knows nothing, the earliest first.

        One whose round has begun did ask, another planner or this one before it was restarted.
        """
        turn = self.demand.turn
        earlier = [
            holder
            for holder in self.found.holders.able
            if turn is not None
            and holder.turn is not None
            and holder.turn < turn
            and holder.layout == self.found.seat.layout
            and not holder.asked
            and not ledger.knows(self._reader(holder.source.replica))
        ]
        return sorted(earlier, key=attrgetter("turn"))[: limits.reserved_max]

    def _reserve(self, holder: Holder, ledger: LoadLedger, limits: PlanLimits, now: float) -> None:
        """Plan for one that has not asked, as if it asked for everything."""
        source = holder.source
        demand = msgspec.structs.replace(
            self.demand,
            replica=source.replica,
            agent=source.agent,
            root=holder.root,
            pieces=None,
            avoid=(),
            turn=holder.turn,
            mapped=False,
            # What this reader measured says nothing of what another one would.
            rates=(),
        )
        seat = ReaderShard(me=source, key=holder.key, layout=holder.layout, shards=holder.shards)
        answer = self._plan(demand, seat, ledger, limits, now)
        if isinstance(answer, Plan):
            ledger.assign(self._reader(source.replica), answer, now, reserved=True)

    def _plan(
        self, demand: PlanRequest, seat: ReaderShard, ledger: LoadLedger, limits: PlanLimits, now: float
    ) -> PlanOutcome:
        holders, topology, program = self._deep(ledger), self.found.topology, self.program
        if program is None or not program.partials:
            return make_plan(demand, seat, self.sizes, holders, topology, ledger.at(now), limits)
        for asked, able in fp8_strategies(program, demand, seat.me, holders):
            answer = make_plan(asked, seat, self.sizes, able, topology, ledger.at(now), limits)
            if isinstance(answer, Plan):
                prove_folds(answer, demand, program)
                break
        return answer

    def _deep(self, ledger: LoadLedger) -> HolderSet:
        """Return the holders with what the ledger knows of the chains that they stand in."""
        holders = self.found.holders
        if all(holder.turn is None for holder in holders.able):
            return holders
        able = tuple(
            holder
            if holder.turn is None
            else msgspec.structs.replace(holder, depth=ledger.depth(self._reader(holder.source.replica)))
            for holder in holders.able
        )
        return msgspec.structs.replace(holders, able=able)


class ProgramPlanDecision(NamedTuple):
    """A demand of a reader that goes by a program, and who has the version in any layout."""

    job: str
    demand: PlanRequest
    found: Candidates
    execution: NumberedProgram
    sizes: PieceSizes

    def decide(self, kept: PlanCache, ledger: LoadLedger, limits: PlanLimits, now: float) -> PlanAnswer:
        """Answer with the reader's last plan where that still holds, else decide anew; count it in the ledger."""
        demand, found = self.demand, self.found
        reader = ReaderId(self.job, demand.model, demand.replica, demand.shard)
        plan = kept.again(reader, demand, found, ledger, limits, now)
        if plan is not None:
            return plan
        if self.execution.values or not found.of_replica.original_layouts.issuperset(self.execution.program.sources):
            # A reader that asked at another time may have another program, and amax values are in no shard's memory, so
            # this reader waits for no promise.
            demand = msgspec.structs.replace(demand, promises=False)
        question = PlanDecision(self.job, demand, in_units(found, self.execution), self.sizes, self.execution)
        answer = question.decide(ledger, limits, now)
        assert not isinstance(answer, OnlyOtherLayouts)
        if isinstance(answer, Plan):
            kept.keep(reader, demand, question.found, answer, ledger, limits, now)
        return answer
