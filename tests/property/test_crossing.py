"""Readers of one version read from each other, and never in a circle; and their site takes each byte once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.property.one_version import crossed, holder, number_of, planned, request, source

from tensorhub_common.protocol.plans import Plan, ReadPriority
from tensorhub_common.protocol.ranges import intersect_ranges, merge_ranges
from tensorhub_planner.catalog_view.holders import Holder
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.primitives.limits import PlanLimits, Rates
from tensorhub_planner.primitives.piece_sizes import PieceSizes
from tensorhub_planner.primitives.topology import AgentPlace, Topology

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
