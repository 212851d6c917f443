"""A read whose only holder stands still, and one whose last holder the log has lost."""

import pytest
from tests.unit.agent.core.scene import OneAgent

from tensorhub_agent.core.effects import (
    CompleteCall,
    FailCall,
    PlanReceived,
    ReadBatch,
    RequestLease,
    RequestPlan,
    SourceClosed,
    SourceLost,
)
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.transfer.plan_requests import NO_ANSWER
from tensorhub_common.protocol.log.commands import Replan
from tensorhub_common.protocol.plans import Refusal

HELD = Refusal(error="VersionUnavailable", reason="its holder failed this read", is_held=True)
GONE = Refusal(error="VersionUnavailable", reason="nobody has it", is_held=False)
BOUND_S = 10.0


def pair(want: str = "latest") -> tuple[OneAgent, OneAgent, ShardKey, int]:
    """A trainer that has published, and a reader whose call waits for a plan."""
    trainer = OneAgent("elsewhere")
    trainer.join()
    trainer.publish(trainer.register("trainer"), "a")
    trainer.log()
    reader = OneAgent("agent-1", catalog=trainer.catalog)
    reader.join()
    key = reader.register("rollout")
    call = reader.read(key, want, patience=0.0 if want == "newer" else 1e9)  # type: ignore[arg-type]
    reader.log()
    return trainer, reader, key, call


def refused(reader: OneAgent, key: ShardKey, refusal: Refusal) -> None:
    asked = reader.last(RequestPlan)
    assert asked is not None
    reader.do(reader.core.on_outcome(PlanReceived(key, asked.number, refusal), reader.now))


def stalls(reader: OneAgent, key: ShardKey, seconds: float, *, awake: bool = False) -> None:
    """The only holder answers nothing for so long, unless it is `awake`, and the log counts it all the while."""
    until, seen = reader.now + seconds, 0
    while reader.now < until:
        effects, seen = reader.seen[seen:], len(reader.seen)
        for effect in effects:
            if isinstance(effect, RequestPlan) and effect.demand.avoid:
                reader.do(reader.core.on_outcome(PlanReceived(key, effect.number, HELD), reader.now))
            elif isinstance(effect, RequestPlan):
                reader.seen.append(effect)
                reader.plan(key)
            elif isinstance(effect, RequestLease) and awake:
                reader.opened(key, "a")
            elif isinstance(effect, ReadBatch):
                reader.brought(key, "a")
            elif isinstance(effect, RequestLease):
                reader.do(reader.core.on_outcome(SourceLost(key, effect.source, "it does not answer"), reader.now))
                reader.do(reader.core.on_outcome(SourceClosed(key, effect.source), reader.now))
        reader.log()
        reader.tick(0.05)


def test_a_read_whose_only_holder_stands_still_goes_on_and_ends_when_that_wakes() -> None:
    _, reader, key, call = pair()
    stalls(reader, key, BOUND_S - 3.0)
    assert reader.end_of(call) is None
    stalls(reader, key, 2.5, awake=True)
    assert isinstance(reader.end_of(call), CompleteCall)


def test_at_its_deadline_it_says_who_stood_still() -> None:
    _, reader, key, call = pair()
    stalls(reader, key, BOUND_S + 0.2)
    reader.log()
    end = reader.end_of(call)
    assert isinstance(end, FailCall)
    assert end.error == "RoundTimeout"
    assert "the last source, on elsewhere, was left because it does not answer" in end.message


def test_while_it_waits_the_log_is_asked_for_a_newer_version_now_and_then() -> None:
    _, reader, key, _ = pair()
    replans = [0.0]
    reader_log = reader.log

    def log(count: int = 1000) -> list[object]:
        replans.extend(reader.now for command in reader.unsaid if isinstance(command, Replan))
        return list(reader_log(count))

    reader.log = log  # type: ignore[method-assign,assignment]
    stalls(reader, key, BOUND_S - 0.5)
    assert 2 <= len(replans) - 1 <= 4


def test_once_the_log_counts_no_holder_it_ends_at_once() -> None:
    trainer, reader, key, call = pair()
    trainer.unpublish(trainer.key("trainer"))
    trainer.log()
    refused(reader, key, GONE)
    reader.tick(0.1)
    reader.log()
    end = reader.end_of(call)
    # The log has let "latest" wait for the next version: there was one, and it went in good order.
    assert end is None
    assert reader.catalog.models["policy"].replicas["rollout"].round is not None


def test_an_update_that_can_not_have_the_newer_version_now_returns_none_and_says_why() -> None:
    _, reader, key, call = pair("newer")
    stalls(reader, key, BOUND_S + 0.2)
    reader.log()
    end = reader.end_of(call)
    assert isinstance(end, CompleteCall)
    assert end.version is None
    assert end.report is not None
    assert "was left because it does not answer" in end.report.failure


def test_an_update_that_has_begun_to_overwrite_raises() -> None:
    """What the shard held is gone, so its worker must not go on with it."""
    _, reader, key, call = pair("newer")
    reader.plan(key)
    reader.opened(key, "a")
    reader.log()
    assert reader.memory(key) is MemoryState.FILLING
    opening = reader.last(RequestLease)
    assert opening is not None
    reader.do(reader.core.on_outcome(SourceLost(key, opening.source, "gone"), reader.now))
    reader.do(reader.core.on_outcome(SourceClosed(key, opening.source), reader.now))
    refused(reader, key, GONE)
    reader.log()
    assert reader.error_of(call) == "VersionUnavailable"


@pytest.mark.parametrize("refusal", [Refusal(error=NO_ANSWER, reason="no planner"), HELD])
def test_many_reads_ask_for_their_plans_in_turn(refusal: Refusal) -> None:
    """A planner that is asked a thousand things at once answers none of them in time."""
    trainer = OneAgent("elsewhere")
    trainer.join()
    trainer.publish(trainer.register("trainer"), "a")
    trainer.log()
    reader = OneAgent("agent-1", catalog=trainer.catalog)
    reader.join()
    keys = [reader.register(f"rollout-{number}") for number in range(40)]
    for key in keys:
        reader.read(key)
    reader.log()
    asked = [effect for effect in reader.seen if isinstance(effect, RequestPlan)]
    assert [each.key for each in asked] == keys[:16]
    reader.tick(0.5)
    for each in asked[:3]:
        reader.do(reader.core.on_outcome(PlanReceived(each.key, each.number, refusal), reader.now))
    more = [effect for effect in reader.seen if isinstance(effect, RequestPlan)][16:]
    assert [each.key for each in more] == keys[16:19]
    reader.tick(0.6)
    silent = {each.key for each in asked[3:]}
    again = {effect.key for effect in reader.seen if isinstance(effect, RequestPlan) and effect.key in silent}
    assert again == silent, "they were silent for too long, and the others have just been asked"
