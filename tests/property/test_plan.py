"""What holds of every plan, whoever has what: each wanted piece once, from somebody who has it and was not avoided."""

from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.catalog.state import root_key
from tensorhub_common.protocol.plans import (
    LinkRate,
    Plan,
    PlanRequest,
    ReadPriority,
    Refusal,
    SourceId,
    Transport,
    has_priority,
)
from tensorhub_common.protocol.ranges import Range, Ranges, merge_ranges
from tensorhub_planner.catalog_view.holders import Holder, HolderSet, ReaderShard
from tensorhub_planner.load.load import AgentTransport, Load
from tensorhub_planner.planning.plan import OnlyOtherLayouts, PlanOutcome, make_plan
from tensorhub_planner.planning.verifier import chain_ends, servable_pieces
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_planner.primitives.piece_sizes import PieceSizes
from tensorhub_planner.primitives.topology import AgentPlace, Topology

PIECES = 24
ME = SourceId("me", 1, "reader", 0)
AGENTS = tuple("abcdefgh")
KEYS = {"mine": root_key(1, 0, "mine"), "other": root_key(1, 0, "other")}


class Case(msgspec.Struct, frozen=True):
    """All that a plan depends on."""

    demand: PlanRequest
    sizes: PieceSizes
    holders: tuple[Holder, ...]
    topology: Topology
    load: dict[AgentTransport, Load]
    limits: PlanLimits

    def answer(self) -> PlanOutcome:
        seat = ReaderShard(me=ME, key=KEYS["mine"], layout="mine", shards=1)
        return make_plan(self.demand, seat, self.sizes, HolderSet(self.holders), self.topology, self.load, self.limits)

    def wanted(self) -> set[int]:
        return set(range(len(self.sizes))) if self.demand.pieces is None else numbers(self.demand.pieces)


def numbers(ranges: tuple[Range, ...]) -> set[int]:
    return {piece for first, count in ranges for piece in range(first, first + count)}


ranges = st.lists(st.tuples(st.integers(0, PIECES - 1), st.integers(1, PIECES)), max_size=4).map(
    lambda some: tuple((first, min(count, PIECES - first)) for first, count in some)
)
places = st.builds(
    AgentPlace,
    st.sampled_from(("host-1", "host-2")),
    st.sampled_from(("berlin", "paris")),
    st.sampled_from(("", "r07")),
)
sources = st.builds(SourceId, st.sampled_from(AGENTS), st.integers(1, 2), st.just("replica"), st.just(0))
links = st.sampled_from(("host", "rack/host-1", "rack/host-2", "site/host-1", "site/host-2", "wan/paris", "nonsense"))
rates = st.lists(
    st.builds(
        LinkRate,
        links,
        st.sampled_from(("local", "ucxx")),
        st.integers(-1, 2**40),
        st.integers(0, 9),
        st.sampled_from((0.0, 400.0, -1.0)),
    ),
    max_size=6,
).map(tuple)
turns = st.builds(ReadPriority, st.integers(1, 4), st.integers(1, 4))


@st.composite
def holders(draw: st.DrawFn, source: SourceId, *, whole: bool) -> Holder:
    layout = draw(st.sampled_from(("mine", "mine", "mine", "other")))
    return Holder(
        source=source,
        key=KEYS[layout],
        layout=layout,
        shards=1,
        root=draw(st.sampled_from(("right", "right", "right", "wrong"))),
        pieces=None if whole else draw(st.none() | ranges.map(merge_ranges)),
        turn=None if whole else draw(st.none() | turns),
        depth=draw(st.integers(1, 9)),
    )


@st.composite
def cases(draw: st.DrawFn, *, whole: bool = False) -> Case:
    """Any holders; with `whole` they have everything, as all of the catalog's have, and nothing was measured."""
    known = draw(st.lists(sources, unique=True, max_size=8))
    transports: st.SearchStrategy[Transport] = st.sampled_from(("local", "ucxx"))
    lanes = st.tuples(st.sampled_from(AGENTS), transports)
    return Case(
        demand=PlanRequest(
            model="policy",
            version=1,
            replica="reader",
            shard=0,
            agent="me",
            root=draw(st.sampled_from((None, "right"))),
            at_seq=1,
            pieces=draw(st.none() | ranges),
            avoid=tuple(draw(st.lists(sources, max_size=4))),
            turn=draw(st.none() | turns),
            rates=() if whole else draw(rates),
        ),
        sizes=PieceSizes(draw(st.lists(st.integers(1, 2**40), min_size=PIECES, max_size=PIECES))),
        holders=tuple(draw(holders(source, whole=whole)) for source in known),
        topology=Topology(draw(st.dictionaries(st.sampled_from((*AGENTS, "me")), places))),
        load=draw(st.dictionaries(lanes, st.builds(Load, st.integers(1, 9), st.integers(0, 2**42)))),
        limits=PlanLimits(stripes_max=draw(st.integers(1, 16)), slack=draw(st.sampled_from((0.0, 0.1, 1.0)))),
    )


