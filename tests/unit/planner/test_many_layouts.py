"""A tensor that stands in more layouts than a program names: whoever is ready is among those that it names."""

import pytest
from tests.unit.common.catalog.catalog_world import MODEL, World, decided

from tensorhub_common.layout.layout import Layout, TensorEntry, layout_of
from tensorhub_common.protocol.plans import Plan, PlanRequest, ReadPriority
from tensorhub_planner.catalog_view.catalog_replica import CatalogReplica
from tensorhub_planner.compiler.tiling import OWNERS_MAX
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.planning.request import DemandPlanner
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_simulator.drivers.planner import Known, Layouts, at_once

RANKS = 2 * OWNERS_MAX


def shard(first: int, rows: int) -> Layout:
    """Return some rows of a matrix, and a norm, which every rank has."""
    norm = TensorEntry("norm", "uint8", 1, (4,), (4,), (0,))
    return layout_of([norm, TensorEntry("w", "uint8", 1, (rows, 2), (RANKS, 2), (first, 0))])


@pytest.mark.parametrize("rank", range(0, RANKS, 5))
def test_the_first_of_many_readers_that_all_have_a_norm_reads_it_from_the_one_who_is_ready(rank: int) -> None:
    """Two engines of many ranks read at once; the first one's turn is the earlier, so the other can give it nothing."""
    log, layouts = World(), Layouts()
    log.join("trainers")
    log.register("trainers", "trainer", layout=layouts.add(shard(0, RANKS)))
    log.ready("trainer", 1)
    turns = {}
    for engine in ("a", "b"):
        log.join(engine)
        for each in range(RANKS):
            log.register(engine, engine, each, RANKS, layout=layouts.add(shard(each, 1)))
        for each in range(RANKS):
            told = log.want(engine, "latest", each)
        turns[engine] = ReadPriority(decided(told).cmd, decided(told).round)
    known = Known(layouts, lambda: CatalogReplica(log.catalog, log.catalog.seq), lambda: 0.0)
    answering = DemandPlanner("job", known, LoadLedger(PlanLimits()), PlanLimits())
    for engine, turn in turns.items():
        demand = PlanRequest(
            model=MODEL, version=1, replica=engine, shard=rank, agent=engine, root=None, at_seq=0, turn=turn
        )
        answer = at_once(answering.answer(demand))
        assert isinstance(answer, Plan), answer
        assert sum(share.nbytes for share in answer.shares) == 6
