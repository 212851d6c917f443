"""A read and plans of another layout: taken before the first byte, by units, and never in place of pieces."""

import pytest
from tests.unit.agent.core.scene import MODEL, NBYTES, OneAgent, digests_of

from tensorhub_agent.core.effects import (
    BatchDone,
    BreakLease,
    Digested,
    DigestMemory,
    FailCall,
    PlanReceived,
    ReadBatch,
    RequestLease,
    RequestPlan,
    SourceLost,
    SourceOpened,
)
from tensorhub_agent.core.operations.read import REPLAN_S
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_agent.leases.table import LeaseTable
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.primitives.program_units import PieceCompletion
from tensorhub_agent.transfer.source import Source, SourcePhase
from tensorhub_agent.transfer.timeouts import deadline_of
from tensorhub_common.layout.layout import Layout, TensorEntry, layout_of, pieces
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.protocol.leases import LeaseGrant, LeaseRefusal, LeaseRequest
from tensorhub_common.protocol.plans import Plan, ReadPriority, Refusal, Share, SourceId
from tensorhub_planner.compiler.compiler import compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex

OTHER = SourceId("other", 1, "engine", 0)
NOBODY = Refusal(error="VersionUnavailable", reason="nobody")


def layout(*more: str) -> Layout:
    """Return three tensors, and more."""
    entries = [TensorEntry(f"t{n}", "uint8", 1, (size,), (size,), (0,)) for n, size in enumerate(NBYTES)]
    return layout_of([*entries, *(TensorEntry(name, "uint8", 1, (1,), (1,), (0,)) for name in more)])


def completion(digest: str) -> PieceCompletion:
    program = compile_program("mine", layout(), LayoutIndex({"theirs": layout("a")}))
    return PieceCompletion(NumberedProgram(program, digest), pieces(layout()))


def program_for(reader: OneAgent, key: ShardKey, fills: str | None = None) -> PlanReceived:
    """Answer the last question with a plan by a program, all from a source of another layout."""
    mine = reader.core.shards[key].spec.layout
    execution = NumberedProgram(
        compile_program(fills or mine, layout(), LayoutIndex({"theirs": layout("a")})), "program"
    )
    asked = reader.last(RequestPlan)
    assert asked is not None
    share = Share(
        source=OTHER, transport="local", pieces=((0, 3),), nbytes=12, why="", layout="theirs", root="their root"
    )
    answer = Plan(version=asked.demand.version, shares=(share,), why="", program="program")
    return PlanReceived(key, asked.number, answer, execution, PieceCompletion(execution, pieces(layout())))


def told(reader: OneAgent, news: PlanReceived) -> None:
    reader.do(reader.core.on_outcome(news, reader.now))


def refuse(reader: OneAgent, key: ShardKey) -> RequestPlan:
    asked = reader.last(RequestPlan)
    assert asked is not None
    told(reader, PlanReceived(key, asked.number, NOBODY))
    return asked


def opened(reader: OneAgent) -> list[RequestLease]:
    return [effect for effect in reader.seen if isinstance(effect, RequestLease)]


def begun(*, digests: bool = True) -> tuple[OneAgent, ShardKey]:
    """Let a reader ask for its plan; `digests`: whether the publisher makes them."""
    trainer = OneAgent("elsewhere", digests=digests)
    trainer.join()
    trainer.register("trainer")
    reader = OneAgent("agent-1", catalog=trainer.catalog)
    reader.join()
    key = reader.register("rollout")
    trainer.publish(trainer.key("trainer"), "a")
    trainer.log()
    reader.read(key)
    reader.log()
    return reader, key


def bring(reader: OneAgent, key: ShardKey) -> None:
    """Let the source that was opened last bring everything."""
    opening = opened(reader)[-1]
    reader.do(reader.core.on_outcome(SourceOpened(key, opening.source, b""), reader.now))
    reader.log()
    post = reader.last(ReadBatch)
    assert post is not None
    assert post.source == opening.source
    reader.do(reader.core.on_outcome(BatchDone(key, post.source, post.batch, b""), reader.now))
    reader.confirmed(key)
    reader.closed(key)


def test_a_program_that_comes_before_the_first_byte_is_read_by() -> None:
    reader, key = begun()
    told(reader, program_for(reader, key))
    (opening,) = opened(reader)
    assert opening.program is not None
    assert opening.root == "their root"


def test_a_program_that_fills_another_layout_is_no_plan() -> None:
    """Its boxes would be places in other memory, and what came hashed as this shard's own."""
    reader, key = begun()
    told(reader, program_for(reader, key, fills="another"))
    assert not opened(reader)
    assert not any(isinstance(effect, FailCall) for effect in reader.seen), "the log decides anew"
    reader.log()
    reader.tick(REPLAN_S)
    reader.log()
    told(reader, program_for(reader, key))
    (opening,) = opened(reader)
    assert opening.program is not None


