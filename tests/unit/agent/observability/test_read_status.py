"""What an agent says of its reads: how far each is, how fast, of whom, and for how long nothing has come."""

from tests.unit.agent.core.scene import MODEL, NBYTES, OneAgent

from tensorhub_agent.core.effects import PlanReceived, RequestLease, RequestPlan, SourceLost
from tensorhub_agent.observability.read_status import reads_under_way
from tensorhub_agent.transfer.plan_requests import PLAN_AGAIN_S
from tensorhub_common.protocol.activity import READS_TOLD_MAX, ActiveRead
from tensorhub_common.protocol.plans import Refusal


def told(agent: OneAgent) -> list[ActiveRead]:
    reads, left_out = reads_under_way(agent.core.shards.values(), agent.now, lambda call: f"trace of {call}")
    assert left_out == 0
    return list(reads)


def test_a_read_is_told_from_its_call_to_its_end() -> None:
    trainer = OneAgent("elsewhere")
    trainer.join()
    trainer.register("trainer")
    reader = OneAgent("agent-1", catalog=trainer.catalog)
    reader.join()
    reader.register("rollout")
    key = reader.key("rollout")
    assert told(reader) == []
    trainer.publish(trainer.key("trainer"), "a")
    trainer.log()
    call = reader.read(key)
    (waiting,) = told(reader)
    assert (waiting.model, waiting.replica, waiting.shard, waiting.want) == (MODEL, "rollout", 0, "latest")
    assert (waiting.stage, waiting.version, waiting.trace) == ("joining", None, f"trace of {call}")
    reader.log()
    (planning,) = told(reader)
    assert (planning.stage, planning.version, planning.plan_s) == ("leasing", 1, 0.0)
    reader.plan(key)
    reader.opened(key, "a")
    reader.log()
    reader.now += 0.5
    (filling,) = told(reader)
    assert (filling.stage, filling.total_bytes, filling.done_bytes) == ("filling", sum(NBYTES), 0)
    assert (filling.still_s, filling.plan_s) == (0.5, None)
    assert [(each.agent, each.phase, each.silent_s) for each in filling.sources] == [("elsewhere", "open", 0.5)]
    reader.brought(key, "a")
    reader.log()
    assert told(reader) == []


def test_a_source_that_was_lost_and_is_read_from_again_is_told_once() -> None:
    trainer = OneAgent("elsewhere")
    trainer.join()
    trainer.register("trainer")
    reader = OneAgent("agent-1", catalog=trainer.catalog)
    reader.join()
    reader.register("rollout")
    key = reader.key("rollout")
    trainer.publish(trainer.key("trainer"), "a")
    trainer.log()
    reader.read(key)
    reader.log()
    reader.plan(key)
    reader.opened(key, "a")
    reader.log()
    opening = reader.last(RequestLease)
    assert opening is not None
    reader.do(reader.core.on_outcome(SourceLost(key, opening.source, "its connection ended"), reader.now))
    reader.closed(key)
    asked = reader.last(RequestPlan)
    assert asked is not None
    held = Refusal(error="VersionUnavailable", reason="no source is left", is_held=True)
    reader.do(reader.core.on_outcome(PlanReceived(key, asked.number, held), reader.now))
    reader.now += PLAN_AGAIN_S
    reader.do(reader.core.tick(reader.now))
    reader.plan(key)
    (read,) = told(reader)
    assert [(each.agent, each.phase) for each in read.sources] == [("elsewhere", "opening")]


def test_a_crowd_of_reads_is_told_in_part() -> None:
    agent = OneAgent()
    agent.join()
    for number in range(READS_TOLD_MAX + 2):
        agent.register(f"rollout-{number}")
        agent.read(agent.key(f"rollout-{number}"))
    reads, left_out = reads_under_way(agent.core.shards.values(), agent.now, lambda _: None)
    assert (len(reads), left_out) == (READS_TOLD_MAX, 2)
