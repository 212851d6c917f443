"""What an agent says of its reads while they last and at their end: status, lines, report and spans agree."""

from collections import Counter
from typing import Any

import pytest
from tests.unit.agent.observability.told_agent import VERSION, decided, decided_again, note_of, one, seconds

from tensorhub_agent.core.effects import CompleteCall, FailCall, Keep
from tensorhub_agent.core.operations.read import ReadOperation
from tensorhub_agent.core.operations.read_report import transfer_s
from tensorhub_agent.observability.read_log import REFUSED_TOLD_S, SLOW_BYTES_PER_S, NotBegun, ReadLog
from tensorhub_agent.observability.read_status import reads_under_way
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.transfer.plan_requests import PLAN_AGAIN_S
from tensorhub_common.protocol.activity import READS_TOLD_MAX, ActiveRead
from tensorhub_common.protocol.log.events import kind_of
from tensorhub_common.protocol.plans import Refusal
from tensorhub_common.protocol.worker import ReadReport, ReadStages, SourceReport
from tensorhub_simulator.drivers.agent import MODEL, NBYTES, OneAgent, joined, pair
from tensorhub_simulator.drivers.noted_agent import NotedAgent

KEY = ShardKey(MODEL, "rollout", 0)
WHERE = "the read of shard 0 of policy/rollout"
NO_LEASE = "version 1 is decided, and for 5.0 s it has no lease on a source"
STALL_S, SLOW_S = 5.0, 2.0
HELD = Refusal(error="VersionUnavailable", reason="its holder failed this read", is_held=True)
GONE = Refusal(error="VersionUnavailable", reason="nobody has it", is_held=False)