@pytest.mark.parametrize("writes", [False, True])
def test_a_program_that_comes_when_all_sources_are_gone_and_have_brought_nothing_is_read_by(writes: bool) -> None:  # noqa: FBT001
    """Also when the log knows of its leases already, and when it has begun to write."""
    reader, key = begun()
    reader.plan(key)
    reader.opened(key, "a")
    if writes:
        reader.log()
    lost = opened(reader)[-1]
    reader.do(reader.core.on_outcome(SourceLost(key, lost.source, "it died"), reader.now))
    reader.closed(key)
    told(reader, program_for(reader, key))
    if not writes:
        reader.log()
    opening = opened(reader)[-1]
    assert opening.program is not None
    assert reader.memory(key) is MemoryState.FILLING
    bring(reader, key)
    digest = reader.last(DigestMemory)
    assert digest is not None
    assert digest.filled
    reader.do(reader.core.on_outcome(Digested(key, digest.number, digests_of("a")), reader.now))
    reader.log()
    assert reader.memory(key) is MemoryState.READY


def lose_all_but_one_piece(reader: OneAgent, key: ShardKey) -> None:
    """Begin to write, prove one piece, and lose the only source."""
    reader.plan(key)
    reader.opened(key, "a")
    reader.log()
    post = reader.last(ReadBatch)
    assert post is not None
    digests = digests_of("a")
    damaged = digests[: len(digests) // 3] + b"x" * (len(digests) * 2 // 3)
    reader.do(reader.core.on_outcome(BatchDone(key, post.source, post.batch, damaged), reader.now))
    reader.do(reader.core.on_outcome(SourceLost(key, post.source, "it died"), reader.now))
    reader.closed(key)


def test_a_program_that_comes_for_the_rest_of_the_pieces_is_no_plan() -> None:
    """Its ranges are of units: with digests off, nothing would show that other bytes were read for them."""
    reader, key = begun()
    lose_all_but_one_piece(reader, key)
    opening = opened(reader)
    for _ in range(40):
        told(reader, program_for(reader, key))
        reader.tick(0.1)
        reader.log()
    assert opened(reader) == opening
    end = reader.last(FailCall)
    assert end is not None
    assert end.error == "VersionUnavailable"
    assert "other layouts" in end.message


def test_pieces_that_are_proven_do_not_bar_the_way_to_other_layouts() -> None:
    """When nobody has the others, all are asked for: who is left may have other layouts alone."""
    reader, key = begun()
    lose_all_but_one_piece(reader, key)
    for _ in range(40):
        refuse(reader, key)
        reader.tick(0.1)
        reader.log()
    assert reader.memory(key) is MemoryState.EMPTY
    reader.read(key)
    reader.log()
    assert refuse(reader, key).demand.pieces == ((1, 2),)
    reader.log()
    reader.tick(REPLAN_S)
    reader.log()
    again = reader.last(RequestPlan)
    assert again is not None
    assert again.demand.pieces == ((0, 3),)
    told(reader, program_for(reader, key))
    assert opened(reader)[-1].program is not None


def test_what_hashes_to_another_root_than_the_log_keeps_is_no_version_and_its_readers_are_told() -> None:
    reader, key = begun()
    told(reader, program_for(reader, key))
    me = SourceId("agent-1", 1, "rollout", 0)
    ask = LeaseRequest(
        job="run-7", model=MODEL, source=me, version=1, root=None, reader=OTHER, turn=ReadPriority(999, 999), units=True
    )
    assert isinstance(reader.core.lease_asked(ask, "later", "ticket", "here", reader.now), LeaseGrant)
    assert reader.core.redeemed("ticket", reader.now) is not None
    bring(reader, key)
    assert reader.last(BreakLease) is None
    digest = reader.last(DigestMemory)
    assert digest is not None
    reader.do(reader.core.on_outcome(Digested(key, digest.number, digests_of("b")), reader.now))
    reader.log()
    end, broken = reader.last(FailCall), reader.last(BreakLease)
    assert end is not None
    assert end.error == "IntegrityError"
    assert broken is not None
    assert broken.lease == "later"
    assert reader.memory(key) is MemoryState.EMPTY


def test_what_the_log_has_no_digest_of_is_not_hashed() -> None:
    """Its publisher makes none, so any root that were said of it would be another one."""
    reader, key = begun(digests=False)
    told(reader, program_for(reader, key))
    bring(reader, key)
    reader.log()
    assert reader.last(DigestMemory) is None
    assert reader.memory(key) is MemoryState.READY


def test_who_opens_a_lease_when_all_stands_there_is_told_of_all_without_digests_too() -> None:
    table, key = LeaseTable(), ShardKey(MODEL, "middle", 0)
    table.begin_fill(key, 1, None, ReadPriority(1, 1), 3, units=completion("program"))
    middle = SourceId("a", 1, "middle", 0)
    ask = LeaseRequest(
        job="j", model=MODEL, source=middle, version=1, root="none", reader=OTHER, turn=ReadPriority(2, 2), units=True
    )
    assert isinstance(table.grant(ask, "lease", "ticket", "here", 0.0), LeaseGrant)
    table.offer(key, 1, "none", b"")
    lease = table.redeem("ticket", 0.0)
    assert lease is not None
    assert lease.pieces() == ((0, 3),)


MIDDLE = ShardKey(MODEL, "middle", 0)


def filled_by_a_program() -> LeaseTable:
    table = LeaseTable()
    table.begin_fill(MIDDLE, 1, None, ReadPriority(2, 2), 3, units=completion("program"))
    return table


def asks(table: LeaseTable, turn: ReadPriority, program: str, *, promises: bool) -> LeaseGrant | LeaseRefusal:
    ask = LeaseRequest(
        job="j",
        model=MODEL,
        source=SourceId("a", 1, "middle", 0),
        version=1,
        root=None,
        reader=OTHER,
        turn=turn,
        units=True,
        promises=promises,
        program=program,
    )
    answer = table.grant(ask, f"lease-{turn.round}", f"ticket-{turn.round}", "here", 0.0)
    assert answer is not None
    return answer


def test_whoever_counts_on_promises_goes_by_the_same_program() -> None:
    """The units of another one are other bytes: what was promised of these would say nothing of those."""
    table = filled_by_a_program()
    assert isinstance(asks(table, ReadPriority(2, 3), "another", promises=True), LeaseRefusal)
    granted = asks(table, ReadPriority(2, 1), "program", promises=True)
    assert isinstance(granted, LeaseGrant)
    assert (granted.promises, granted.program) == (True, "program")
    assert table.counts_on_promises(MIDDLE)


def test_readers_of_other_programs_are_told_of_pieces_and_those_of_the_same_of_units() -> None:
    table = filled_by_a_program()
    for number, program in enumerate(("program", "another"), 3):
        granted = asks(table, ReadPriority(2, number), program, promises=False)
        assert isinstance(granted, LeaseGrant)
        assert (granted.promises, granted.program) == (False, "program" if program == "program" else None)
        assert table.redeem(f"ticket-{number}", 0.0) is not None
    assert table.pieces_available(MIDDLE, [(0, 1)]) == ["lease-4"]
    assert table.prove_units(MIDDLE, [(0, 2)]) == ["lease-3"]
    late = asks(table, ReadPriority(2, 5), "program", promises=True)
    assert isinstance(late, LeaseGrant)
    lease = table.redeem("ticket-5", 0.0)
    assert lease is not None
    assert lease.pieces() == ((0, 2),)
    assert table.promise(MIDDLE, [(2, 1)], []) is not None
    assert lease.promised() == ((2, 1),)
    first = NBYTES[0]
    assert not table.lacks_units("lease-5", 0, first)
    assert table.lacks_units("lease-4", 0, first), "it is told of pieces"
    table.offer(MIDDLE, 1, "root", b"")
    assert not table.lacks_units("lease-5", 0, sum(NBYTES))
    assert lease.pieces() == ((0, 3),)


def test_a_question_for_units_waits_until_the_plan_says_by_which_program_the_shard_is_filled() -> None:
    """Refused, the whole of its part would cross once more."""
    reader, key = begun()
    asked = LeaseRequest(
        job="j",
        model=MODEL,
        source=SourceId("agent-1", 1, key.replica, key.shard),
        version=1,
        root=None,
        reader=OTHER,
        turn=ReadPriority(1 << 30, 1),
        units=True,
        promises=True,
        program="program",
    )
    assert reader.core.lease_asked(asked, "lease", "ticket", "here", reader.now) is None
    told(reader, program_for(reader, key))
    assert isinstance(reader.core.lease_asked(asked, "lease", "ticket", "here", reader.now), LeaseGrant)


def test_a_source_that_never_answers_an_early_question_has_a_bound() -> None:
    share = Share(source=OTHER, transport="ucxx", pieces=(), nbytes=0, why="")
    source = Source(1, share, SourcePhase.OPEN, 0.0)
    source.unconfirmed.append((0, 1))
    source.check_early()
    assert deadline_of(source) == 5.0
