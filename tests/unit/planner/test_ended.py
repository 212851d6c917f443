"""The log's last word on who still reads."""

import pytest

from tensorhub_common.protocol.log.events import (
    Event,
    ReplicaReady,
    RoundDecided,
    RoundFailed,
    RoundReopened,
    RoundStarted,
    ShardFilled,
    ShardReleased,
)
from tensorhub_planner.load.ledger import FinishedReads
from tensorhub_planner.load.load import ReaderId
from tensorhub_planner.primitives.limits import PlanLimits

JOB = "run-7"
ONE, TWO = (ReaderId(JOB, "policy", "rollout", shard) for shard in range(2))
ELSEWHERE = (ReaderId("run-8", "policy", "rollout", 0), ReaderId(JOB, "critic", "rollout", 0))
OF_ONE: tuple[Event, ...] = (
    ShardFilled(model="policy", replica="rollout", shard=0, version=12, round=3, root="r"),
    ShardReleased(model="policy", replica="rollout", shard=0),
)
OF_ALL: tuple[Event, ...] = (
    ReplicaReady(model="policy", replica="rollout", version=12, round=3),
    RoundFailed(model="policy", replica="rollout", round=3, error="RoundTimeout", message=""),
    RoundReopened(model="policy", replica="rollout", round=3, version=12),
    RoundDecided(model="policy", replica="rollout", round=3, attempt=2, version=13, roots=("r", "s")),
)


@pytest.mark.parametrize("event", OF_ONE + OF_ALL)
def test_what_was_decided_before_is_over_and_nothing_else(event: Event) -> None:
    """What is decided by the very entry has begun with it; other shards, models and jobs are not spoken of."""
    ended = FinishedReads(PlanLimits())
    assert not ended.is_over(ONE, 1)
    ended.see(JOB, 50, event)
    assert ended.is_over(ONE, 49)
    assert not ended.is_over(ONE, 50)
    assert ended.is_over(TWO, 49) is (event in OF_ALL)
    assert not any(ended.is_over(each, 49) for each in ELSEWHERE)


def test_a_round_that_begins_to_write_goes_on() -> None:
    ended = FinishedReads(PlanLimits())
    ended.see(JOB, 50, RoundStarted(model="policy", replica="rollout", round=3, attempt=1, version=12))
    assert not ended.is_over(ONE, 49)


@pytest.mark.parametrize("event", [OF_ONE[0], OF_ALL[0]])
def test_a_log_that_is_gone_says_nothing_of_the_next_one(event: Event) -> None:
    """Which counts from one again."""
    ended = FinishedReads(PlanLimits())
    for job in (JOB, "run-8"):
        ended.see(job, 50, event)
    ended.forget(JOB)
    assert not ended.is_over(ONE, 1)
    assert ended.is_over(ELSEWHERE[0], 1)


def test_so_many_are_known_at_most() -> None:
    """Those of which the log spoke last: of the others beats tell."""
    ended = FinishedReads(PlanLimits(readers_max=2))
    for seq, shard in ((10, 0), (11, 1), (12, 0), (13, 2)):
        ended.shard(ReaderId(JOB, "policy", "rollout", shard), seq)
    known = [ended.is_over(ReaderId(JOB, "policy", "rollout", shard), 1) for shard in range(3)]
    assert known == [True, False, True]
