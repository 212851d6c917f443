"""A shard that the log drops at a join: nothing is said of it, and its worker's call ends."""

from tests.unit.agent.core.scene import NBYTES, OneAgent

from tensorhub_agent.core.effects import AppendCommand, FreeShard
from tensorhub_agent.core.shard_state import ShardContents, ShardSpec
from tensorhub_common.errors import AgentUnavailable
from tensorhub_common.protocol.log.commands import Join


def test_a_shard_that_was_never_registered_is_published_before_the_join_is_answered() -> None:
    agent = OneAgent()
    key = agent.key("trainer")
    agent.core.adopt(ShardSpec(key, 1, spot=False, layout="f" * 64, nbytes=NBYTES), ShardContents())
    agent.do(agent.core.join(1, "host", "site", agent.now))
    agent.attach(key, session=7)
    call = agent.publish(key, "a")
    agent.log()
    assert agent.error_of(call) == AgentUnavailable.__name__
    assert agent.last(FreeShard) == FreeShard(key)
    assert {type(each.command) for each in agent.seen if isinstance(each, AppendCommand)} == {Join}
