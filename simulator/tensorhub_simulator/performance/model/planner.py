"""The planner of a modelled cluster: the production decision and ledger, asked through queues that take time."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from tensorhub_agent.transfer.plan_requests import NO_ANSWER
from tensorhub_common.protocol.heartbeat import Heartbeat
from tensorhub_common.protocol.plans import PLAN_ASK_S, PlanAnswer, PlanRequest, ReadPriority, Refusal, SourceId
from tensorhub_planner.catalog_view.holders import Candidates, Holder, HolderSet, ReaderShard
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.load.load import ReaderId
from tensorhub_planner.planning.decision import PlanDecision
from tensorhub_planner.planning.plan import OnlyOtherLayouts, PlanOutcome
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_planner.primitives.piece_sizes import PieceSizes
from tensorhub_planner.primitives.topology import AgentPlace, Topology
from tensorhub_simulator.engine.agenda import Agenda, ServerQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorhub_simulator.performance.model.topology import ClusterTopology
    from tensorhub_simulator.performance.model.topology import GpuPlace as Where

JOB: Final = "simulated"
MODEL: Final = "policy"
LAYOUT: Final = "layout"
QUESTIONS_MAX: Final = 512 + 4096
"""This many questions of one job a planner has under way and waiting; the next one is told at once (`Answering`)."""


def source_of(where: "Where") -> SourceId:
    """Name a shard as the hub does."""
    return SourceId(where.agent, 1, f"{where.kind}-{where.replica}", where.shard)


@dataclass(slots=True)
class Copies:
    """Who holds or fills which version at one shard's place, as the log says it."""

    holders: dict[SourceId, tuple[int, Holder]] = field(default_factory=dict)

    def able(self, version: int, me: SourceId, *, pipelining: bool) -> tuple[Holder, ...]:
        """Return who has a version, or will, but for the reader itself; without `pipelining` who has it."""
        return tuple(
            holder
            for source, (held, holder) in self.holders.items()
            if held == version and source.replica != me.replica and (pipelining or holder.turn is None)
        )


class PlannerModel:
    """All planners: they know the same log, and each its own plans alone."""

    def __init__(
        self, agenda: Agenda, fabric: "ClusterTopology", sizes: PieceSizes, root: str, limits: PlanLimits
    ) -> None:
        """Begin with an empty catalog."""
        self._agenda, self._fabric, self._sizes, self._root, self._limits = agenda, fabric, sizes, root, limits
        control = fabric.cluster.control
        self._control = control
        self._ledgers = [LoadLedger(limits) for _ in range(control.planners)]
        self._desks = [ServerQueue(agenda) for _ in self._ledgers]
        self._asked = 0
        self._copies: dict[int, Copies] = {}
        places = {seat.agent: AgentPlace(seat.host, seat.site) for seats in fabric.seats.values() for seat in seats}
        self._topology = Topology(places)
        # A planner decides for all shards, and those that are not modelled ask as well.
        self._share = fabric.cluster.model.shards / fabric.rails
        self._decided = 0
        """The last decision that the log has."""
        self.questions = 0
        self.plans = 0

    def holds(self, where: "Where", version: int, turn: ReadPriority | None, *, asked: bool = False) -> None:
        """Take note that a shard stands ready at a version, or with a turn that it is being filled.

        `asked`: its round has begun, so it has its plan.
        """
        source = source_of(where)
        holder = Holder(
            source=source,
            key=f"{where.shard}",
            layout=LAYOUT,
            shards=self._fabric.rails,
            root=self._root,
            turn=turn,
            asked=asked,
        )
        self._copies.setdefault(where.shard, Copies()).holders[source] = (version, holder)
        if turn is None:
            self._over(where)
        else:
            self._decided = max(self._decided, turn.decided)

    def hear(self, beat: Heartbeat) -> None:
        """Let every planner hear what an agent says of its readers."""
        for ledger in self._ledgers:
            ledger.hear(beat, self._agenda.now)

    def gone(self, where: "Where") -> None:
        """Take note that a shard holds nothing any more."""
        copies = self._copies.get(where.shard)
        if copies is not None:
            copies.holders.pop(source_of(where), None)
        self._over(where)

    def _over(self, where: "Where") -> None:
        reader = ReaderId(JOB, MODEL, f"{where.kind}-{where.replica}", where.shard)
        for ledger in self._ledgers:
            ledger.done(reader)
            ledger.ended.shard(reader, self._decided + 1)

    def ask(self, where: "Where", demand: PlanRequest, answered: "Callable[[PlanAnswer], None]") -> None:
        """Answer once a planner has got to it."""
        number = self._asked % len(self._desks)
        self._asked += 1
        away_s = self._fabric.control_delay_s(where)
        answers: list[PlanAnswer] = []

        arrived = self._agenda.now + away_s

        def work() -> float:
            if self._agenda.now - arrived > PLAN_ASK_S:
                # The reader that asked has given up, and asks again.
                return 0.0
            answer, takes_s = self._decide(where, demand, self._ledgers[number])
            answers.append(answer)
            return takes_s

        def done() -> None:
            if answers:
                self._agenda.after(away_s, lambda: answered(answers[0]))

        def arrive() -> None:
            if len(self._desks[number]) * self._share < QUESTIONS_MAX:
                self._desks[number].serve(work, done)
                return
            answers.append(Refusal(error=NO_ANSWER, reason="the planner has too many questions waiting"))
            done()

        self._agenda.after(away_s, arrive)

    def _decide(self, where: "Where", demand: PlanRequest, ledger: LoadLedger) -> tuple[PlanAnswer, float]:
        """Return the answer, and how long it takes to find: each plan looks at each holder."""
        self.questions += 1
        me = source_of(where)
        seat = ReaderShard(me=me, key=f"{where.shard}", layout=LAYOUT, shards=self._fabric.rails, root=self._root)
        able = self._copies.setdefault(where.shard, Copies()).able(
            demand.version, me, pipelining=self._limits.pipelining
        )
        found = Candidates(seat, HolderSet(able, draining=True), self._topology)
        question = _Counting(JOB, demand, found, self._sizes)
        answer = question.decide(ledger, self._limits, self._agenda.now)
        assert not isinstance(answer, OnlyOtherLayouts), "all replicas of a modelled cluster have one layout"
        plans = len(question.plans)
        self.plans += plans
        takes_s = plans * (self._control.plan_s + len(able) * self._control.plan_holder_s)
        return answer, takes_s * self._share


@dataclass(frozen=True, slots=True)
class _Counting(PlanDecision):
    """A question that counts its plans: places are kept for readers who have not asked yet, by a plan for each."""

    plans: list[None] = field(default_factory=list)

    def _plan(
        self, demand: PlanRequest, seat: ReaderShard, ledger: LoadLedger, limits: PlanLimits, now: float
    ) -> PlanOutcome:
        self.plans.append(None)
        # Without arguments `super` does not know a class with slots, which is made twice.
        return PlanDecision._plan(self, demand, seat, ledger, limits, now)  # noqa: SLF001 (our own parent's)


def limits_of(*, pipelining: bool) -> PlanLimits:
    """Return the planner's limits as it has them in production."""
    return msgspec.structs.replace(PlanLimits(), pipelining=pipelining)
