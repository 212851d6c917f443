"""Registering: the log orders it, and what it does not confirm in time is taken back behind it."""

from tests.unit.agent.core.scene import NBYTES, OneAgent

from tensorhub_agent.core.effects import CallRegister, CompareLayouts, CompleteCall, FreeShard
from tensorhub_agent.core.shard_state import ShardSpec


def joined() -> OneAgent:
    agent = OneAgent()
    agent.join()
    return agent


def begin(agent: OneAgent, shard: int = 0, layout: str = "f" * 64) -> int:
    agent.calls += 1
    call = CallRegister(call=agent.calls, session=7, deadline=agent.now + 10.0)
    place = ShardSpec(agent.key("trainer", shard), 2, spot=False, layout=layout, nbytes=NBYTES)
    agent.do(agent.core.register(place, call, agent.now))
    return agent.calls


def test_the_first_shard_stands_at_once() -> None:
    agent = joined()
    call = begin(agent)
    assert agent.end_of(call) is None
    agent.log()
    assert agent.end_of(call) == CompleteCall(call=call)


def test_the_second_is_compared_with_the_first() -> None:
    agent = joined()
    begin(agent)
    agent.log()
    call = begin(agent, 1)
    agent.log()
    check = agent.last(CompareLayouts)
    assert check is not None
    assert agent.end_of(call) is None
    agent.siblings_checked()
    assert agent.end_of(call) == CompleteCall(call=call)


def test_a_clash_releases_the_later_one() -> None:
    agent = joined()
    begin(agent)
    agent.log()
    call = begin(agent, 1)
    agent.log()
    key = agent.key("trainer", 1)
    agent.siblings_checked("tensor 'w' differs")
    agent.log()
    assert agent.error_of(call) == "LayoutMismatch"
    assert agent.last(FreeShard) == FreeShard(key)
    assert list(agent.catalog.models["policy"].replicas["trainer"].members) == [0]


def test_what_the_log_does_not_confirm_is_taken_back_and_the_next_try_stands() -> None:
    """Both tries speak on one lane, so the first one's release can't end the second."""
    agent = joined()
    first = begin(agent)
    agent.tick(10.0)
    assert agent.error_of(first) == "RegistryUnavailable"
    second = begin(agent)
    agent.log()
    assert agent.end_of(second) == CompleteCall(call=second)
    assert 0 in agent.catalog.models["policy"].replicas["trainer"].members


def test_a_refusal_frees_the_memory() -> None:
    agent = joined()
    agent.register("trainer", 0, shards=1)
    call = begin(agent, 1)
    agent.log()
    assert agent.error_of(call) == "LayoutMismatch"
    assert agent.last(FreeShard) == FreeShard(agent.key("trainer", 1))
