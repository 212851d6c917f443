"""From whom a read reads: plans, programs over other layouts, what it may take patches from, and what it measures."""

from typing import Any

import pytest

from tensorhub_agent.core.effects import (
    BatchDone,
    BreakLease,
    BytesReceived,
    Digested,
    DigestMemory,
    FailCall,
    PlanReceived,
    ReadBatch,
    RequestLease,
    RequestPlan,
)
from tensorhub_agent.core.operations.read import REPLAN_S
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_agent.leases.reader_load import reader_loads
from tensorhub_agent.primitives.ids import BaseVersion, ShardKey
from tensorhub_agent.primitives.program_units import PieceCompletion
from tensorhub_agent.rates import link_rates
from tensorhub_agent.rates.link_rates import SLOW_SAMPLES_MIN, LinkSample
from tensorhub_agent.transfer.limits import DEFAULT_LIMITS
from tensorhub_agent.transfer.plan_requests import NO_ANSWER, PLAN_AGAIN_S
from tensorhub_agent.transfer.source import Source, SourcePhase
from tensorhub_agent.transfer.timeouts import deadline_of
from tensorhub_common.layout.layout import Layout, TensorEntry, layout_of, pieces
from tensorhub_common.programs.numbered_program import NumberedProgram
from tensorhub_common.protocol.heartbeat import ReaderLoad, ServingLoad
from tensorhub_common.protocol.leases import LeaseGrant
from tensorhub_common.protocol.plans import LinkRate, Plan, ReadPriority, Refusal, Share, SourceId
from tensorhub_common.protocol.worker import EncodedBytes
from tensorhub_planner.compiler.compiler import compile_program
from tensorhub_planner.compiler.layout_index import LayoutIndex
from tensorhub_simulator.drivers.agent import MODEL, NBYTES, NOBODY, OneAgent, digests_of, joined, pair, root_of

OTHER = SourceId("other", 1, "engine", 0)
SILENT = Refusal(error=NO_ANSWER, reason="no planner listens")


def asking(*, digests: bool = True) -> tuple[OneAgent, ShardKey, int]:
    """A reader that has asked for its plan; `digests`: whether the publisher makes them."""
    trainer = joined("elsewhere", digests=digests)
    trainer.register("trainer")
    reader = joined("agent-1", beside=trainer)
    key = reader.register("rollout")
    trainer.publish_next("a")
    call = reader.logged(reader.read(key))
    return reader, key, call


# Plans.


def test_a_planner_that_is_silent_is_asked_again_as_long_as_the_call_may_last() -> None:
    """A planner that is being restarted says nothing about who holds the version. At the end the call says so."""
    reader, key, call = asking()
    for _ in range(4):
        reader.refuse_plan(key, SILENT)
        reader.tick(PLAN_AGAIN_S)
    reader.tick(2.0)
    reader.tick(PLAN_AGAIN_S)
    assert reader.result(call) is None
    reader.plan(key)
    reader.opened(key, "a")
    assert "Granted" in reader.said()
    reader, key, call = asking()
    reader.refuse_plan(key, SILENT)
    reader.tick_and_log(10.0)
    assert reader.result(call) == "RoundTimeout"
    assert "no plan: no planner listens. See that tensorhub-planner runs" in reader.why(call)


@pytest.mark.parametrize("refusal", [SILENT, Refusal(error="VersionUnavailable", reason="", is_held=True)])
def test_many_reads_ask_for_their_plans_in_turn(refusal: Refusal) -> None:
    """A planner that is asked a thousand things at once answers none of them in time."""
    _, reader, _ = pair()
    keys = [reader.register(f"rollout-{number}") for number in range(40)]
    for key in keys:
        reader.read(key)
    reader.log()
    asked = reader.all(RequestPlan)
    assert [each.key for each in asked] == keys[:16]
    reader.tick(0.5)
    for each in asked[:3]:
        reader.hear(PlanReceived(each.key, each.number, refusal))
    assert [each.key for each in reader.all(RequestPlan)[16:]] == keys[16:19]
    reader.seen.clear()
    reader.tick(0.6)
    reader.tick(PLAN_AGAIN_S)
    assert [each.key for each in reader.all(RequestPlan)] == keys[3:16], "those were silent for too long"


# Programs: taken before the first byte, by units, and never in place of pieces.


