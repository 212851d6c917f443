"""Publishing: what the log decides is what the call says, also when it decides late, twice, or about another offer."""

from tests.unit.agent.core.scene import OneAgent, digests_of

from tensorhub_agent.core.effects import CompleteCall, FailCall
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_common.protocol.call_deadlines import OUTCOME_S_MAX
from tensorhub_common.protocol.leases import LeaseGrant, LeaseRefusal
from tensorhub_common.protocol.log.commands import NO_ROOT, Drained, Unpublish, Withdraw


def trainer(*, digests: bool = True, shards: int = 1) -> OneAgent:
    agent = OneAgent(digests=digests)
    agent.join()
    for shard in range(shards):
        agent.register("trainer", shard, shards)
    return agent


def test_publishes_and_grants_leases_on_it() -> None:
    agent = trainer()
    key = agent.key("trainer")
    call = agent.publish(key, "a")
    agent.log()
    assert agent.end_of(call) == CompleteCall(call=call, version=1)
    assert isinstance(agent.lease(key, 1, root_digest(digests_of("a"))), LeaseGrant)


def test_publishing_again_what_stands_returns_and_another_version_is_refused() -> None:
    agent = trainer()
    key = agent.key("trainer")
    agent.publish(key, "a")
    agent.log()
    assert agent.end_of(agent.publish(key, "a", version=1)) is not None
    assert agent.error_of(agent.publish(key, "b", version=2)) == "VersionConflict"


def test_a_shard_that_waits_too_long_is_withdrawn() -> None:
    agent = trainer(shards=2)
    call = agent.publish(agent.key("trainer", 0), "a")
    agent.log()
    agent.tick(10.0)
    assert agent.end_of(call) is None, "the log decides whether it was too late"
    agent.log()
    assert agent.error_of(call) == "RoundTimeout"
    assert agent.memory(agent.key("trainer", 0)) is MemoryState.EMPTY


def test_a_publication_that_was_fenced_is_undone_behind_it() -> None:
    """The registry comes back after the call has raised: the log publishes, and takes it back before anything else."""
    agent = trainer()
    key = agent.key("trainer")
    call = agent.publish(key, "a")
    agent.tick(10.0)
    agent.tick(OUTCOME_S_MAX)
    assert agent.error_of(call) == "RegistryUnavailable"
    assert [type(command) for command in agent.unsaid[1:]] == [Withdraw, Unpublish, Drained]
    agent.log()
    assert agent.catalog.models["policy"].replicas["trainer"].version is None


def test_the_next_publication_is_not_taken_for_the_fenced_one() -> None:
    """The worker has overwritten its memory meanwhile; the version of the old bytes must not become that of the new."""
    agent = trainer()
    key = agent.key("trainer")
    agent.publish(key, "old")
    agent.tick(10.0)
    agent.tick(OUTCOME_S_MAX)
    call = agent.publish(key, "new")
    agent.log()
    assert agent.end_of(call) == CompleteCall(call=call, version=2)
    assert agent.core.shards[key].contents.root == root_digest(digests_of("new"))


def test_without_digests_nothing_is_offered_before_the_log_has_numbered_it() -> None:
    """The log may have numbered an earlier offer, of other bytes; without digests nothing tells them apart."""
    agent = trainer(digests=False)
    key = agent.key("trainer")
    agent.publish(key, "a", version=1)
    assert isinstance(agent.lease(key, 1, NO_ROOT), LeaseRefusal)
    agent.log()
    assert isinstance(agent.lease(key, 1, NO_ROOT), LeaseGrant)


def test_a_worker_that_dies_while_publishing_withdraws() -> None:
    agent = trainer(shards=2)
    key = agent.key("trainer", 0)
    call = agent.publish(key, "a")
    agent.log()
    agent.do(agent.core.worker_gone(7, agent.now))
    agent.log()
    assert agent.error_of(call) == "RoundTimeout"


def test_all_shards_are_told_alike_who_never_published() -> None:
    """Whoever ends last doesn't wait for those who have withdrawn at the same bound."""
    agent = trainer(shards=3)
    agent.register("trainer", 1, 3)
    agent.siblings_checked()
    calls = [agent.publish(agent.key("trainer", shard), "a") for shard in range(2)]
    agent.log()
    agent.tick(10.0)
    agent.log()
    for call in calls:
        end = agent.end_of(call)
        assert isinstance(end, FailCall)
        assert "shards [2] did not publish within the bound" in end.message


def test_an_agent_that_joined_anew_says_publish_again() -> None:
    agent = trainer(shards=2)
    call = agent.publish(agent.key("trainer", 0), "a")
    agent.log()
    agent.join(2)
    assert isinstance(agent.end_of(call), FailCall)
    assert agent.error_of(call) == "AgentUnavailable"


def test_a_part_of_a_version_is_not_published() -> None:
    agent = trainer()
    key = agent.key("trainer")
    agent.core.shards[key].contents.partial = True
    assert agent.error_of(agent.publish(key, "a")) == "NotFilled"
    agent.do(agent.core.loaded(key))
    assert agent.error_of(agent.publish(key, "a")) is None
