"""The planner folds what the registry folds."""

import msgspec
import pytest
from tests.unit.common.catalog_world import World

from tensorhub_common import subjects
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.wire import codec
from tensorhub_common.wire.commands import Join, Publish, Sender, Unreadable
from tensorhub_common.wire.events import AgentJoined, CommandRejected
from tensorhub_planner.fold import Fold

JOIN = Join(by=Sender("a", 1, 1), host="node-1", site="berlin")


class Entry(msgspec.Struct):
    seq: int
    subject: str
    data: bytes
    time: float = 5.0


@pytest.fixture
def fold() -> Fold:
    return Fold(Catalog("run-7"))


def test_commands_are_folded_and_events_are_counted(fold: Fold) -> None:
    (joined,) = fold.take(Entry(1, subjects.cmd("run-7", "join", "a"), codec.encode(JOIN)))
    assert isinstance(joined, AgentJoined)
    assert fold.take(Entry(2, subjects.event("run-7", subjects.HUB, "agent", "joined"), codec.encode(joined))) == ()
    assert fold.position == 2
    assert fold.catalog.seq == 1
    assert fold.catalog.agents["a"].host == "node-1"
    assert fold.catalog.time == 5.0


@pytest.mark.parametrize(
    ("subject", "data"),
    [
        ("tensorhub.v1.run-7.cmd.publish", b"no json"),
        ("tensorhub.v1.run-7.cmd.join.b", codec.encode(JOIN)),
        ("tensorhub.v1.run-7.cmd.join.a.b.c", codec.encode(JOIN)),
        ("tensorhub.v1.run-7.cmd.register", codec.encode(Publish(model="m", replica="r"))),
    ],
)
def test_what_is_no_command_is_folded_as_such(fold: Fold, subject: str, data: bytes) -> None:
    """It changes nothing, but the catalog has seen it."""
    (rejected,) = fold.take(Entry(1, subject, data))
    assert isinstance(rejected, CommandRejected)
    assert (fold.position, fold.catalog.seq) == (1, 1)
    assert not fold.catalog.agents


@pytest.mark.parametrize("seq", [0, 2])
def test_only_the_next_entry_is_taken(fold: Fold, seq: int) -> None:
    with pytest.raises(ValueError, match="can't follow on 0"):
        fold.take(Entry(seq, subjects.cmd("run-7", "join", "a"), codec.encode(JOIN)))
    assert fold.position == 0


def test_a_whole_story_gives_the_registrys_catalog() -> None:
    """Commands as they stand in the log, with events between them."""
    world = World()
    world.replica_of("trainer", "a")
    world.replica_of("rollout", "b")
    world.publish("trainer", 1)
    world.fetch("rollout")
    fold = Fold(Catalog(world.catalog.job))
    for seq, time, command in world.log:
        while fold.position < seq - 1:
            fold.take(Entry(fold.position + 1, "tensorhub.v1.run-7.event._hub.agent.joined", b"{}"))
        assert not isinstance(command, Unreadable)
        assert command.by is not None
        verb = str(command.__struct_config__.tag)
        fold.take(Entry(seq, subjects.cmd("run-7", verb, command.by.process), codec.encode(command), time))
    assert fold.catalog == world.catalog
