"""Readers of one version read from each other, and no chain of who reads from whom ever comes back to itself."""

from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.catalog.state import root_key
from tensorhub_common.protocol.plans import Demand, Plan, SourceId, Turn
from tensorhub_planner.catalog_view.holders import Found, Holder, Holders, Seat
from tensorhub_planner.load.ledger import Ledger
from tensorhub_planner.planning.decision import Question
from tensorhub_planner.primitives.limits import Limits, Rates
from tensorhub_planner.primitives.piece_sizes import Sizes
from tensorhub_planner.primitives.topology import Place, Topology

KEY = root_key(1, 0, "layout")
SIZES = Sizes([4 * 1024 * 1024] * 64)
READERS = 8
SLOW = Rates(ingest_bps=125e6, source_bps=125e6, setup_s=0.001)
"""1 Gbit/s."""

places = st.builds(Place, st.sampled_from(("host-1", "host-2", "host-3")), st.sampled_from(("berlin", "paris")))
everywhere = st.lists(places, min_size=READERS + 1, max_size=READERS + 1)


class Reader(msgspec.Struct, frozen=True):
    """One that reads, and what a planner takes the others to be at the moment in which it asks."""

    number: int
    turn: Turn
    ready: frozenset[int]
    """Of the others, which are ready; the trainer is number 0 and always is."""
    known: frozenset[int]


@st.composite
def readers(draw: st.DrawFn) -> list[Reader]:
    """Each has a turn of its own; they ask in any order, and the planner has heard of any of them."""
    pairs = st.builds(Turn, st.integers(1, 4), st.integers(1, 50))
    turns = draw(st.lists(pairs, min_size=READERS, max_size=READERS, unique=True))
    some = st.frozensets(st.integers(1, READERS))
    made = [Reader(number, turn, draw(some), draw(some)) for number, turn in enumerate(turns, start=1)]
    return draw(st.permutations(made))


def source(number: int) -> SourceId:
    return SourceId(f"agent-{number}", 1, f"replica-{number}", 0)


def holder(number: int, turn: Turn | None) -> Holder:
    return Holder(source=source(number), key=KEY, layout="layout", shards=1, root="root", turn=turn)


def asked(reader: Reader, turns: dict[int, Turn], topology: Topology, ledger: Ledger, limits: Limits) -> Plan:
    others = [
        holder(number, None if number in reader.ready else turns[number])
        for number in sorted(reader.known - {reader.number})
    ]
    me = source(reader.number)
    demand = Demand(
        model="m", version=1, replica=me.replica, shard=0, agent=me.agent, root="root", at_seq=1, turn=reader.turn
    )
    found = Found(Seat(me=me, key=KEY, layout="layout", shards=1), Holders((holder(0, None), *others)), topology)
    answer = Question("job", demand, found, SIZES).decide(ledger, limits, 0.0)
    ledger.check()
    assert isinstance(answer, Plan)
    return answer


def assert_no_circle(waits_for: dict[int, set[int]]) -> None:
    left = set(waits_for)
    while left:
        ended = {number for number in left if not waits_for[number] & left}
        assert ended, f"{left} wait for each other: {waits_for}"
        left -= ended


@given(readers(), everywhere, st.sampled_from((SLOW, Limits().network)))
def test_no_chain_comes_back_to_itself(some: Sequence[Reader], where: list[Place], network: Rates) -> None:
    """Whatever the planner knew at each question, and in whatever order they came."""
    turns = {reader.number: reader.turn for reader in some}
    topology = Topology({f"agent-{number}": place for number, place in enumerate(where)})
    limits = Limits(network=network)
    ledger = Ledger(limits)
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
    turns = {number: Turn(7, number) for number in order}
    topology = Topology({f"agent-{number}": Place(f"host-{number}", "berlin") for number in range(READERS + 1)})
    limits = Limits(network=SLOW)
    ledger = Ledger(limits)
    everybody = frozenset(order)
    upstream = {}
    for number in order:
        found = asked(Reader(number, turns[number], frozenset(), everybody), turns, topology, ledger, limits)
        (share,) = found.shares
        upstream[number] = int(share.source.agent.removeprefix("agent-"))
    assert upstream == {number: number - 1 for number in order}
