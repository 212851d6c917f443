"""A site whose replicas are cut otherwise than the trainer's takes each byte once too, by one program for all."""

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.property.one_version import crossed, number_of, request

from tensorhub_common.catalog.state import root_key
from tensorhub_common.layout.layout import Layout, TensorEntry, layout_digest, layout_of
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.programs.program import encoded
from tensorhub_common.protocol.plans import Plan, PlanRequest, ReadPriority, SourceId
from tensorhub_common.protocol.ranges import Ranges, intersect_ranges, merge_ranges
from tensorhub_planner.catalog_view.holders import Candidates, Holder, HolderSet, ReaderShard
from tensorhub_planner.compiler.compiler import compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.planning.decision import ProgramPlanDecision
from tensorhub_planner.planning.plan_cache import PlanCache
from tensorhub_planner.planning.resharding import program_sources
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_planner.primitives.piece_sizes import PieceSizes
from tensorhub_planner.primitives.source_set import LayoutSet
from tensorhub_planner.primitives.topology import AgentPlace, Topology

DECIDED = 7
ROWS, COLUMNS = 12, 4
TENSORS = 5
NEAR, FAR, ELSEWHERE = "berlin", "paris", "oslo"


def rows(begin: int, end: int) -> Layout:
    shape, whole = (end - begin, COLUMNS), (ROWS, COLUMNS)
    return layout_of([TensorEntry(f"t{n}", "float32", 4, shape, whole, (begin, 0)) for n in range(TENSORS)])


WHOLE, TOP, BOTTOM = rows(0, ROWS), rows(0, 5), rows(5, ROWS)
TRAINER = (rows(0, 3), rows(3, 8), rows(8, ROWS))
LAYOUTS = {layout_digest(each): each for each in (WHOLE, TOP, BOTTOM, *TRAINER)}
ORIGINALS = tuple(sorted(map(layout_digest, TRAINER)))


@dataclass(frozen=True)
class Reader:
    """A replica of one shard or two: its number, which is that of its round, and its layouts."""

    number: int
    cut: tuple[Layout, ...]

    def source(self, shard: int) -> SourceId:
        return SourceId(f"agent-{self.number}-{shard}", 1, f"replica-{self.number}", shard)

    def holders(self, *, ready: bool = False) -> list[Holder]:
        turn = None if ready else ReadPriority(DECIDED, self.number)
        return [holder(self.source(shard), each, len(self.cut), turn) for shard, each in enumerate(self.cut)]


def holder(source: SourceId, layout: Layout, shards: int, turn: ReadPriority | None) -> Holder:
    digest = layout_digest(layout)
    key = root_key(shards, source.shard, digest)
    return Holder(
        source=source, key=key, layout=digest, shards=shards, root="root" if turn is None else None, turn=turn
    )


TRAINERS = [holder(SourceId(f"trainer-{n}", 1, "trainer", n), each, 3, None) for n, each in enumerate(TRAINER)]
TOPOLOGY = Topology(
    {each.source.agent: AgentPlace("h", NEAR) for each in TRAINERS}
    | {f"agent-{n}-{shard}": AgentPlace(f"h{n}", FAR) for n in range(1, 12) for shard in (0, 1)}
    | {"away-0": AgentPlace("h", ELSEWHERE)}
)
STRANGER = holder(SourceId("away-0", 1, "away", 0), rows(0, 7), 1, None)
"""Came to hold the version meanwhile, in a site and a layout of its own."""


def all_of(readers: list[Reader]) -> list[Holder]:
    return [*TRAINERS, *(each for reader in readers for each in reader.holders())]


def demand(reader: Reader, shard: int, pieces: Ranges | None = None, **more: object) -> PlanRequest:
    turn = ReadPriority(DECIDED, reader.number)
    return request(reader.source(shard), turn, root=None, promises=True, pieces=pieces, **more)


def found(reader: Reader, shard: int, holders: list[Holder]) -> Candidates:
    digest = layout_digest(reader.cut[shard])
    seat = ReaderShard(
        me=reader.source(shard), key=root_key(len(reader.cut), shard, digest), layout=digest, shards=len(reader.cut)
    )
    others = tuple(each for each in holders if each.source.replica != reader.source(0).replica)
    return Candidates(seat, HolderSet(others), TOPOLOGY, ORIGINALS)


def compiled(layout: str, sources: LayoutSet) -> tuple[NumberedProgram, PieceSizes]:
    index = LayoutIndex({digest: LAYOUTS[digest] for digest in sources.layouts}, sources.originals)
    program = compile_program(layout, LAYOUTS[layout], index)
    execution = NumberedProgram(program, str(hash(encoded(program))))
    return execution, PieceSizes(execution.nbytes())


