"""A question for a lease may wait while the log's word for it is on its way, and no longer."""

import msgspec
from tests.unit.agent.core.scene import MODEL, OneAgent

from tensorhub_agent.core.agent import is_published, may_be_decided
from tensorhub_common.protocol.leases import LeaseRequest
from tensorhub_common.protocol.plans import ReadPriority, SourceId


def question(replica: str) -> LeaseRequest:
    source, reader = SourceId("agent-0", 1, replica, 0), SourceId("agent-1", 1, "later", 0)
    return LeaseRequest(
        job="run-7", model=MODEL, source=source, version=1, root=None, reader=reader, turn=ReadPriority(99, 99)
    )


def test_a_shard_is_published_once_the_log_has_taken_it() -> None:
    agent = OneAgent()
    agent.join()
    key = agent.register("trainer")
    ask = question("trainer")
    assert not is_published(None, ask)
    agent.publish(key, "one", 1)
    assert not is_published(agent.core.shards[key], ask)
    agent.log()
    assert is_published(agent.core.shards[key], ask)
    assert not is_published(agent.core.shards[key], msgspec.structs.replace(ask, version=2))


def test_whoever_has_joined_a_round_may_have_been_decided_without_knowing() -> None:
    agent = OneAgent()
    agent.join()
    key = agent.register("rollout")
    ask = question("rollout")
    assert not may_be_decided(None, ask)
    assert not may_be_decided(agent.core.shards[key], ask)
    agent.read(key)
    assert may_be_decided(agent.core.shards[key], ask)
