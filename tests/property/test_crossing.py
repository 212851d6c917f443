"""Readers of one version read from each other, and never in a circle; and their site takes each byte once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.catalog.state import root_key
from tensorhub_common.layout.layout import Layout, TensorEntry, layout_digest, layout_of
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.programs.program import encoded
from tensorhub_common.protocol.plans import Plan, PlanRequest, ReadPriority, SourceId
from tensorhub_common.protocol.ranges import Ranges, intersect_ranges, merge_ranges
from tensorhub_planner.catalog_view.holders import Candidates, Holder, HolderSet, ReaderShard, ReplicaHolders
from tensorhub_planner.compiler.compiler import compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.planning.decision import PlanDecision, ProgramPlanDecision
from tensorhub_planner.planning.plan_cache import PlanCache
from tensorhub_planner.planning.resharding import program_sources
from tensorhub_planner.primitives.limits import PlanLimits, Rates
from tensorhub_planner.primitives.piece_sizes import PieceSizes
from tensorhub_planner.primitives.source_set import LayoutSet
from tensorhub_planner.primitives.topology import AgentPlace, Topology

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


SIZES = PieceSizes([4 * 1024 * 1024] * 64)
CHAINED = 8
SLOW = Rates(ingest_bps=125e6, source_bps=125e6, setup_s=0.001)
"""1 Gbit/s."""
READERS = 9
DECIDED = 7
hosts = st.sampled_from(("host-1", "host-2", "host-3"))
places = st.builds(AgentPlace, hosts, st.sampled_from(("berlin", "paris")))
sizes_of = st.lists(st.integers(1, 4 * 1024 * 1024), min_size=1, max_size=60).map(PieceSizes)


class Reader(msgspec.Struct, frozen=True):
    """One that reads, and what a planner takes the others to be at the moment in which it asks."""

    number: int
    turn: ReadPriority
    ready: frozenset[int]
    """Of the others, which are ready; the trainer always is."""
    known: frozenset[int]

    def plan(self, turns: dict[int, ReadPriority], topology: Topology, ledger: LoadLedger, limits: PlanLimits) -> Plan:
        others = [
            holder(number, None if number in self.ready else turns[number])
            for number in sorted(self.known - {self.number})
        ]
        found = planned(request(source(self.number), self.turn), others, SIZES, topology, limits, ledger)
        ledger.check()
        return found


@st.composite
def readers(draw: st.DrawFn) -> list[Reader]:
    pairs = st.builds(ReadPriority, st.integers(1, 4), st.integers(1, 50))
    turns = draw(st.lists(pairs, min_size=CHAINED, max_size=CHAINED, unique=True))
    some = st.frozensets(st.integers(1, CHAINED))
    return draw(st.permutations([Reader(n, turn, draw(some), draw(some)) for n, turn in enumerate(turns, start=1)]))


def assert_no_circle(waits_for: dict[int, set[int]]) -> None:
    left = set(waits_for)
    while left:
        ended = {number for number in left if not waits_for[number] & left}
        assert ended, f"{left} wait for each other: {waits_for}"
        left -= ended


@pytest.mark.long
@given(
    readers(),
    st.lists(places, min_size=CHAINED + 1, max_size=CHAINED + 1),
    st.sampled_from((SLOW, PlanLimits().network)),
)
def test_no_chain_comes_back_to_itself(some: Sequence[Reader], where: list[AgentPlace], network: Rates) -> None:
    turns = {reader.number: reader.turn for reader in some}
    topology = Topology({f"agent-{number}": place for number, place in enumerate(where)})
    limits = PlanLimits(network=network)
    ledger = LoadLedger(limits)
    waits_for: dict[int, set[int]] = {}
    for reader in some:
        used = {number_of(share.source) for share in reader.plan(turns, topology, ledger, limits).shares}
        waits_for[reader.number] = used - reader.ready - {0}
        assert all(turns[number] < reader.turn for number in waits_for[reader.number])
    assert_no_circle(waits_for)


@given(st.permutations(range(1, CHAINED + 1)))
def test_readers_of_one_publication_form_one_chain(order: list[int]) -> None:
    """All are decided by one command, each on a host of its own: the holder gives the bytes once, and so does each."""
    turns = {number: ReadPriority(DECIDED, number) for number in order}
    topology = Topology({f"agent-{number}": AgentPlace(f"host-{number}", "berlin") for number in range(CHAINED + 1)})
    limits = PlanLimits(network=SLOW)
    ledger, upstream = LoadLedger(limits), {}
    for number in order:
        reader = Reader(number, turns[number], frozenset(), frozenset(order))
        (share,) = reader.plan(turns, topology, ledger, limits).shares
        upstream[number] = number_of(share.source)
    assert upstream == {number: number - 1 for number in order}


@dataclass
class Site:
    """The trainer stands in one site, and so many readers in another one; one command has decided all their rounds."""

    readers: list[int]
    sizes: PieceSizes
    limits: PlanLimits
    topology: Topology

    def plan(self, reader: int, others: Sequence[Holder] | None = None, **more: Any) -> Plan:
        if others is None:
            others = [holder(each, ReadPriority(DECIDED, each)) for each in self.readers if each != reader]
        asked = request(source(reader), ReadPriority(DECIDED, reader), promises=True, **more)
        return planned(asked, others, self.sizes, self.topology, self.limits)


@st.composite
def sites(draw: st.DrawFn) -> Site:
    count = draw(st.integers(1, READERS))
    where = draw(st.lists(hosts, min_size=READERS, max_size=READERS))
    return Site(
        draw(st.permutations(range(1, count + 1))),
        draw(sizes_of),
        PlanLimits(wan_streams=draw(st.integers(1, READERS + 1))),
        Topology(
            {"agent-0": AgentPlace("host-1", "berlin")}
            | {f"agent-{number + 1}": AgentPlace(host, "paris") for number, host in enumerate(where)}
        ),
    )


@given(sites())
def test_each_byte_crosses_once(site: Site) -> None:
    """Each asks a planner of its own, which knows of no other question."""
    plans = {reader: site.plan(reader) for reader in site.readers}
    over = [crossed(found) for found in plans.values()]
    assert merge_ranges(each for pieces in over for each in pieces) == site.sizes.all()
    assert sum(map(site.sizes.of, over)) == site.sizes.of(site.sizes.all())
    far = [share for found in plans.values() for share in found.shares if share.far]
    assert sum(share.streams for share in far) <= max(site.limits.wan_streams, 1)
    for reader, found in plans.items():
        for share in found.shares:
            if share.crosses:
                gives = intersect_ranges(crossed(plans[number_of(share.source)]), share.pieces)
                assert gives == share.pieces, "whoever is waited for waits for nobody"
            elif not share.far:
                assert number_of(share.source) < reader, "an earlier turn"


@given(sites(), st.data())
def test_the_run_of_a_dead_crosser_crosses_once_more_at_most(site: Site, data: st.DataObject) -> None:
    """Those that are left ask at their own time, each for what it has not got of it."""
    dead = data.draw(st.sampled_from(site.readers))
    whole = site.plan(dead)
    lost, group = crossed(whole), whole.crossers
    left = [reader for reader in site.readers if reader != dead]
    # Some planners have heard by then that it is lost, and others have not. Who was not of the group may be, then.
    heard = replace(site, readers=left)
    plans = []
    for reader in left if lost else ():
        in_group = source(reader) in group
        view = heard if in_group and data.draw(st.booleans()) else site
        plans.append(view.plan(reader, pieces=lost, avoid=(source(dead),), crossers=group if in_group else ()))
    assert sum(site.sizes.of(crossed(found)) for found in plans) == (site.sizes.of(lost) if left else 0)
    for found in plans:
        assert merge_ranges(each for share in found.shares for each in share.pieces) == lost
        assert source(dead) not in [share.source for share in found.shares]


def test_a_group_of_one_entry_and_another_of_a_later_one_share_nothing_out() -> None:
    """Who comes later reads in the site."""
    near = {"agent-0": AgentPlace("h", "berlin")}
    topology = Topology(near | {f"agent-{n}": AgentPlace(f"h{n}", "paris") for n in (1, 2)})
    site = Site([1, 2], PieceSizes([10] * 8), PlanLimits(), topology)
    first = holder(1, ReadPriority(DECIDED - 1, 1))
    (share,) = site.plan(2, [first]).shares
    assert not share.crosses
    assert share.source == first.source


# A site whose replicas are cut otherwise than the trainer's: one program for all.

ROWS, COLUMNS = 12, 4
TENSORS = 5
NEAR, FAR, ELSEWHERE = "berlin", "paris", "oslo"


def rows(begin: int, end: int) -> Layout:
    shape, whole = (end - begin, COLUMNS), (ROWS, COLUMNS)
    return layout_of([TensorEntry(f"t{n}", "float32", 4, shape, whole, (begin, 0)) for n in range(TENSORS)])


WHOLE, TOP, BOTTOM = rows(0, ROWS), rows(0, 5), rows(5, ROWS)
CUT = (rows(0, 3), rows(3, 8), rows(8, ROWS))
LAYOUTS = {layout_digest(each): each for each in (WHOLE, TOP, BOTTOM, *CUT)}
ORIGINALS = tuple(sorted(map(layout_digest, CUT)))


@dataclass(frozen=True)
class Replica:
    """A replica of one shard or two: its number, which is that of its round, and its layouts."""

    number: int
    cut: tuple[Layout, ...]

    def source(self, shard: int) -> SourceId:
        return SourceId(f"agent-{self.number}-{shard}", 1, f"replica-{self.number}", shard)

    def holders(self, *, ready: bool = False) -> list[Holder]:
        turn = None if ready else ReadPriority(DECIDED, self.number)
        return [held_by(self.source(shard), each, len(self.cut), turn) for shard, each in enumerate(self.cut)]


def held_by(source: SourceId, layout: Layout, shards: int, turn: ReadPriority | None) -> Holder:
    digest = layout_digest(layout)
    key = root_key(shards, source.shard, digest)
    return Holder(
        source=source, key=key, layout=digest, shards=shards, root="root" if turn is None else None, turn=turn
    )


TRAINERS = [held_by(SourceId(f"trainer-{n}", 1, "trainer", n), each, 3, None) for n, each in enumerate(CUT)]
TOPOLOGY = Topology(
    {each.source.agent: AgentPlace("h", NEAR) for each in TRAINERS}
    | {f"agent-{n}-{shard}": AgentPlace(f"h{n}", FAR) for n in range(1, 12) for shard in (0, 1)}
    | {"away-0": AgentPlace("h", ELSEWHERE)}
)
STRANGER = held_by(SourceId("away-0", 1, "away", 0), rows(0, 7), 1, None)
"""Came to hold the version meanwhile, in a site and a layout of its own."""


def all_of(readers: list[Replica]) -> list[Holder]:
    return [*TRAINERS, *(each for reader in readers for each in reader.holders())]


def demand(reader: Replica, shard: int, pieces: Ranges | None = None, **more: object) -> PlanRequest:
    turn = ReadPriority(DECIDED, reader.number)
    return request(reader.source(shard), turn, root=None, promises=True, pieces=pieces, **more)


def found(reader: Replica, shard: int, holders: list[Holder]) -> Candidates:
    digest = layout_digest(reader.cut[shard])
    seat = ReaderShard(
        me=reader.source(shard), key=root_key(len(reader.cut), shard, digest), layout=digest, shards=len(reader.cut)
    )
    others = tuple(each for each in holders if each.source.replica != reader.source(0).replica)
    roll = ReplicaHolders(HolderSet(others), TOPOLOGY, ORIGINALS)
    return Candidates(seat, roll.holders, roll.topology, roll)


def compiled(layout: str, sources: LayoutSet) -> tuple[NumberedProgram, PieceSizes]:
    index = LayoutIndex({digest: LAYOUTS[digest] for digest in sources.layouts}, sources.originals)
    program = compile_program(layout, LAYOUTS[layout], index)
    execution = NumberedProgram(program, str(hash(encoded(program))))
    return execution, PieceSizes(execution.nbytes())


def plan(
    reader: Replica, shard: int, holders: list[Holder], asked: PlanRequest | None = None
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


@pytest.mark.long
@given(st.permutations(range(1, 7)), st.integers(2, 6), st.lists(st.booleans(), min_size=6, max_size=6))
def test_each_byte_crosses_once_whoever_has_come_meanwhile(order: list[int], count: int, meanwhile: list[bool]) -> None:
    """Each asks a planner of its own; some of them when a holder of another layout has come."""
    readers = [Replica(number, (TOP, BOTTOM)) for number in order[:count]]
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
    readers = [Replica(number, (WHOLE,) if place < 3 else (TOP, BOTTOM)) for place, number in enumerate(order)]
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
    readers = [Replica(number, (WHOLE,)) for number in (1, 2)]
    near = Replica(9, (TOP, BOTTOM))
    everybody = [*all_of(readers), *near.holders(ready=True)]
    for reader in readers:
        answer, _ = plan(reader, 0, everybody)
        assert {number_of(share.source) for share in answer.shares} == {near.number}
        assert not crossed(answer)
        assert not any(share.crosses for share in answer.shares)


@pytest.mark.long
@given(st.integers(2, 6), st.data())
def test_the_part_of_one_that_fell_out_crosses_once_more_at_most(count: int, data: st.DataObject) -> None:
    readers = [Replica(number, (WHOLE,)) for number in range(1, count + 1)]
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
    readers = [Replica(number, (WHOLE,)) for number in (1, 2)]
    everybody = [*all_of(readers), STRANGER]
    who = found(readers[0], 0, everybody)
    LAYOUTS.setdefault(STRANGER.layout, rows(0, 7))
    execution, sizes = compiled(who.seat.layout, LayoutSet((*ORIGINALS, STRANGER.layout), ORIGINALS))
    answer = decided(demand(readers[0], 0), who, execution, sizes)
    assert not any(share.crosses for share in answer.shares)
