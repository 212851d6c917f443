"""A stored plan is used again while all that it was decided by is unchanged, and never otherwise."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_common.catalog.state import root_key
from tensorhub_common.layout.layout import Layout, TensorEntry, layout_digest, layout_of
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.protocol.plans import LinkRate, Plan, PlanRequest, ReadPriority, SourceId
from tensorhub_planner.catalog_view.holders import Candidates, Holder, HolderSet, ReaderShard, ReplicaHolders
from tensorhub_planner.compiler.compiler import compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.load.load import ReaderId
from tensorhub_planner.planning.decision import ProgramPlanDecision
from tensorhub_planner.planning.plan_cache import PlanCache
from tensorhub_planner.primitives.limits import PlanLimits
from tensorhub_planner.primitives.piece_sizes import PieceSizes
from tensorhub_planner.primitives.topology import AgentPlace, Topology

ROWS = 24
LIMITS = PlanLimits()
STRANGER = ReaderId("job", "policy", "evaluator", 0)


def rows(begin: int, end: int) -> Layout:
    return layout_of([TensorEntry("w", "bfloat16", 2, (end - begin, 4), (ROWS, 4), (begin, 0))])


SOURCES = [rows(at, at + 6) for at in range(0, ROWS, 6)] * 2
"""Four ranks of a trainer, and four of another one that is cut alike."""
READERS = [rows(at, at + 8) for at in range(0, ROWS, 8)]
EXECUTIONS = [
    NumberedProgram(
        compile_program(layout_digest(reader), reader, LayoutIndex({layout_digest(s): s for s in SOURCES})), "p"
    )
    for reader in READERS
]


def trainers(version: int) -> list[Holder]:
    """Return all ranks as they stand at a version; each version has roots of its own."""
    return [
        Holder(
            source=SourceId(f"t{rank}", 1, f"trainer-{rank // 4}", rank % 4),
            key=root_key(4, rank % 4, layout_digest(layout)),
            layout=layout_digest(layout),
            shards=4,
            root=f"{version}-{rank}",
        )
        for rank, layout in enumerate(SOURCES)
    ]


class Cluster:
    """A planner, and what the catalog says to it."""

    def __init__(self) -> None:
        self.kept, self.ledger, self.now = PlanCache(), LoadLedger(LIMITS), 0.0
        self.places = {f"t{rank}": AgentPlace(f"host-{rank}", "berlin") for rank in range(8)}
        self.places |= {f"r{shard}": AgentPlace(f"engine-{shard}", "berlin") for shard in range(3)}

    def found(
        self, shard: int, version: int, holders: list[Holder] | None = None, *, draining: bool = False
    ) -> Candidates:
        layout = layout_digest(READERS[shard])
        seat = ReaderShard(
            me=SourceId(f"r{shard}", 1, "rollout", shard), key=root_key(3, shard, layout), layout=layout, shards=3
        )
        able = tuple(trainers(version) if holders is None else holders)
        roll = ReplicaHolders(HolderSet(able, draining=draining), Topology(self.places), ())
        return Candidates(seat, roll.holders, roll.topology, roll)

    def ask(self, shard: int, version: int, found: Candidates | None = None, **changes: Any) -> Plan:
        """Ask for everything of a version."""
        found = found or self.found(shard, version)
        wants = msgspec.structs.replace(demand(shard, version), **changes)
        execution = EXECUTIONS[shard]
        sizes = PieceSizes.repeated(execution.runs())
        answer = ProgramPlanDecision("job", wants, found, execution, sizes).decide(
            self.kept, self.ledger, LIMITS, self.now
        )
        self.ledger.check()
        assert isinstance(answer, Plan), answer
        by_source = {holder.source: holder for holder in found.holders.able}
        for share in answer.shares:
            assert (share.root, share.layout) == (by_source[share.source].root, by_source[share.source].layout)
        return answer

    def finish(self) -> None:
        """Let the log say that all reads are over."""
        for shard in range(3):
            self.ledger.done(ReaderId("job", "policy", "rollout", shard))


def demand(shard: int, version: int) -> PlanRequest:
    return PlanRequest(
        model="policy",
        version=version,
        replica="rollout",
        shard=shard,
        agent=f"r{shard}",
        root=None,
        at_seq=version,
        turn=ReadPriority(version, version),
        program="p",
    )


@pytest.fixture
def cluster() -> Cluster:
    """Return a cluster that has read version 1."""
    made = Cluster()
    for shard in range(3):
        made.ask(shard, 1)
    made.finish()
    return made


def is_again(plan: Plan) -> bool:
    return plan.why.startswith("as version ")


@given(st.permutations([0, 1, 2]), st.integers(2, 9))
def test_the_next_version_is_read_as_the_first_one(order: list[int], version: int) -> None:
    """Whoever asks first: same units from the same sources, with the new roots; and it is proved in full (`ask`)."""
    cluster = Cluster()
    first = {shard: cluster.ask(shard, 1) for shard in range(3)}
    cluster.finish()
    for shard in order:
        plan = cluster.ask(shard, version)
        assert is_again(plan)
        assert plan.version == version
        same = [(share.source, share.pieces, share.nbytes) for share in first[shard].shares]
        assert [(share.source, share.pieces, share.nbytes) for share in plan.shares] == same
        assert all((share.root or "").startswith(f"{version}-") for share in plan.shares)


def test_a_version_that_is_asked_for_twice_is_told_as_the_first_time() -> None:
    """After an answer that came too late."""
    cluster = Cluster()
    assert cluster.ask(0, 1) == cluster.ask(0, 1)


def changed(**changes: Any) -> Callable[[list[Holder], int], list[Holder]]:
    """Change a holder, or with `source=` whose it is."""

    def change(holders: list[Holder], at: int) -> list[Holder]:
        about = {**changes}
        if "source" in about:
            about["source"] = msgspec.structs.replace(holders[at].source, **about["source"])
        return [*holders[:at], msgspec.structs.replace(holders[at], **about), *holders[at + 1 :]]

    return change


CHANGES: dict[str, Callable[[list[Holder], int], list[Holder]]] = {
    "lost": lambda holders, at: holders[:at] + holders[at + 1 :],
    "moved": changed(source={"agent": "r0"}),
    "registered again": changed(source={"incarnation": 2}),
    "one more": lambda holders, at: [*holders, msgspec.structs.replace(holders[at], source=SourceId("r0", 1, "x", 0))],
    "half-filled": changed(turn=ReadPriority(1, 1)),
    "another layout": changed(layout="other"),
}


@given(st.sampled_from(list(CHANGES)), st.integers(0, 7), st.integers(0, 2))
def test_holders_that_stand_otherwise_end_it(change: str, at: int, shard: int) -> None:
    cluster = Cluster()
    cluster.ask(shard, 1)
    cluster.finish()
    holders = CHANGES[change](trainers(2), at)
    plan = cluster.ask(shard, 2, cluster.found(shard, 2, holders))
    assert not is_again(plan)
    assert {share.source for share in plan.shares} <= {holder.source for holder in holders}


def test_an_avoided_source_never_comes_again_and_who_asks_for_a_rest_gets_that(cluster: Cluster) -> None:
    """And what went wrong with the plan before it does not come again with the next version."""
    source = cluster.ask(0, 2).shares[0].source
    plan = cluster.ask(0, 2, avoid=(source,))
    assert not is_again(plan)
    assert source not in {share.source for share in plan.shares}
    cluster.finish()
    assert not is_again(cluster.ask(0, 3))
    cluster.finish()
    assert is_again(cluster.ask(0, 4))
    assert not is_again(cluster.ask(0, 4, pieces=((0, 1),)))
    cluster.finish()
    assert not is_again(cluster.ask(0, 5))


def test_other_readers_of_its_sources_end_it(cluster: Cluster) -> None:
    """What a stranger reads is load that was not there; the reader's own siblings were there as well."""
    plan = cluster.ask(0, 2)
    cluster.finish()
    cluster.ledger.assign(STRANGER, plan, 0.0)
    assert not is_again(cluster.ask(0, 3))
    cluster.finish()
    cluster.ledger.done(STRANGER)
    assert not is_again(cluster.ask(0, 4)), "what was decided beside a stranger is not kept"
    cluster.finish()
    assert is_again(cluster.ask(0, 5))


