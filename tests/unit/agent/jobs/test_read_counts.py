"""What is counted of reads: outcomes, retries of those that failed too, and the wait apart from the transfer."""

import pytest

from tensorhub_agent.core.effects import CompleteCall, FailCall
from tensorhub_agent.jobs import read_counts
from tensorhub_agent.jobs.read_counts import ReadCounts
from tensorhub_common.protocol.worker import ReadReport, ReadStages


def report(retried: int = 0, failure: str = "", stages: ReadStages | None = None) -> ReadReport:
    return ReadReport(
        nbytes=1, wire_s=0.0, total_s=8.0, pieces=1, retried=retried, kept=0, sources=(), stages=stages, failure=failure
    )


def test_retries_count_whatever_became_of_the_read() -> None:
    counts = ReadCounts()
    counts.count(CompleteCall(call=1, version=1, report=report(retried=1)))
    counts.count(FailCall(2, "RoundTimeout", "", report(retried=10)))
    counts.count(CompleteCall(call=3, report=report(retried=100, failure="not now")))
    counts.count(FailCall(4, "ReplicaConflict", ""))
    counts.count(CompleteCall(call=5))
    assert counts.retried == 111
    assert counts.ended == {"done": 1, "RoundTimeout": 1, "put-off": 1, "ReplicaConflict": 1}


def test_a_wait_for_a_publisher_is_no_part_of_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    took: list[float] = []
    waited: list[float] = []
    monkeypatch.setattr(read_counts, "_read_took", took.append)
    monkeypatch.setattr(read_counts, "_read_waited", waited.append)
    stages = ReadStages(
        round_s=7.0,
        plan_s=0.125,
        lease_s=0.125,
        start_s=0.125,
        first_s=0.125,
        wire_s=0.25,
        verify_s=0.125,
        ready_s=0.125,
    )
    ReadCounts().count(CompleteCall(call=1, version=1, report=report(stages=stages)))
    assert (waited, took) == ([7.0], [1.0])
