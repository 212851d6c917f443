"""A site takes each byte once: whatever its readers' places and order, and whoever falls out of their group."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_common.catalog.state import root_key
from tensorhub_common.protocol.plans import Plan, PlanRequest, ReadPriority, SourceId
from tensorhub_common.protocol.ranges import Ranges, intersect_ranges, merge_ranges
from tensorhub_planner.catalog_view.holders import Candidates, Holder, HolderSet, ReaderShard
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.planning.decision import PlanDecision
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_planner.primitives.piece_sizes import PieceSizes
from tensorhub_planner.primitives.topology import AgentPlace, Topology

KEY = root_key(1, 0, "layout")
READERS = 9
DECIDED = 7
TRAINER = 0

sizes_of = st.lists(st.integers(1, 4 * 1024 * 1024), min_size=1, max_size=60).map(PieceSizes)
hosts = st.lists(st.sampled_from(("host-1", "host-2", "host-3")), min_size=READERS, max_size=READERS)


@dataclass
class Site:
    """The trainer stands in one site, and so many readers in another one; one command has decided all their rounds."""

    readers: list[int]
    sizes: PieceSizes
    limits: PlanLimits
    topology: Topology

    def plan(
        self,
        reader: int,
        ledger: LoadLedger,
        pieces: Ranges | None,
        avoid: tuple[SourceId, ...],
        crossers: tuple[SourceId, ...] = (),
    ) -> Plan:
        others = [holder(each, ReadPriority(DECIDED, each)) for each in self.readers if each != reader]
        return self.plan_beside(others, reader, ledger, pieces, avoid, crossers)

    def plan_beside(
        self,
        others: Sequence[Holder],
        reader: int,
        ledger: LoadLedger,
        pieces: Ranges | None = None,
        avoid: tuple[SourceId, ...] = (),
        crossers: tuple[SourceId, ...] = (),
    ) -> Plan:
        me = source(reader)
        demand = PlanRequest(
            model="m",
            version=1,
            replica=me.replica,
            shard=0,
            agent=me.agent,
            root="root",
            at_seq=1,
            turn=ReadPriority(DECIDED, reader),
            promises=True,
            pieces=pieces,
            avoid=avoid,
            crossers=crossers,
        )
        found = Candidates(
            ReaderShard(me=me, key=KEY, layout="layout", shards=1),
            HolderSet((holder(TRAINER, None), *others)),
            self.topology,
        )
        answer = PlanDecision("job", demand, found, self.sizes).decide(ledger, self.limits, 0.0)
        assert isinstance(answer, Plan), answer
        return answer


@st.composite
def sites(draw: st.DrawFn) -> Site:
    count = draw(st.integers(1, READERS))
    places = {f"agent-{number + 1}": AgentPlace(host, "paris") for number, host in enumerate(draw(hosts))}
    return Site(
        draw(st.permutations(range(1, count + 1))),
        draw(sizes_of),
        PlanLimits(wan_streams=draw(st.integers(1, READERS + 1))),
        Topology({"agent-0": AgentPlace("host-1", "berlin"), **places}),
    )


def source(number: int) -> SourceId:
    return SourceId(f"agent-{number}", 1, f"replica-{number}", 0)


def holder(number: int, turn: ReadPriority | None) -> Holder:
    return Holder(source=source(number), key=KEY, layout="layout", shards=1, root="root", turn=turn)


def crossed(found: Plan) -> Ranges:
    return merge_ranges(each for share in found.shares if share.far for each in share.pieces)


@given(sites())
def test_each_byte_crosses_once(site: Site) -> None:
    """Each asks a planner of its own, which knows of no other question."""
    plans = {reader: site.plan(reader, LoadLedger(site.limits), None, ()) for reader in site.readers}
    over = [crossed(found) for found in plans.values()]
    assert merge_ranges(each for pieces in over for each in pieces) == site.sizes.all()
    assert sum(map(site.sizes.of, over)) == site.sizes.of(site.sizes.all())
    assert sum(share.streams for found in plans.values() for share in found.shares if share.far) <= max(
        site.limits.wan_streams, 1
    )
    for reader, found in plans.items():
        for share in found.shares:
            if share.crosses:
                giver = plans[int(share.source.agent.removeprefix("agent-"))]
                assert intersect_ranges(crossed(giver), share.pieces) == share.pieces, (
                    "whoever is waited for waits for nobody"
                )
            elif not share.far:
                assert int(share.source.agent.removeprefix("agent-")) < reader, "an earlier turn"


@settings(deadline=None)
@given(sites(), st.data())
def test_the_run_of_a_dead_crosser_crosses_once_more_at_most(site: Site, data: st.DataObject) -> None:
    """Those that are left ask at their own time, each for what it has not got of it."""
    dead = data.draw(st.sampled_from(site.readers))
    whole = site.plan(dead, LoadLedger(site.limits), None, ())
    lost, group = crossed(whole), whole.crossers
    left = [reader for reader in site.readers if reader != dead]
    # Some planners have heard by then that it is lost, and others have not. Who was not of the group may be, then.
    heard = replace(site, readers=left)
    plans = []
    for reader in left if lost else ():
        in_group = source(reader) in group
        view = heard if in_group and data.draw(st.booleans()) else site
        plans.append(view.plan(reader, LoadLedger(site.limits), lost, (source(dead),), group if in_group else ()))
    over = [crossed(found) for found in plans]
    assert sum(map(site.sizes.of, over)) == (site.sizes.of(lost) if left else 0)
    for found in plans:
        got = merge_ranges(each for share in found.shares for each in share.pieces)
        assert got == lost
        assert source(dead) not in [share.source for share in found.shares]


def test_a_group_of_one_entry_and_another_of_a_later_one_share_nothing_out() -> None:
    """Who comes later reads in the site."""
    topology = Topology(
        {"agent-0": AgentPlace("h", "berlin"), **{f"agent-{n}": AgentPlace(f"h{n}", "paris") for n in (1, 2)}}
    )
    site = Site([1, 2], PieceSizes([10] * 8), PlanLimits(), topology)
    first = holder(1, ReadPriority(DECIDED - 1, 1))
    (share,) = site.plan_beside([first], 2, LoadLedger(site.limits)).shares
    assert msgspec.structs.asdict(share)["crosses"] is False
    assert share.source == first.source