def usable(case: Case) -> dict[SourceId, set[int]]:
    """Return, in the plainest way, which pieces each holder may give to the reader."""
    everything: Ranges = case.sizes.all()
    ends = chain_ends(case.holders, KEYS["mine"], everything, draining=False)
    return {
        holder.source: numbers(servable_pieces(holder, everything, case.demand.turn, ends))
        for holder in case.holders
        if holder.key == KEYS["mine"]
        and holder.source not in case.demand.avoid
        and (holder.turn is None or has_priority(holder.turn, case.demand.turn))
        and (case.demand.root is None or holder.root == case.demand.root)
    }


@given(cases())
def test_an_answer_is_right(case: Case) -> None:
    """All that holds of every answer is looked at in each case: to draw one costs more than all of it."""
    found, able = case.answer(), usable(case)
    refused_only_if_no_source_is_left(case, found, able)
    if isinstance(found, Plan):
        covers_exactly_what_is_wanted(case, found, able)
    equal_for_equal_arguments(case, found)
    if not isinstance(found, OnlyOtherLayouts):
        assert msgspec.json.decode(msgspec.json.encode(found), type=Plan | Refusal) == found, "it fits the wire"


def refused_only_if_no_source_is_left(case: Case, found: PlanOutcome, able: dict[SourceId, set[int]]) -> None:
    """A refusal, or a word about layouts, if and only if some wanted piece has nobody who may give it."""
    givers = {source for source, pieces in able.items() if pieces & case.wanted() or not case.wanted()}
    covered = case.wanted() <= set().union(*able.values()) and bool(givers)
    assert isinstance(found, Plan) == covered
    if isinstance(found, Refusal):
        assert found.error == "VersionUnavailable"
        assert found.reason
    if isinstance(found, OnlyOtherLayouts):
        assert case.holders
        assert all(holder.key != KEYS["mine"] for holder in case.holders)


def covers_exactly_what_is_wanted(case: Case, found: Plan, able: dict[SourceId, set[int]]) -> None:
    """Each wanted piece from one source, which may give it; bytes and versions are right, no source comes twice."""
    read = Counter(piece for share in found.shares for piece in numbers(share.pieces))
    assert read == Counter(dict.fromkeys(case.wanted(), 1))
    for share in found.shares:
        assert numbers(share.pieces) <= able[share.source]
        assert share.pieces == merge_ranges(share.pieces)
        assert share.nbytes == case.sizes.of(share.pieces) > 0
        assert share.why
    assert len({share.source for share in found.shares}) == len(found.shares)
    assert found.why


def equal_for_equal_arguments(case: Case, found: PlanOutcome) -> None:
    """Also when the holders come in another order: what counts is who they are."""
    assert found == case.answer()
    if isinstance(found, Plan):
        again = msgspec.structs.replace(case, holders=tuple(reversed(case.holders))).answer()
        assert isinstance(again, Plan)
        assert again.shares == found.shares


@given(cases(whole=True))
def test_the_nearest_whole_holders_are_read(case: Case) -> None:
    """All shares come from one distance, no usable holder is nearer, and the least loaded there gives something."""
    found, able = case.answer(), usable(case)
    if not isinstance(found, Plan) or not found.shares:
        return
    distance = {source: case.topology.distance("me", source.agent) for source in able}
    nearest = min(distance.values())
    assert {distance[share.source] for share in found.shares} == {nearest}
    transport = found.shares[0].transport
    loads = {s: case.load.get((s.agent, transport), Load(0, 0)) for s in able if distance[s] == nearest}
    least = min((busy.readers, busy.nbytes) for busy in loads.values())
    assert any((loads[share.source].readers, loads[share.source].nbytes) == least for share in found.shares)
    if transport == "local":
        assert len(found.shares) == 1
    assert all(len(share.pieces) <= max(1, len(case.demand.pieces or ())) for share in found.shares), "runs are whole"
