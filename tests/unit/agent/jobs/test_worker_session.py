"""Handles: each speaks for one shard as long as that is its worker's, and what is over takes up no room."""

from types import SimpleNamespace
from typing import Any

from tests.unit.agent.core.scene import SESSION, OneAgent

from tensorhub_agent.jobs.worker_session import WorkerSession


def test_handles_of_released_shards_take_up_no_room_and_none_is_given_twice() -> None:
    agent = OneAgent()
    agent.join()
    session = session_of(agent)
    handles = {}
    for replica in ("kept", "left"):
        key = agent.register(replica)
        handles[key] = session.new_handle(key)
    left, kept = agent.key("left"), agent.key("kept")
    agent.release(left)
    agent.log()
    session.forget_released()
    assert session.handles == {handles[kept]: kept}
    assert session.new_handle(left) not in handles.values()


def test_a_shard_that_stands_again_as_another_workers_is_not_this_ones() -> None:
    agent = OneAgent()
    agent.join()
    session = session_of(agent)
    key = agent.register("trainer")
    assert not session.is_anothers(key)
    agent.do(agent.core.worker_gone(SESSION, agent.now))
    agent.attach(key, SESSION + 1)
    assert session.is_anothers(key)


def session_of(agent: OneAgent) -> WorkerSession:
    worker: Any = SimpleNamespace(number=SESSION)
    job: Any = SimpleNamespace(core=agent.core)
    return WorkerSession(worker, job)