def layout(*more: str) -> Layout:
    """Return three tensors, and more."""
    entries = [TensorEntry(f"t{n}", "uint8", 1, (size,), (size,), (0,)) for n, size in enumerate(NBYTES)]
    return layout_of([*entries, *(TensorEntry(name, "uint8", 1, (1,), (1,), (0,)) for name in more)])


def plan_by_program(reader: OneAgent, key: ShardKey, fills: str | None = None) -> None:
    """Answer the last question with a plan by a program, all from a source of another layout."""
    program = compile_program(
        fills or reader.core.shards[key].spec.layout, layout(), LayoutIndex({"theirs": layout("a")})
    )
    execution = NumberedProgram(program, "program")
    asked = reader.need(RequestPlan)
    share = Share(
        source=OTHER, transport="local", pieces=((0, 3),), nbytes=12, why="", layout="theirs", root="their root"
    )
    answer = Plan(version=asked.demand.version, shares=(share,), why="", program="program")
    completion = PieceCompletion(execution, pieces(layout()))
    reader.hear(PlanReceived(key, asked.number, answer, execution, completion))


def bring(reader: OneAgent, key: ShardKey, text: str | None = "a") -> None:
    """Let the source that was opened last bring everything, which is hashed then; no text: it is not."""
    reader.opened(key, "")
    reader.log()
    assert reader.need(ReadBatch).source == reader.need(RequestLease).source
    reader.brought(key, "")
    reader.confirmed(key)
    reader.closed(key)
    if text is None:
        assert reader.last(DigestMemory) is None
    else:
        digest = reader.need(DigestMemory)
        assert digest.filled
        assert reader.last(BreakLease) is None
        reader.hear(Digested(key, digest.number, digests_of(text)))
    reader.log()


BY_UNITS: dict[str, Any] = {"units": True, "turn": ReadPriority(1 << 30, 1)}
"""A question for a lease on a shard that is being filled by a program."""


def test_a_program_that_fills_another_layout_is_no_plan_and_one_that_fills_this_is_read_by() -> None:
    """Its boxes would be places in other memory, and what came hashed as this shard's own. The log decides anew."""
    reader, key, call = asking()
    plan_by_program(reader, key, fills="another")
    assert reader.all(RequestLease) == []
    assert reader.result(call) is None
    reader.log()
    reader.tick_and_log(REPLAN_S)
    plan_by_program(reader, key)
    [opening] = reader.all(RequestLease)
    assert opening.program is not None
    assert opening.root == "their root"


@pytest.mark.parametrize("writes", [False, True])
def test_a_program_that_comes_when_all_sources_are_gone_and_have_brought_nothing_is_read_by(*, writes: bool) -> None:
    """Also when the log knows of its leases already, and when it has begun to write."""
    reader, key, call = asking()
    reader.lease_plan(key, "a")
    if writes:
        reader.log()
    reader.lose_source(key)
    plan_by_program(reader, key)
    if not writes:
        reader.log()
    assert reader.need(RequestLease).program is not None
    assert reader.memory(key) is MemoryState.FILLING
    bring(reader, key)
    assert reader.result(call) == "done"
    assert reader.memory(key) is MemoryState.READY


