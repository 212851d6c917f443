"""Publishing: what the log decides is what the call says, also when it decides late, twice, or about another offer."""

import pytest

from tensorhub_agent.core.effects import Digested, DigestMemory
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_common.protocol.leases import LeaseGrant, LeaseRefusal
from tensorhub_common.protocol.log.commands import NO_ROOT, Decline
from tensorhub_simulator.drivers.agent import OneAgent, digests_of, joined, published, root_of


def test_a_version_is_published_leased_and_published_once_more_but_is_no_other() -> None:
    agent = joined()
    key = agent.register("trainer")
    call = agent.logged(agent.publish(key, "a"))
    assert agent.version_read(call) == 1
    assert isinstance(agent.lease(key, 1, root_of("a")), LeaseGrant)
    assert agent.result(agent.publish(key, "a", version=1)) == "done"
    assert agent.result(agent.publish(key, "b", version=2)) == "VersionConflict"


def test_all_shards_are_told_alike_who_never_published() -> None:
    """Whoever ends last doesn't wait for those who have withdrawn at the same bound; the log decides what is late."""
    agent = joined()
    keys = agent.register_all("trainer", 3)
    calls = [agent.publish(key, "a") for key in keys[:2]]
    agent.log()
    agent.tick(10.0)
    assert [agent.result(call) for call in calls] == [None, None]
    agent.log()
    for call in calls:
        assert agent.result(call) == "RoundTimeout"
        assert "shards [2] did not publish within the bound" in agent.why(call)
    assert agent.memory(keys[0]) is MemoryState.EMPTY


@pytest.mark.parametrize("again", [True, False])
def test_a_publication_that_was_fenced_is_undone_and_the_next_one_is_not_taken_for_it(*, again: bool) -> None:
    """The registry comes back after the call has raised, and the worker has overwritten its memory meanwhile."""
    agent = joined()
    key = agent.register("trainer")
    agent.silence(agent.publish(key, "old"))
    assert agent.said()[1:] == ["Withdraw", "Unpublish", "Drained"]
    call = agent.publish(key, "new") if again else None
    agent.log()
    assert call is None or agent.version_read(call) == 2
    assert (agent.counted(key), agent.core.shards[key].contents.root) == (
        (2, root_of("new")) if again else (None, None)
    )


def test_without_digests_nothing_is_offered_before_the_log_has_numbered_it() -> None:
    """The log may have numbered an earlier offer, of other bytes; without digests nothing tells them apart."""
    agent = joined(digests=False)
    key = agent.register("trainer")
    agent.publish(key, "a", version=1)
    assert isinstance(agent.lease(key, 1, NO_ROOT), LeaseRefusal)
    agent.log()
    assert isinstance(agent.lease(key, 1, NO_ROOT), LeaseGrant)


def test_a_worker_that_dies_while_publishing_withdraws_and_one_whose_agent_joins_anew_is_told() -> None:
    for error in ("RoundTimeout", "AgentUnavailable"):
        agent = joined()
        key = agent.register("trainer", 0, 2)
        call = agent.logged(agent.publish(key, "a"))
        if error == "RoundTimeout":
            agent.worker_gone()
            agent.log()
        else:
            agent.join(2)
        assert agent.result(call) == error


def restarted(before: OneAgent) -> OneAgent:
    """Return the next process of an agent, which has found nothing."""
    agent = OneAgent("agent-0", after=before)
    agent.join(2)
    return agent


def test_memory_that_a_worker_kept_through_its_agents_restart_is_its_version_again() -> None:
    """Nothing else has the version meanwhile, and the worker may call at once: its call begins behind that."""
    before, key = published()
    agent = restarted(before)
    assert agent.catalog.models["policy"].replicas == {}
    agent.hand_back("trainer", "a", 1)
    call = agent.unpublish(key)
    agent.log(1)
    assert agent.counted(key) == 1
    agent.log()
    assert agent.result(call) == "done"
    assert agent.memory(key) is MemoryState.EMPTY
    assert agent.version_read(agent.logged(agent.publish(key, "b"))) == 2