def plan(
    reader: Reader, shard: int, holders: list[Holder], asked: PlanRequest | None = None
) -> tuple[Plan, PieceSizes]:
    asked, who = asked or demand(reader, shard), found(reader, shard, holders)
    execution, sizes = compiled(who.seat.layout, program_sources(asked, who))
    return decided(asked, who, execution, sizes), sizes


def decided(asked: PlanRequest, who: Candidates, execution: NumberedProgram, sizes: PieceSizes) -> Plan:
    asked, limits = msgspec.structs.replace(asked, program=execution.digest), PlanLimits()
    decision = ProgramPlanDecision("job", asked, who, execution, sizes)
    answer = decision.decide(PlanCache(), LoadLedger(limits), limits, 0.0)
    assert isinstance(answer, Plan), answer
    return answer


@given(st.permutations(range(1, 7)), st.integers(2, 6), st.lists(st.booleans(), min_size=6, max_size=6))
def test_each_byte_crosses_once_whoever_has_come_meanwhile(order: list[int], count: int, meanwhile: list[bool]) -> None:
    """Each asks a planner of its own; some of them when a holder of another layout has come."""
    readers = [Reader(number, (TOP, BOTTOM)) for number in order[:count]]
    everybody = all_of(readers)
    for shard in (0, 1):
        plans = {}
        for reader, more in zip(readers, meanwhile, strict=False):
            plans[reader.number], sizes = plan(reader, shard, [*everybody, *([STRANGER] if more else [])])
        assert len({each.program for each in plans.values()}) == 1
        over = [crossed(each) for each in plans.values()]
        assert merge_ranges(each for pieces in over for each in pieces) == sizes.all()
        assert sum(map(sizes.of, over)) == sizes.of(sizes.all())
        for each in plans.values():
            for share in each.shares:
                assert share.far != share.crosses, "from afar, or from a mate"
                if share.crosses:
                    giver = plans[number_of(share.source)]
                    assert intersect_ranges(crossed(giver), share.pieces) == share.pieces
                    assert share.layout == layout_digest((TOP, BOTTOM)[shard])


@pytest.mark.long
@given(st.permutations(range(1, 6)))
def test_of_several_layouts_that_of_the_first_turn_crosses(order: list[int]) -> None:
    """The others read in the site, behind earlier turns: nothing of theirs crosses."""
    readers = [Reader(number, (WHOLE,) if place < 3 else (TOP, BOTTOM)) for place, number in enumerate(order)]
    everybody = all_of(readers)
    first = min(readers, key=lambda reader: reader.number)
    whole = PieceSizes([4 * ROWS * COLUMNS * TENSORS]).of(((0, 1),))
    over = 0
    for reader in readers:
        for shard in range(len(reader.cut)):
            answer, sizes = plan(reader, shard, everybody)
            over += sizes.of(crossed(answer))
            for share in answer.shares:
                if not share.far and not share.crosses:
                    assert number_of(share.source) < reader.number, "an earlier turn"
            if reader.cut != first.cut:
                assert not crossed(answer)
    assert over == whole


def test_a_near_holder_of_whatever_layout_is_read_and_nothing_crosses() -> None:
    readers = [Reader(number, (WHOLE,)) for number in (1, 2)]
    near = Reader(9, (TOP, BOTTOM))
    everybody = [*all_of(readers), *near.holders(ready=True)]
    for reader in readers:
        answer, _ = plan(reader, 0, everybody)
        assert not crossed(answer)
        assert not any(share.crosses for share in answer.shares)


@pytest.mark.long
@given(st.integers(2, 6), st.data())
def test_the_part_of_one_that_fell_out_crosses_once_more_at_most(count: int, data: st.DataObject) -> None:
    readers = [Reader(number, (WHOLE,)) for number in range(1, count + 1)]
    everybody = all_of(readers)
    dead = data.draw(st.sampled_from(readers))
    program, sizes = plan(dead, 0, everybody)
    lost = crossed(program)
    over = []
    for reader in readers:
        if reader != dead and lost:
            word = data.draw(st.sampled_from(("avoid", "uncrossed")))
            answer, _ = plan(reader, 0, everybody, demand(reader, 0, lost, **{word: (dead.source(0),)}))
            over.append(crossed(answer))
            assert dead.source(0) not in [share.source for share in answer.shares]
    assert sum(map(sizes.of, over)) == sizes.of(lost)


def test_whoever_goes_by_a_program_of_other_layouts_waits_for_nobody() -> None:
    """Its units are others than those of its mates."""
    readers = [Reader(number, (WHOLE,)) for number in (1, 2)]
    everybody = [*all_of(readers), STRANGER]
    who = found(readers[0], 0, everybody)
    LAYOUTS.setdefault(STRANGER.layout, rows(0, 7))
    execution, sizes = compiled(who.seat.layout, LayoutSet((*ORIGINALS, STRANGER.layout), ORIGINALS))
    answer = decided(demand(readers[0], 0), who, execution, sizes)
    assert not any(share.crosses for share in answer.shares)
