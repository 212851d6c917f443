"""Readers and holders of one version, each an agent with a number, and the plan of one of them."""

from collections.abc import Iterable
from typing import Any

from tensorhub_common.catalog.state import root_key
from tensorhub_common.protocol.plans import Plan, PlanRequest, ReadPriority, SourceId
from tensorhub_common.protocol.ranges import Ranges, merge_ranges
from tensorhub_planner.catalog_view.holders import Candidates, Holder, HolderSet, ReaderShard
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.planning.decision import PlanDecision
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_planner.primitives.piece_sizes import PieceSizes
from tensorhub_planner.primitives.topology import Topology

KEY = root_key(1, 0, "layout")
TRAINER = 0


def source(number: int) -> SourceId:
    return SourceId(f"agent-{number}", 1, f"replica-{number}", 0)


def number_of(found: SourceId) -> int:
    return int(found.agent.split("-")[1])


def holder(number: int, turn: ReadPriority | None = None) -> Holder:
    """Return a holder; one with a turn is half-filled."""
    return Holder(source=source(number), key=KEY, layout="layout", shards=1, root="root", turn=turn)


def request(me: SourceId, turn: ReadPriority, **more: Any) -> PlanRequest:
    shared: dict[str, Any] = {"model": "m", "version": 1, "root": "root", "at_seq": 1, "turn": turn}
    return PlanRequest(**{**shared, "replica": me.replica, "shard": me.shard, "agent": me.agent, **more})


def planned(
    asked: PlanRequest,
    others: Iterable[Holder],
    sizes: PieceSizes,
    topology: Topology,
    limits: PlanLimits,
    ledger: LoadLedger | None = None,
) -> Plan:
    seat = ReaderShard(me=SourceId(asked.agent, 1, asked.replica, asked.shard), key=KEY, layout="layout", shards=1)
    found = Candidates(seat, HolderSet((holder(TRAINER), *others)), topology)
    answer = PlanDecision("job", asked, found, sizes).decide(ledger or LoadLedger(limits), limits, 0.0)
    assert isinstance(answer, Plan), answer
    return answer


def crossed(found: Plan) -> Ranges:
    return merge_ranges(each for share in found.shares if share.far for each in share.pieces)