@pytest.mark.parametrize(
    ("text", "version", "why"), [("b", 1, "other bytes"), ("a", 2, "never published"), ("a", None, "no version")]
)
def test_what_the_log_can_not_vouch_for_of_kept_memory_is_no_version(text: str, version: int | None, why: str) -> None:
    before, key = published()
    if version == 2:
        before.publish_next("c")
        before.publish_next("a")
    agent = restarted(before)
    agent.hand_back("trainer", text, version)
    agent.log()
    assert agent.memory(key) is MemoryState.EMPTY, why
    assert agent.appended(Decline) == [], "no process has asked"
    assert agent.result(agent.logged(agent.publish(key, "d"))) == "done"


def test_shards_that_come_back_one_after_another_make_their_replica_whole() -> None:
    """The agent of one has not restarted: its shard counts as it is."""
    first = joined()
    second = joined("agent-1", beside=first)
    mine = first.register("trainer", 0, 2)
    other = second.register("trainer", 1, 2)
    second.siblings_checked()
    first.publish(mine, "a")
    second.publish(other, "b")
    first.log()
    second.log()
    assert first.counted(mine) == 1
    again = restarted(first)
    again.hand_back("trainer", "a", 1, 0, 2)
    again.siblings_checked()
    digest = again.need(DigestMemory)
    again.hear(Digested(mine, digest.number, digests_of("a")))
    again.log()
    assert again.counted(mine) == 1
    assert again.memory(mine) is second.memory(other) is MemoryState.READY


def test_kept_memory_that_others_map_is_published_again_and_not_written_before_they_let_go() -> None:
    before, key = published()
    agent = restarted(before)
    agent.hand_back("trainer", "a", 1, lent=True)
    assert agent.memory(key) is MemoryState.DRAINING
    agent.log()
    assert agent.counted(key) == 1
    agent.logged(agent.unpublish(key))
    agent.probed(lent=True)
    assert agent.memory(key) is MemoryState.DRAINING
    agent.tick(1.0)
    agent.probed(lent=False)
    agent.log()
    assert agent.memory(key) is MemoryState.EMPTY


def test_kept_memory_that_others_map_and_the_log_can_not_vouch_for_drains() -> None:
    before, key = published()
    agent = restarted(before)
    agent.hand_back("trainer", "b", 1, lent=True)
    agent.log()
    assert agent.memory(key) is MemoryState.DRAINING
    call = agent.publish(key, "c")
    assert agent.result(call) == "ReplicaConflict"
    assert "call unpublish again and wait for its end" in agent.why(call)


def test_a_call_waits_for_kept_memory_whose_siblings_do_not_come_no_longer_than_its_bound() -> None:
    first = joined()
    second = joined("agent-1", beside=first)
    mine, other = first.register("trainer", 0, 2), second.register("trainer", 1, 2)
    second.siblings_checked()
    first.publish(mine, "a")
    second.publish(other, "a")
    first.log()
    second.log()
    second.worker_gone()
    second.logged(second.release(other))
    again = restarted(first)
    again.hand_back("trainer", "a", 1, 0, 2)
    call = again.unpublish(mine)
    again.log()
    assert again.result(call) is None
    again.tick_and_log(again.core.config.handed_back_s_max)
    assert again.result(call) == "NotPublished"


def test_kept_memory_that_a_read_may_have_left_partial_is_not_published() -> None:
    before, key = published()
    agent = restarted(before)
    agent.hand_back("trainer", "a", None, partial=True)
    assert agent.result(agent.publish(key, "a")) == "NotFilled"


def test_a_part_of_a_version_is_not_published() -> None:
    agent, key = published()
    agent.logged(agent.unpublish(key))
    agent.core.shards[key].contents.partial = True
    assert agent.result(agent.publish(key, "a")) == "NotFilled"
    agent.do(agent.core.loaded(key))
    assert agent.result(agent.publish(key, "a")) is None
