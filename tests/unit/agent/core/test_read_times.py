"""For how long a read waits and for how long it is under way: report, spans, lines and counts say the same."""

from collections import Counter

import pytest
from tests.unit.agent.core.recorded_agent import VERSION, ToldAgent, one
from tests.unit.agent.core.recorded_reads import decided
from tests.unit.agent.core.scene import OneAgent

from tensorhub_agent.core.effects import CompleteCall, PlanReceived, RequestLease, RequestPlan, SourceClosed, SourceLost
from tensorhub_agent.core.operations.read import ReadOperation
from tensorhub_agent.core.operations.read_report import transfer_s
from tensorhub_agent.observability.read_log import ReadLog
from tensorhub_agent.observability.records import ReadRecord
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.observability.trace_context import SpanRecord
from tensorhub_common.protocol.log.events import RoundDecided, kind_of
from tensorhub_common.protocol.plans import Refusal
from tensorhub_common.protocol.worker import ReadReport, ReadStages

STALL_S, SLOW_S = 5.0, 2.0
HELD = Refusal(error="VersionUnavailable", reason="its holder failed this read", is_held=True)
GONE = Refusal(error="VersionUnavailable", reason="nobody has it", is_held=False)


def read_of(agent: ToldAgent, key: ShardKey) -> ReadOperation:
    operation = agent.core.shards[key].operation
    assert isinstance(operation, ReadOperation)
    return operation


def loses_its_source(agent: ToldAgent, key: ShardKey) -> None:
    opening = agent.last(RequestLease)
    assert opening is not None
    agent.hear(SourceLost(key, opening.source, "it does not answer"))
    agent.hear(SourceClosed(key, opening.source))


def refused(agent: ToldAgent, key: ShardKey, refusal: Refusal) -> None:
    asked = agent.last(RequestPlan)
    assert asked is not None
    agent.hear(PlanReceived(key, asked.number, refusal))


def in_vain(agent: ToldAgent, key: ShardKey, seconds: float, refusal: Refusal = HELD) -> None:
    """The only holder grants nothing for so long, and the planner has no other."""
    agent.plan(key)
    agent.later(seconds)
    loses_its_source(agent, key)
    refused(agent, key, refusal)


def comes(agent: ToldAgent, key: ShardKey, text: str = "a") -> None:
    agent.plan(key)
    agent.opened(key, text)
    agent.log()
    agent.later(0.5)
    agent.brought(key, text)
    agent.log()


def report_of(agent: ToldAgent, call: int) -> tuple[CompleteCall, ReadReport, ReadStages]:
    end = agent.end_of(call)
    assert isinstance(end, CompleteCall)
    assert end.report is not None
    assert end.report.stages is not None
    return end, end.report, end.report.stages


def seconds(span: SpanRecord) -> float:
    return (span.end_ns - span.start_ns) / 1e9


def test_a_read_that_is_planned_anew_is_under_way_from_the_first_decision_on() -> None:
    agent, key, call = decided()
    in_vain(agent, key, 3.5)
    agent.tick(1.0)
    agent.log()
    comes(agent, key)
    end, report, stages = report_of(agent, call)
    whole = one(agent.spans(), "transfer")
    assert whole.attributes["tensorhub.attempts"] == 2
    assert stages.round_s == pytest.approx(1.0) == pytest.approx(whole.attributes["tensorhub.wait_s"])
    assert transfer_s(report) == pytest.approx(5.0) == pytest.approx(seconds(whole))
    assert transfer_s(report) + stages.round_s == pytest.approx(agent.now)
    assert stages.plan_s == pytest.approx(4.5), "what was planned in vain is told as planning"
    late: Counter[str] = Counter()
    line = ReadLog(STALL_S, SLOW_S, late).ended(key, end, None)
    assert line is not None
    assert "0.0 MiB in 5.0 s (plan 4.5," in line
    assert late == {"slow": 1}


def test_a_read_without_a_lease_stands_still_from_the_decision_on_however_often_the_log_decides_again() -> None:
    agent, key, _ = decided()
    watch = ReadLog(STALL_S, SLOW_S, Counter())
    in_vain(agent, key, 3.5)
    agent.tick(1.0)
    agent.log()
    assert read_of(agent, key).transfer is not None, "another plan of it is asked for"
    assert watch.look([read_of(agent, key)], 1.0 + STALL_S - 0.01, lambda _: None) == []
    (line,) = watch.look([read_of(agent, key)], 1.0 + STALL_S, lambda _: None)
    assert "version 1 is decided, and for 5.0 s it has no lease on a source" in line


def test_between_two_attempts_it_stands_still_as_well() -> None:
    """The log is asked to decide again, and is silent."""
    agent, key, _ = decided()
    in_vain(agent, key, 3.5)
    agent.tick(1.0)
    assert read_of(agent, key).transfer is None
    watch = ReadLog(STALL_S, SLOW_S, Counter())
    assert len(watch.look([read_of(agent, key)], 1.0 + STALL_S, lambda _: None)) == 1


def test_a_read_that_had_its_leases_stands_still_from_where_they_went() -> None:
    """What it was filled for before counts for the read, and not for what it stands still at."""
    agent, key, _ = decided()
    agent.plan(key)
    agent.opened(key, "a")
    agent.log()
    agent.later(20.0)
    note = agent.chronicle._now[key]
    assert isinstance(note, ReadRecord)
    again = RoundDecided(
        model=key.model, replica=key.replica, round=note.round or 0, attempt=2, version=1, roots=(None,), held=()
    )
    agent.do(agent.core.on_event(again, agent.now))
    watch = ReadLog(STALL_S, SLOW_S, Counter())
    assert watch.look([read_of(agent, key)], agent.now + STALL_S - 0.01, lambda _: None) == []
    assert len(watch.look([read_of(agent, key)], agent.now + STALL_S, lambda _: None)) == 1


def test_a_round_that_is_reopened_waits_again() -> None:
    """The version went in good order before a byte came: what is waited for from then on is another publication."""
    trainer = OneAgent("elsewhere")
    trainer.join()
    trainer.publish(trainer.register("trainer"), "a")
    trainer.log()
    agent = ToldAgent("agent-1", catalog=trainer.catalog)
    agent.join()
    key = agent.register("rollout")
    agent.decided_by(VERSION)
    call = agent.begin_read(key)
    agent.later(1.0)
    agent.log()
    trainer.unpublish(trainer.key("trainer"))
    trainer.log()
    agent.later(2.0)
    refused(agent, key, GONE)
    agent.tick(0.125)
    assert [kind_of(event) for event in agent.log()] == ["round.reopened"]
    read = read_of(agent, key)
    agent.later(6.0)
    assert ReadLog(STALL_S, SLOW_S, Counter()).look([read], agent.now, lambda _: None) == []
    trainer.publish(trainer.key("trainer"), "b")
    while trainer.unsaid:
        for event in agent.take(trainer.unsaid.pop(0)):
            trainer.do(trainer.core.on_event(event, agent.now))
    comes(agent, key, "b")
    end, report, stages = report_of(agent, call)
    assert end.version == 2
    spans = agent.spans()
    transfers = [span for span in spans if span.name == "transfer"]
    waits = [span for span in spans if span.name == "wait"]
    assert [seconds(span) for span in waits] == [1.0, 6.0]
    assert [seconds(span) for span in transfers] == [2.125, 0.5]
    assert [span.error for span in transfers] == ["version 1 went before it was read", None]
    assert stages.round_s == pytest.approx(7.0), "as long as both waits"
    assert transfer_s(report) == pytest.approx(2.625), "as long as both transfers"