def test_rates_that_differ_by_more_than_they_are_wrong_by_end_it(cluster: Cluster) -> None:
    def rate(bps: int) -> tuple[LinkRate, ...]:
        return (LinkRate("site/host-0", "ucxx", bps, 5, 1.0),)

    cluster.ask(0, 2, rates=rate(1000))
    cluster.finish()
    for version, bps, holds in ((3, 1300, True), (4, 1500, False), (5, 1100, True), (6, 500, False)):
        assert is_again(cluster.ask(0, version, rates=rate(bps))) is holds
        cluster.finish()
    assert not is_again(cluster.ask(0, 7)), "a link that counts no more"


def test_so_many_are_kept() -> None:
    cluster = Cluster()
    cluster.kept = PlanCache(plans_max=2)
    for shard in range(3):
        cluster.ask(shard, 1)
    cluster.finish()
    assert len(cluster.kept) == 2
    assert [is_again(cluster.ask(shard, 2)) for shard in (1, 2, 0)] == [True, True, False]
    cluster.finish()
    shares = len(cluster.ask(0, 3).shares)
    for shares_max, kept in ((shares - 1, 0), (shares, 1), (2 * shares - 1, 1)):
        cluster.kept = PlanCache(shares_max=shares_max)
        for shard in (1, 0):
            cluster.finish()
            cluster.ask(shard, 3)
        assert len(cluster.kept) == kept