class Watch(ReadLog):
    """Looks at the reads of one agent."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        super().__init__(STALL_S, SLOW_S, self.counted)

    def lines(self, agent: OneAgent, at: float) -> list[str]:
        operations = [core.operation for core in agent.core.shards.values()]
        reads = [each for each in operations if isinstance(each, ReadOperation)]
        return self.look(reads, at, lambda call: f"7ace{call}")

    def check_due(self, agent: OneAgent, at: float, why: str = "") -> None:
        """Check that a read is told of from this moment on, with this reason."""
        assert self.lines(agent, at - 0.01) == []
        (line,) = self.lines(agent, at)
        assert line.startswith(f"{WHERE} stands still: ")
        assert why in line


# Reads that stand still.


def reading() -> tuple[OneAgent, ShardKey]:
    """An agent that reads version 1, which is decided; no plan has come."""
    _, agent, key = pair()
    agent.logged(agent.read(key))
    return agent, key


def test_a_read_that_stands_still_is_told_once() -> None:
    agent, key = reading()
    watch = Watch()
    agent.begin_filling(key, "a")
    why = "nothing of version 1 has come for 5.0 s, after 0.0 MiB of 0.0 MiB; it waits for elsewhere (local) (trace"
    watch.check_due(agent, agent.now + STALL_S, why)
    assert watch.lines(agent, agent.now + 2 * STALL_S) == []
    assert watch.counted == {"stalled": 1}
    agent.keeps = False
    agent.brought(key, "a")
    agent.closed(key)
    disk = "all of version 1 has come, and its manifest is not written for 5.0 s: see whether the disk"
    Watch().check_due(agent, agent.now + STALL_S, disk)
    agent.kept(agent.need(Keep))
    agent.log()
    assert watch.lines(agent, agent.now) == []


def test_a_read_without_a_plan_says_that_the_planner_is_silent() -> None:
    agent, _ = reading()
    Watch().check_due(agent, STALL_S, NO_LEASE)
    agent.tick(1.5)
    (line,) = Watch().lines(agent, agent.now + STALL_S)
    assert "it has no lease on a source: the planner does not answer (nothing came within 1 s)" in line


def in_vain(agent: NotedAgent, key: ShardKey) -> None:
    """The only holder grants nothing for 3.5 s, and the planner has no other; a second later the log is asked."""
    agent.plan(key)
    agent.later(3.5)
    agent.lose_source(key, "it does not answer")
    agent.refuse_plan(key, HELD)
    agent.tick(1.0)


@pytest.mark.parametrize("answers", [True, False])
def test_a_read_without_a_lease_stands_still_from_the_decision_on_however_often_the_log_decides(
    *, answers: bool
) -> None:
    """Between two attempts as well, while the log is silent."""
    agent, key, _ = decided()
    in_vain(agent, key)
    if answers:
        agent.log()
    assert (agent.operation(key).transfer is not None) is answers
    Watch().check_due(agent, 1.0 + STALL_S, NO_LEASE)


def test_a_read_that_had_its_leases_stands_still_from_where_they_went() -> None:
    """What it was filled for before counts for the read, and not for what it stands still at."""
    agent, key, _ = decided()
    agent.begin_filling(key, "a")
    agent.later(20.0)
    agent.do(agent.core.on_event(decided_again(key, note_of(agent, key), 1, None), agent.now))
    Watch().check_due(agent, agent.now + STALL_S)


# For how long it waits and for how long it is under way.


def comes(agent: NotedAgent, key: ShardKey, text: str = "a") -> None:
    agent.begin_filling(key, text)
    agent.later(0.5)
    agent.bring(key, text)


def stages_of(report: ReadReport) -> ReadStages:
    assert report.stages is not None
    return report.stages


def test_a_read_that_is_planned_anew_is_under_way_from_the_first_decision_on() -> None:
    agent, key, call = decided()
    in_vain(agent, key)
    comes(agent, key)
    report = agent.report(call)
    stages = stages_of(report)
    whole = one(agent.spans(), "transfer")
    assert whole.attributes["tensorhub.attempts"] == 2
    assert stages.round_s == pytest.approx(1.0) == pytest.approx(whole.attributes["tensorhub.wait_s"])
    assert transfer_s(report) == pytest.approx(5.0) == pytest.approx(seconds(whole))
    assert transfer_s(report) + stages.round_s == pytest.approx(agent.now)
    assert stages.plan_s == pytest.approx(4.5), "what was planned in vain is told as planning"
    watch, end = Watch(), agent.end_of(call)
    assert end is not None
    assert "0.0 MiB in 5.0 s (plan 4.5," in (watch.ended(key, end, None) or "")
    assert watch.counted == {"slow": 1}


def test_the_stages_of_a_read_and_what_each_source_gave_are_reported() -> None:
    agent, key, call = decided()
    for step in (agent.plan, agent.opened, agent.brought):
        agent.later(0.25)
        step(key, "elsewhere" if step == agent.plan else "a")
        agent.later(0.125)
        agent.log()
    report = agent.report(call)
    assert (report.nbytes, report.pieces, report.kept, report.retried) == (12, 3, 0, 0)
    assert (report.got_bytes, report.wasted_bytes, report.plans) == (12, 0, 1)
    assert (report.wire_s, report.total_s) == (0.25, 2.0)
    assert report.sources == (
        SourceReport(
            agent="elsewhere", replica="trainer", transport="local", nbytes=12, pieces=3, why="elsewhere is near"
        ),
    )
    assert stages_of(report) == ReadStages(
        round_s=1.0, plan_s=0.25, lease_s=0.375, start_s=0.125, first_s=0.25, wire_s=0.0, verify_s=0.0, ready_s=0.125
    )


def test_a_round_that_is_reopened_waits_again() -> None:
    """The version went in good order before a byte came: what is waited for from then on is another publication."""
    trainer, _, _ = pair()
    agent = NotedAgent("agent-2", beside=trainer)
    agent.join()
    key = agent.register("engine")
    agent.decided_by(VERSION)
    call = agent.read(key)
    agent.later(1.0)
    agent.log()
    trainer.logged(trainer.unpublish(trainer.key("trainer")))
    agent.later(2.0)
    agent.refuse_plan(key, GONE)
    agent.tick(0.125)
    assert [kind_of(event) for event in agent.log()] == ["round.reopened"]
    assert agent.result(call) is None, "latest waits for the next version"
    agent.later(6.0)
    assert Watch().lines(agent, agent.now) == []
    trainer.publish_next("b")
    comes(agent, key, "b")
    assert agent.version_read(call) == 2
    spans = agent.spans()
    transfers, waits = ([span for span in spans if span.name == name] for name in ("transfer", "wait"))
    assert [seconds(span) for span in waits] == [1.0, 6.0]
    assert [seconds(span) for span in transfers] == [2.125, 0.5]
    assert [span.error for span in transfers] == ["version 1 went before it was read", None]
    report = agent.report(call)
    assert stages_of(report).round_s == pytest.approx(7.0), "as long as both waits"
    assert transfer_s(report) == pytest.approx(2.625), "as long as both transfers"


# Lines at the end of a read.


def report(**rest: Any) -> ReadReport:
    sources = (
        SourceReport(agent="agent-2", replica="trainer", transport="local", nbytes=1 << 20, pieces=1, why=""),
        SourceReport(
            agent="agent-3", replica="r", transport="ucxx", nbytes=0, pieces=0, why="", lost="it made no progress"
        ),
    )
    about = {"nbytes": 1 << 20, "wire_s": 0.0, "total_s": 60.0, "pieces": 1, "retried": 0, "kept": 0}
    return ReadReport(**{**about, "sources": sources, **rest})


SOURCES = "sources: agent-3 (ucxx, 0.0 MiB, left: it made no progress), agent-2 (local, 1.0 MiB)"


def staged(**took_s: float) -> ReadReport:
    return report(stages=ReadStages(**{name: took_s.get(name, 0.0) for name in ReadStages.__struct_fields__}))


@pytest.mark.parametrize(
    ("end", "trace", "line"),
    [
        (
            FailCall(1, "IntegrityError", "its bytes are wrong", report()),
            "7ace",
            f"{WHERE} failed: IntegrityError: its bytes are wrong; {SOURCES} (trace 7ace)",
        ),
        (FailCall(1, "ReplicaConflict", "it drains"), None, f"{WHERE} failed: ReplicaConflict: it drains"),
        (
            CompleteCall(call=1, report=report(failure="no source is left", sources=())),
            None,
            "the update of shard 0 of policy/rollout is put off: no source is left",
        ),
        (CompleteCall(call=1, version=1), None, None),
        (CompleteCall(call=1, version=1, report=staged(round_s=3600.0, wire_s=SLOW_S)), None, None),
    ],
)
def test_a_read_that_failed_says_why_and_what_became_of_its_sources(
    end: CompleteCall | FailCall, trace: str | None, line: str | None
) -> None:
    """One that has only waited for its version is not slow."""
    assert Watch().ended(KEY, end, trace) == line


def test_a_read_is_slow_by_what_it_took_for_its_bytes() -> None:
    watch, bytes_s = Watch(), (1 << 20) / SLOW_BYTES_PER_S
    slow = CompleteCall(call=1, version=1, report=staged(wire_s=SLOW_S + bytes_s, ready_s=11.0))
    line = watch.ended(KEY, slow, None) or ""
    assert line.startswith(f"{WHERE} was slow: version 1, 1.0 MiB in 13.0 s (plan 0.0, ")
    assert "bytes 2.0, proof 0.0, log 11.0); sources: agent-3" in line
    assert watch.counted == {"slow": 1}


def test_of_reads_that_are_refused_one_of_each_kind_is_told_in_a_while() -> None:
    watch, line = Watch(), "a read is refused: BadCommand: no"

    def refused(at: float, why: NotBegun = NotBegun.HANDLE) -> str | None:
        return watch.refused(why, KEY if why is NotBegun.ASIDE else None, FailCall(1, "BadCommand", "no"), at)

    assert refused(100.0) == line
    assert [refused(100.0 + REFUSED_TOLD_S - 1.0) for _ in range(3)] == [None] * 3
    assert refused(101.0, NotBegun.ASIDE) is not None
    assert refused(100.0 + REFUSED_TOLD_S) == f"{line} (and 3 more such since the last line)"
    assert refused(100.0 + 2 * REFUSED_TOLD_S) == line


# Status: how far each is, how fast, of whom, and for how long nothing has come.


def told(agent: OneAgent) -> list[ActiveRead]:
    reads, left_out = reads_under_way(agent.core.shards.values(), agent.now, lambda call: f"trace of {call}")
    assert left_out == 0
    return list(reads)


def test_a_read_is_told_from_its_call_to_its_end() -> None:
    _, reader, key = pair()
    assert told(reader) == []
    call = reader.read(key)
    (waiting,) = told(reader)
    assert (waiting.model, waiting.replica, waiting.shard, waiting.want) == (MODEL, "rollout", 0, "latest")
    assert (waiting.stage, waiting.version, waiting.trace) == ("joining", None, f"trace of {call}")
    reader.log()
    (planning,) = told(reader)
    assert (planning.stage, planning.version, planning.plan_s) == ("leasing", 1, 0.0)
    reader.begin_filling(key, "a")
    reader.now += 0.5
    (filling,) = told(reader)
    assert (filling.stage, filling.total_bytes, filling.done_bytes) == ("filling", sum(NBYTES), 0)
    assert (filling.still_s, filling.plan_s) == (0.5, None)
    assert [(each.agent, each.phase, each.silent_s) for each in filling.sources] == [("elsewhere", "open", 0.5)]
    reader.bring(key, "a")
    assert told(reader) == []


def test_a_source_that_was_lost_and_is_read_from_again_is_told_once() -> None:
    reader, key = reading()
    reader.begin_filling(key, "a")
    reader.lose_source(key, "its connection ended")
    reader.refuse_plan(key, HELD)
    reader.tick(PLAN_AGAIN_S)
    reader.plan(key)
    (read,) = told(reader)
    assert [(each.agent, each.phase) for each in read.sources] == [("elsewhere", "opening")]


@pytest.mark.long
def test_a_crowd_of_reads_is_told_in_part() -> None:
    agent = joined()
    for number in range(READS_TOLD_MAX + 2):
        agent.read(agent.register(f"rollout-{number}"))
    reads, left_out = reads_under_way(agent.core.shards.values(), agent.now, lambda _: None)
    assert (len(reads), left_out) == (READS_TOLD_MAX, 2)
