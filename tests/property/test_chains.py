"""Readers of one version read from each other, and no chain of who reads from whom ever comes back to itself."""

from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.catalog.state import root_key
from tensorhub_common.protocol.plans import Plan, PlanRequest, ReadPriority, SourceId
from tensorhub_planner.catalog_view.holders import Candidates, Holder, HolderSet, ReaderShard
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.planning.decision import PlanDecision
from tensorhub_planner.primitives.limits import PlanLimits, Rates
from tensorhub_planner.primitives.piece_sizes import PieceSizes
from tensorhub_planner.primitives.topology import AgentPlace, Topology

KEY = root_key(1, 0, "layout")
SIZES = PieceSizes([4 * 1024 * 1024] * 64)
READERS = 8
SLOW = Rates(ingest_bps=125e6, source_bps=125e6, setup_s=0.001)
"""1 Gbit/s."""

places = st.builds(AgentPlace, st.sampled_from(("host-1", "host-2", "host-3")), st.sampled_from(("berlin", "paris")))
everywhere = st.lists(places, min_size=READERS + 1, max_size=READERS + 1)


class Reader(msgspec.Struct, frozen=True):
    """One that reads, and what a planner takes the others to be at the moment in which it asks."""

    number: int
    turn: ReadPriority
    ready: frozenset[int]
    """Of the others, which are ready; the trainer is number 0 and always is."""
    known: frozenset[int]


@st.composite
def readers(draw: st.DrawFn) -> list[Reader]:
    """Each has a turn of its own; they ask in any order, and the planner has heard of any of them."""
    pairs = st.builds(ReadPriority, st.integers(1, 4), st.integers(1, 50))
    turns = draw(st.lists(pairs, min_size=READERS, max_size=READERS, unique=True))
    some = st.frozensets(st.integers(1, READERS))
    made = [Reader(number, turn, draw(some), draw(some)) for number, turn in enumerate(turns, start=1)]
    return draw(st.permutations(made))


def source(number: int) -> SourceId:
    return SourceId(f"agent-{number}", 1, f"replica-{number}", 0)


def holder(number: int, turn: ReadPriority | None) -> Holder:
    return Holder(source=source(number), key=KEY, layout="layout", shards=1, root="root", turn=turn)


def asked(
    reader: Reader, turns: dict[int, ReadPriority], topology: Topology, ledger: LoadLedger, limits: PlanLimits
) -> Plan:
    others = [
        holder(number, None if number in reader.ready else turns[number])
        for number in sorted(reader.known - {reader.number})
    ]
    me = source(reader.number)
    demand = PlanRequest(
        model="m", version=1, replica=me.replica, shard=0, agent=me.agent, root="root", at_seq=1, turn=reader.turn
    )
    found = Candidates(
        ReaderShard(me=me, key=KEY, layout="layout", shards=1), HolderSet((holder(0, None), *others)), topology
    )
    answer = PlanDecision("job", demand, found, SIZES).decide(ledger, limits, 0.0)
    ledger.check()
    assert isinstance(answer, Plan)
    return answer


def assert_no_circle(waits_for: dict[int, set[int]]) -> None:
    left = set(waits_for)
    while left:
        ended = {number for number in left if not waits_for[number] & left}
        assert ended, f"{left} wait for each other: {waits_for}"
        left -= ended


@given(readers(), everywhere, st.sampled_from((SLOW, PlanLimits().network)))
def test_no_chain_comes_back_to_itself(some: Sequence[Reader], where: list[AgentPlace], network: Rates) -> None:
    """Whatever the planner knew at each question, and in whatever order they came."""
    turns = {reader.number: reader.turn for reader in some}
    topology = Topology({f"agent-{number}": place for number, place in enumerate(where)})
    limits = PlanLimits(network=network)
    ledger = LoadLedger(limits)
    waits_for: dict[int, set[int]] = {}
    for reader in some:
        found = asked(reader, turns, topology, ledger, limits)
        used = {int(share.source.agent.removeprefix("agent-")) for share in found.shares}
        waits_for[reader.number] = used - reader.ready - {0}
        assert all(turns[number] < reader.turn for number in waits_for[reader.number])
    assert_no_circle(waits_for)


@given(st.permutations(range(1, READERS + 1)))
def test_readers_of_one_publication_form_one_chain(order: list[int]) -> None:
    """All are decided by one command, each on a host of its own: the holder gives the bytes once, and so does each."""
    turns = {number: ReadPriority(7, number) for number in order}
    topology = Topology({f"agent-{number}": AgentPlace(f"host-{number}", "berlin") for number in range(READERS + 1)})
    limits = PlanLimits(network=SLOW)
    ledger = LoadLedger(limits)
    everybody = frozenset(order)
    upstream = {}
    for number in order:
        found = asked(Reader(number, turns[number], frozenset(), everybody), turns, topology, ledger, limits)
        (share,) = found.shares
        upstream[number] = int(share.source.agent.removeprefix("agent-"))
    assert upstream == {number: number - 1 for number in order}
