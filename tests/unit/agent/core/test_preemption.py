"""When a newer version comes while one is read: what is judged, and what the log makes of it."""

import pytest
from tests.unit.agent.core.scene import OneAgent, digests_of

from tensorhub_agent.core.effects import CompleteCall
from tensorhub_agent.core.operations.read import is_better_dropped
from tensorhub_agent.core.shard_state import MemoryState
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.protocol.log.commands import Drop, Join, Ready, Register, Sender


@pytest.mark.parametrize(
    ("done", "elapsed_s", "dropped"),
    [(0, 0.0, True), (10, 10.0, True), (49, 100.0, True), (50, 100.0, False), (99, 100.0, False), (40, 0.1, False)],
)
def test_what_is_far_from_its_end_is_dropped_and_what_is_near_is_finished(
    done: int,
    elapsed_s: float,
    dropped: bool,  # noqa: FBT001 (a table)
) -> None:
    assert is_better_dropped(done, 100, elapsed_s, 0.5) is dropped


def test_a_short_rest_is_always_finished() -> None:
    assert not is_better_dropped(1, 2_000_000, 0.5 / 2_000_000, 0.5)


class Elsewhere:
    """A trainer on another agent, whose words the log takes directly."""

    def __init__(self, agent: OneAgent) -> None:
        self.agent, self.n = agent, 0
        agent.take(Join(by=Sender("elsewhere", 1, 1), host="host", site="site"))
        for replica in ("trainer", "second"):
            self._say(Register, replica, shards=1, layout="f" * 64, nbytes=12)

    def publish(self, version: int, text: str, replica: str = "trainer") -> None:
        self._say(Ready, replica, version=version, root=root_digest(digests_of(text)))

    def _say(self, kind: type, replica: str, **more: object) -> None:
        self.n += 1
        by = Sender(f"elsewhere/{replica == 'second':d}", 1, self.n)
        self.agent.take(kind(by=by, model="policy", replica=replica, shard=0, **more))


def filling(want: object = "latest") -> tuple[OneAgent, ShardKey, Elsewhere, int]:
    """Return an engine that fills version 1, and a trainer elsewhere."""
    agent = OneAgent()
    agent.join()
    key = agent.register("engine")
    elsewhere = Elsewhere(agent)
    elsewhere.publish(1, "a")
    call = agent.read(key, want)  # type: ignore[arg-type]
    agent.log()
    agent.plan(key, "elsewhere")
    agent.opened(key, "a")
    agent.log()
    assert agent.memory(key) is MemoryState.FILLING
    return agent, key, elsewhere, call


def test_a_read_of_which_nothing_has_come_takes_up_the_newer_version() -> None:
    agent, key, elsewhere, call = filling()
    elsewhere.publish(2, "b", "second")
    assert isinstance(agent.unsaid[-1], Drop)
    agent.log()
    agent.closed(key)
    agent.plan(key, "elsewhere")
    agent.opened(key, "b")
    agent.log()
    agent.brought(key, "b")
    agent.closed(key)
    agent.log()
    answer = agent.end_of(call)
    assert isinstance(answer, CompleteCall)
    assert answer.version == 2
    assert agent.core.shards[key].contents.root == root_digest(digests_of("b"))


def test_a_read_that_was_asked_for_by_number_is_not_told() -> None:
    agent, _, elsewhere, _ = filling(1)
    elsewhere.publish(2, "b", "second")
    assert agent.unsaid == []


def test_a_version_that_is_overtaken_before_the_leases_stand_is_not_begun() -> None:
    agent = OneAgent()
    agent.join()
    key = agent.register("engine")
    elsewhere = Elsewhere(agent)
    elsewhere.publish(1, "a")
    agent.read(key)
    agent.log()
    elsewhere.publish(2, "b", "second")
    agent.plan(key, "elsewhere")
    agent.opened(key, "a")
    agent.log()
    assert agent.memory(key) is MemoryState.EMPTY
    current = agent.catalog.models["policy"].replicas["engine"].round
    assert current is not None
    assert (current.version, current.superseded) == (2, 1)
