"""Reads of a told agent: of a version that a trainer elsewhere has published, step by step or whole."""

from tests.unit.agent.core.recorded_agent import VERSION, ToldAgent
from tests.unit.span_places import place_at

from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.catalog.state import Catalog

ENGINE = place_at(0xCCCC, 0xC1)
"""The update span of a worker that reads."""


def published(text: str = "a") -> Catalog:
    """A catalog in which a trainer elsewhere has published version 1."""
    trainer = ToldAgent("elsewhere")
    trainer.join()
    trainer.publish(trainer.register("trainer"), text)
    trainer.log()
    return trainer.catalog


def reader() -> tuple[ToldAgent, ShardKey]:
    agent = ToldAgent("agent-1", catalog=published())
    agent.join()
    key = agent.register("rollout")
    agent.decided_by(VERSION)
    return agent, key


def decided() -> tuple[ToldAgent, ShardKey, int]:
    """A read whose version is decided, one second after the call; it waits for a plan."""
    agent, key = reader()
    call = agent.begin_read(key, engine=ENGINE)
    agent.later(1.0)
    agent.log()
    return agent, key, call


def read_whole(agent: ToldAgent, key: ShardKey, text: str = "a") -> None:
    """Plan, lease, read and be ready, a second each."""
    agent.later(1.0)
    agent.plan(key)
    agent.later(1.0)
    agent.opened(key, text)
    agent.log()
    agent.later(1.0)
    agent.brought(key, text)
    agent.later(1.0)
    agent.log()
