"""Plans for fp8 blocks that publishers' edges cut: from a replica that has them quantised, or by partial amax values.

A block that no single shard has whole gets its scale from *partials*: units that bring the amax of one shard's part.
"""

import asyncio
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from tests.unit.planner.cut_blocks import reader, sources

from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.protocol.plans import Plan, PlanRequest, SourceId
from tensorhub_common.protocol.ranges import Range, intersect_ranges, merge_ranges, subtract_ranges
from tensorhub_planner.catalog_view.catalog_replica import CatalogReplica
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.planning.plan import make_plan
from tensorhub_planner.planning.request import DemandPlanner
from tensorhub_planner.planning.verifier import PlanError
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_simulator.drivers.catalog import MODEL, CatalogDriver
from tensorhub_simulator.drivers.planner import Known, Layouts, at_once

EDGES = (70, 200, 300, 390)


class Blocks:
    """A trainer of five shards has published; `first` and `second` want its tensor quantised."""

    def __init__(self) -> None:
        self.log, layouts = CatalogDriver(), Layouts()
        for shard, layout in enumerate(sources(*EDGES).values()):
            self.log.join(f"t{shard}")
            self.log.register(f"t{shard}", "trainer", shard, len(EDGES) + 1, layout=layouts.add(layout))
        for name in ("first", "second"):
            self.log.join(name)
            self.log.register(name, name, layout=layouts.add(reader(name)))
        for shard in range(len(EDGES) + 1):
            self.log.ready("trainer", 1, shard)
        self.known = Known(layouts, lambda: CatalogReplica(self.log.catalog, self.log.catalog.seq), lambda: 0.0)

    def plan(self, replica: str = "second", **more: Any) -> Plan:
        planner = DemandPlanner("job", self.known, LoadLedger(PlanLimits()), PlanLimits())
        demand = PlanRequest(model=MODEL, version=1, replica=replica, shard=0, agent=replica, root=None, at_seq=0)
        found = at_once(planner.answer(msgspec.structs.replace(demand, **more)))
        assert isinstance(found, Plan), found
        return found

    def execution(self, plan: Plan) -> NumberedProgram:
        assert plan.program is not None
        return asyncio.run(self.known.program(plan.program)).execution


def pieces_of(plan: Plan) -> tuple[Range, ...]:
    return merge_ranges(run for share in plan.shares for run in share.pieces)


def parts(program: NumberedProgram) -> list[tuple[Range, ...]]:
    """Return the numbers of partials, scales and values."""
    edges = (0, program.partials, program.scales, program.values)
    return [((a, b - a),) for a, b in pairwise(edges)]


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


def test_the_first_reader_asks_for_partials_and_values(blocks: Blocks) -> None:
    """It computes the scales of cut blocks itself, of one partial from each shard that has a part of the block."""
    plan = blocks.plan()
    partials, _, values = parts(blocks.execution(plan))
    assert pieces_of(plan) == merge_ranges([*partials, *values])


def test_what_a_replica_has_quantised_is_read_from_it(blocks: Blocks) -> None:
    """Also by a read that avoids another holder. One that avoids this replica goes by partials again."""
    blocks.log.fetch("first")
    plan = blocks.plan()
    partials, scales, values = parts(blocks.execution(plan))
    assert pieces_of(plan) == merge_ranges([*scales, *values])
    avoid = (SourceId("first", 1, "first", 0),)
    rest = blocks.plan(program=plan.program, pieces=((0, 1), *values), avoid=avoid)
    assert pieces_of(rest) == merge_ranges([(0, 1), *values])
    assert all(share.source != avoid[0] for share in rest.shares)
    assert pieces_of(blocks.plan(program=plan.program, pieces=values)) == values, "it needs no partial"
    assert partials != ()


def test_a_plan_that_lacks_a_partial_or_a_scale_is_an_error(blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with the choice: the proof raises before a reader acts on it."""

    def lacking(*given: Any) -> Any:
        plan = make_plan(*given)
        assert isinstance(plan, Plan)
        left = [subtract_ranges(share.pieces, ((0, 1),)) for share in plan.shares]
        shares = map(lambda share, pieces: msgspec.structs.replace(share, pieces=pieces), plan.shares, left)
        return msgspec.structs.replace(plan, shares=tuple(shares))

    assert intersect_ranges(pieces_of(blocks.plan()), ((0, 1),))
    monkeypatch.setattr("tensorhub_planner.planning.decision.make_plan", lacking)
    with pytest.raises(PlanError):
        blocks.plan()