def lose_all_but_one_piece(reader: OneAgent, key: ShardKey) -> None:
    """Begin to write, prove one piece, and lose the only source."""
    reader.begin_filling(key, "a")
    post, digests = reader.need(ReadBatch), digests_of("a")
    damaged = digests[: len(digests) // 3] + b"x" * (len(digests) * 2 // 3)
    reader.hear(BatchDone(key, post.source, post.batch, damaged))
    reader.lose_source(key)


def test_a_program_that_comes_for_the_rest_of_the_pieces_is_no_plan() -> None:
    """Its ranges are of units: with digests off, nothing would show that other bytes were read for them."""
    reader, key, call = asking()
    lose_all_but_one_piece(reader, key)
    opened = reader.all(RequestLease)
    for _ in range(40):
        plan_by_program(reader, key)
        reader.tick_and_log(0.1)
    assert reader.all(RequestLease) == opened
    assert reader.result(call) == "VersionUnavailable"
    assert "other layouts" in reader.why(call)


def test_pieces_that_are_proven_do_not_bar_the_way_to_other_layouts() -> None:
    """When nobody has the others, all are asked for: who is left may have other layouts alone."""
    reader, key, _ = asking()
    lose_all_but_one_piece(reader, key)
    for _ in range(40):
        reader.refuse_plan(key)
        reader.tick_and_log(0.1)
    assert reader.memory(key) is MemoryState.EMPTY
    reader.logged(reader.read(key))
    assert reader.need(RequestPlan).demand.pieces == ((1, 2),)
    reader.refuse_plan(key, NOBODY)
    reader.log()
    reader.tick(REPLAN_S)
    assert reader.said() == ["Replan"]
    reader.log()
    assert reader.need(RequestPlan).demand.pieces == ((0, 3),)
    plan_by_program(reader, key)
    assert reader.need(RequestLease).program is not None


def test_what_hashes_to_another_root_than_the_log_keeps_is_no_version_and_its_readers_are_told() -> None:
    reader, key, call = asking()
    plan_by_program(reader, key)
    reader.open_lease(key, 1, None, "later", **BY_UNITS)
    bring(reader, key, "b")
    assert reader.result(call) == "IntegrityError"
    assert reader.need(BreakLease).lease == "later"
    assert reader.memory(key) is MemoryState.EMPTY


def test_what_the_log_has_no_digest_of_is_not_hashed() -> None:
    """Its publisher makes none, so any root that were said of it would be another one."""
    reader, key, _ = asking(digests=False)
    plan_by_program(reader, key)
    bring(reader, key, None)
    assert reader.memory(key) is MemoryState.READY


def test_a_question_for_units_waits_until_the_plan_says_by_which_program_the_shard_is_filled() -> None:
    """Refused, the whole of its part would cross once more."""
    reader, key, _ = asking()
    for answer in (type(None), LeaseGrant):
        assert isinstance(reader.lease(key, 1, None, promises=True, program="program", **BY_UNITS), answer)
        plan_by_program(reader, key)


def test_a_source_that_never_answers_an_early_question_has_a_bound() -> None:
    source = Source(1, Share(source=OTHER, transport="ucxx", pieces=(), nbytes=0, why=""), SourcePhase.OPEN, 0.0)
    source.unconfirmed.append((0, 1))
    source.check_early()
    assert deadline_of(source) == 5.0


# Patches: from a version that stands whole in what is overwritten, and no other.


def asked(reader: OneAgent, key: ShardKey) -> RequestLease:
    """Begin to read, up to the question for a lease."""
    reader.logged(reader.read(key))
    reader.plan(key)
    return reader.need(RequestLease)


@pytest.mark.parametrize("staged", [False, True])
def test_what_stood_there_before_is_the_base_and_the_report_says_what_came_as_a_delta(*, staged: bool) -> None:
    trainer, reader, key = pair(staged=staged)
    assert asked(reader, key).base is None
    reader.opened(key, "a")
    reader.log()
    reader.bring(key, "a")
    trainer.publish_next("b")
    assert asked(reader, key).base == BaseVersion(1, root_of("a"))
    reader.opened(key, "b")
    reader.log()
    encoded = EncodedBytes(how="delta", nbytes=8, wire_bytes=1)
    reader.bring(key, "b", encoded)
    report = reader.report(reader.calls)
    assert report.base == 1
    assert report.sources[0].encoded == (encoded,)


@pytest.mark.parametrize("why_not", ["partly-overwritten", "no-digests", "no-encodings", "taken-back"])
def test_nothing_else_is_a_base(why_not: str) -> None:
    """Without digests nothing would judge a patch; what was taken back for writing may have been written."""
    trainer, reader, key = pair(digests=why_not != "no-digests", encodings=why_not != "no-encodings")
    asked(reader, key)
    text = "" if why_not == "no-digests" else "a"
    reader.opened(key, text)
    reader.log()
    reader.brought(key, text)
    if not text:
        reader.confirmed(key)
    reader.log()
    assert reader.memory(key) is MemoryState.READY
    if why_not == "taken-back":
        reader.logged(reader.unpublish(key))
    trainer.publish_next("b")
    if why_not == "partly-overwritten":
        reader.read(key)
        reader.begin_filling(key, "b")
        reader.tick_and_log(10.0)
        reader.closed(key)
    assert asked(reader, key).base is None


# Rates: what one read has got over a link, the next one's demand and lease tell, in whichever job.

LINK = "host"


@pytest.fixture
def _twelve_bytes_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reads of these tests are small; how much makes a sample is shown in test_meter.py."""
    monkeypatch.setattr(link_rates, "SAMPLE_BYTES_LEAST", 1)


def reading(link: str = LINK) -> tuple[OneAgent, OneAgent, ShardKey]:
    """A reader of which all of its twelve bytes are under way."""
    trainer, reader, key = pair()
    reader.logged(reader.read(key))
    reader.plan(key, link=link)
    reader.opened(key, "a")
    reader.log()
    return trainer, reader, key


@pytest.mark.usefixtures("_twelve_bytes_are_enough")
def test_what_a_read_got_the_next_demand_tells() -> None:
    trainer, reader, key = reading()
    assert reader.need(RequestPlan).demand.rates == ()
    reader.now += 2.0
    reader.bring(key, "a")
    reader.now += 10.0
    trainer.publish_next("b")
    reader.logged(reader.read(key))
    assert reader.need(RequestPlan).demand.rates == (LinkRate(LINK, "local", 6, 1, 10.0),)


def test_what_was_got_over_the_link_before_is_told_with_the_lease() -> None:
    """So a read in which all pieces have patches knows how fast the line is."""
    _, reader, key = pair()
    reader.core.measured.note([LinkSample(("", "local"), 50_000_000, 2.0, 1)] * SLOW_SAMPLES_MIN, reader.now)
    assert asked(reader, key).rate == 25_000_000
    reader, key, _ = asking()
    reader.plan(key)
    assert reader.need(RequestLease).rate is None


@pytest.mark.usefixtures("_twelve_bytes_are_enough")
def test_a_read_that_is_given_up_for_its_slow_source_tells_of_it_too() -> None:
    _, reader, key = reading()
    post = reader.need(ReadBatch)
    for _ in range(2):
        for _ in range(8):
            reader.tick(DEFAULT_LIMITS.look_s)
        reader.hear(BytesReceived(key, post.source, 4))
    reader.tick_and_log(10.0)
    [told] = reader.core.measured.told(reader.now)
    assert (told.bps, told.samples) == (2, 1), "eight bytes in four seconds; the test's own pause counts for nobody"


@pytest.mark.usefixtures("_twelve_bytes_are_enough")
@pytest.mark.parametrize("link", ["", LINK])
def test_a_link_without_a_name_and_a_source_that_brings_nothing_give_no_sample(link: str) -> None:
    """A planner of an earlier release names none. A rate of a silent source would stand long after it came back."""
    _, reader, key = reading(link)
    if not link:
        reader.now += 2.0
        reader.brought(key, "a")
    else:
        reader.tick_and_log(20.0)
        reader.closed(key)
        assert reader.last(FailCall) is not None
    assert reader.core.measured.told(reader.now) == ()


def test_an_agent_says_who_reads_from_it() -> None:
    """From its grant to its end a reader counts; one that maps the memory costs nothing."""
    trainer, _, _ = pair()
    key, table = trainer.key("trainer"), trainer.core.leases

    def load() -> tuple[ServingLoad, ...]:
        return reader_loads(table.readers())

    assert load() == ()
    for shard, (name, nbytes) in enumerate((("one", 5), ("two", 7), ("mapped", 100))):
        reader, turn = SourceId("agent-9", 1, "reader", shard), ReadPriority(70 + shard, 70)
        granted = trainer.lease(
            key,
            1,
            root_of("a"),
            name,
            reader=reader,
            transport="ucxx",
            turn=turn,
            nbytes=nbytes,
            mapped=name == "mapped",
        )
        assert isinstance(granted, LeaseGrant)
    one, two = (ReaderLoad("run-7", MODEL, "reader", shard, 70 + shard, nbytes) for shard, nbytes in ((0, 5), (1, 7)))
    assert load() == (ServingLoad("ucxx", 2, 12, (one, two)),)
    assert trainer.core.redeemed("ticket-one", trainer.now) is not None
    assert load() == (ServingLoad("ucxx", 2, 12, (one, two)),)
    trainer.tick(6.0)
    assert load() == (ServingLoad("ucxx", 1, 5, (one,)),), "the other ticket was not shown in time"
