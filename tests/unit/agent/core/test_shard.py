"""One shard: one call at a time, and a worker that died leaves nothing behind that is not answered."""

from tests.unit.agent.core.scene import OneAgent, digests_of

from tensorhub_agent.core.config import CoreConfig
from tensorhub_agent.core.effects import CallRead, CallUnpublish, CompleteCall, Digested, DigestMemory, SaveManifest
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_common.protocol.log.commands import Publish
from tensorhub_common.protocol.log.events import PublishDeclined


def trainer(shards: int = 1) -> OneAgent:
    agent = OneAgent()
    agent.join()
    for shard in range(shards):
        agent.register("trainer", shard, shards)
    return agent


def test_a_second_call_of_the_same_worker_is_refused() -> None:
    agent = trainer(shards=2)
    key = agent.key("trainer", 0)
    agent.publish(key, "a")
    assert agent.error_of(agent.unpublish(key)) == "ReplicaConflict"


def test_the_next_worker_waits_for_what_the_dead_one_began() -> None:
    agent = trainer()
    key = agent.key("trainer")
    agent.publish(key, "a")
    agent.do(agent.core.worker_gone(7, agent.now))
    call = agent.attach(key, session=8)
    assert agent.end_of(call) is None, "the log may still publish what stands here"
    agent.log()
    assert agent.end_of(call) == CompleteCall(call=call)
    assert agent.memory(key) is MemoryState.READY


def test_a_waiting_call_whose_worker_dies_is_ended_for_its_driver() -> None:
    agent = trainer()
    key = agent.key("trainer")
    agent.publish(key, "a")
    agent.do(agent.core.worker_gone(7, agent.now))
    call = agent.attach(key, session=8)
    agent.do(agent.core.worker_gone(8, agent.now))
    assert agent.error_of(call) == "AgentUnavailable"


def test_a_waiting_call_is_given_up_at_its_bound() -> None:
    agent = trainer(shards=2)
    key = agent.key("trainer", 0)
    agent.publish(key, "a")
    agent.do(agent.core.called(key, CallUnpublish(call=60, session=8, deadline=1.0), agent.now))
    agent.tick(1.0)
    assert agent.error_of(60) == "ReplicaConflict"


def test_a_wish_from_outside_is_gated_digested_and_said_ready() -> None:
    agent = trainer()
    key = agent.key("trainer")
    agent.take(Publish(model="policy", replica="trainer"))
    digest = agent.last(DigestMemory)
    assert digest is not None
    agent.do(agent.core.on_outcome(Digested(key, digest.number, digests_of("a")), agent.now))
    agent.log()
    assert agent.memory(key) is MemoryState.READY


def test_a_wish_that_not_all_shards_fulfil_is_over_after_a_while() -> None:
    agent = trainer(shards=2)
    agent.take(Publish(model="policy", replica="trainer"))
    for key in list(agent.core.shards):
        agent.core.shards[key].operation = None if key.shard else agent.core.shards[key].operation
    key = agent.key("trainer", 0)
    digests = [effect for effect in agent.seen if isinstance(effect, DigestMemory) and effect.key == key]
    agent.do(agent.core.on_outcome(Digested(key, digests[0].number, digests_of("a")), agent.now))
    agent.log()
    agent.tick(CoreConfig().wish_s_max)
    agent.log()
    assert agent.core.shards[key].operation is None
    assert agent.memory(key) is MemoryState.EMPTY


def test_a_wish_that_the_memory_can_not_fulfil_is_declined_for_all_to_hear() -> None:
    """Whoever wished has no call that could raise, so the log says why nothing comes."""
    agent = trainer()
    agent.core.shards[agent.key("trainer")].contents.partial = True
    agent.take(Publish(model="policy", replica="trainer"))
    (declined,) = [event for event in agent.log() if isinstance(event, PublishDeclined)]
    assert (declined.error, declined.wish) == ("NotFilled", agent.catalog.seq - 1)
    assert agent.memory(agent.key("trainer")) is MemoryState.EMPTY


def test_a_wish_while_another_call_is_under_way_is_declined() -> None:
    """The read has not reached the log when the wish does, so the log could not refuse it."""
    agent = trainer()
    key = agent.key("trainer")
    agent.core.called(key, CallRead(call=99, session=7, deadline=60.0, want="latest", patience=60.0), agent.now)
    agent.take(Publish(model="policy", replica="trainer"))
    assert "ReplicaConflict" in [event.error for event in agent.log() if isinstance(event, PublishDeclined)]


def test_the_manifest_says_what_the_memory_becomes_before_anything_else_is_done() -> None:
    agent = trainer()
    key = agent.key("trainer")
    agent.publish(key, "a")
    agent.log()
    agent.seen.clear()
    agent.unpublish(key)
    assert isinstance(agent.seen[1], SaveManifest)
    assert agent.seen[1].state == "draining"
