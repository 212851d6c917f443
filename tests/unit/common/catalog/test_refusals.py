"""What the fold refuses is said in one sentence: what was wrong, by its name and place, and what to do."""

from typing import Any

import msgspec
import pytest
from tests.unit.common.catalog.catalog_world import MODEL, World, kinds, refused

from tensorhub_common.catalog.state import LANES_MAX
from tensorhub_common.catalog.transitions import (
    SHARD_TRANSITIONS,
    IllegalTransition,
    ShardState,
    ShardTransition,
    transition,
)
from tensorhub_common.catalog.validation import NUMBER_MAX
from tensorhub_common.protocol.log.commands import (
    NO_ROOT,
    VERSION_MAX,
    DeleteJob,
    Join,
    Register,
    Rewind,
    Sender,
    Unpublish,
)


@pytest.fixture
def world() -> World:
    """A trainer of one shard on agent a, and an agent b."""
    world = World()
    world.replica_of("trainer", "a")
    world.join("b")
    return world


def register(**said: Any) -> Register:
    about: dict[str, Any] = {"model": MODEL, "replica": "other", "shard": 0, "shards": 1, "layout": "L", "nbytes": 1}
    return Register(by=Sender("b/7", 1, 100), **{**about, **said})


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"model": "a.b"}, "model name 'a.b' can't be used: "),
        ({"replica": "a.b"}, "replica name 'a.b' can't be used: "),
        ({"replica": "_x"}, "replica name '_x' begins with '_', "),
        ({"layout": "a.b"}, "layout 'a.b' is no digest: "),
        ({"nbytes": -1}, f"size -1 is out of range: take 0 to {NUMBER_MAX}"),
        ({"shard": 3, "shards": 2}, "shard 3 of 2 of policy/other is out of range: "),
    ],
)
def test_a_shard_that_can_not_be_registered(world: World, said: dict[str, Any], message: str) -> None:
    assert refused(world.say(register(**said))).message.startswith(message)


def test_what_other_shards_stand_in_the_way(world: World) -> None:
    world.register("a", "long", layout="0123456789abcdef")
    said = refused(world.register("a", "long", layout="fedcba9876543210")).message
    assert said.startswith("shard 0 of policy/long stands with another layout (0123456789ab, not fedcba987654): ")
    said = refused(world.register("b", "trainer")).message
    assert said.startswith("shard 0 of policy/trainer stands on agent 'a': release it there")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"host": "a.b"}, "host name 'a.b' can't be used: "),
        ({"rack": "a.b"}, "rack name 'a.b' can't be used: "),
        ({"site": "a.b"}, "site name 'a.b' can't be used: "),
        ({"cache_bytes": -1}, "cache -1 is out of range: "),
        ({"by": Sender("_hub", 1, 1)}, "an agent must join under its own name, which can't begin with '_'"),
    ],
)
def test_an_agent_that_can_not_join(world: World, said: dict[str, Any], message: str) -> None:
    join = Join(by=Sender("c", 1, 1), host="h", site="s")
    assert refused(world.say(msgspec.structs.replace(join, **said))).message.startswith(message)
    assert "c" not in world.catalog.agents


@pytest.mark.parametrize("room", [-1, NUMBER_MAX + 1])
def test_an_agent_that_can_not_join_again_goes_on_as_it_was(world: World, room: int) -> None:
    """Else its old incarnation would be over, and what its lost memory held would still be believed."""
    world.publish("trainer", 12)
    refused(world.say(Join(by=Sender("a", 2, 100), host="h", site="s", cache_bytes=room)), "BadCommand")
    assert (world.catalog.agents["a"].incarnation, world.catalog.agents["a"].host) == (1, "host-0")
    assert kinds(world.unpublish("trainer")) == ["shard.draining", "version.unavailable"]


@pytest.mark.parametrize(
    ("replica", "shard", "why"),
    [("trainer", 5, "is not registered"), ("trainer", 0, "stands on agent 'a'")],
)
def test_a_shard_that_is_not_the_senders(world: World, replica: str, shard: int, why: str) -> None:
    command = Unpublish(by=world.by("b", 3), model=MODEL, replica=replica, shard=shard)
    assert refused(world.say(command)).message == f"shard {shard} of policy/trainer {why}: 'b' can't speak for it"


def test_a_command_without_its_sender(world: World) -> None:
    said = refused(world.say(Unpublish(model=MODEL, replica="trainer", shard=0))).message
    assert said == "this command must name its sender"


def test_a_sender_that_is_none(world: World) -> None:
    said = refused(world.say(msgspec.structs.replace(register(), by=Sender("b/x", 1, 1))))
    assert said.message.startswith("('b/x', 1, 1) is no sender: ")
    assert f"its lane 0 to {LANES_MAX - 1}, and numbers from 0 to {NUMBER_MAX}" in said.message


def test_the_largest_numbers_count(world: World) -> None:
    """What every JSON reader keeps exact is taken, the last number included."""
    assert kinds(world.join("c", incarnation=NUMBER_MAX)) == ["agent.joined"]
    by = Sender("c/0", NUMBER_MAX, NUMBER_MAX)
    assert kinds(world.say(msgspec.structs.replace(register(nbytes=NUMBER_MAX), by=by))) == ["shard.registered"]
    assert kinds(world.say(msgspec.structs.replace(register(), by=by))) == ["command.repeated"]


def test_a_publication_that_can_not_be(world: World) -> None:
    def said(version: int | None, digest: str = "other") -> str:
        return refused(world.ready("trainer", version, digest=digest)).message

    assert said(1, "a.b") == "root 'a.b' is no digest: send the hexadecimal digits of it"
    world.publish("trainer", 12)
    assert said(13) == "policy/trainer shard 0 still has version 12 published: unpublish 12 first"
    world.empty("trainer")
    older = "version 11 of model 'policy' is not newer than the last published one, 12"
    assert said(11) == f"{older}: publish 13 or higher"
    taken = "version 12 of model 'policy' is not newer than the last published one, 12"
    assert said(12) == f"{taken}, and with other bytes than these (version 12 is taken): publish 13 or higher"
    world.publish("trainer", VERSION_MAX)
    world.empty("trainer")
    full = f"no version above {VERSION_MAX} is possible: publish 'policy' under another name"
    assert said(None) == full
    assert said(14).endswith(f"the last published one, {VERSION_MAX}: {full}")


def test_why_a_replica_can_not_join_the_holders_of_the_last_version(world: World) -> None:
    """Equal bytes are told by roots, and a root is of one layout: who has another one isn't told of other bytes."""
    world.publish("trainer", 12)
    world.register("b", "same")
    world.register("b", "other", layout="M")
    begin = "version 12 of model 'policy' is not newer than the last published one, 12, and "
    taken = " (version 12 is taken): publish 13 or higher"
    elsewhere = "in a layout that no holder has, so that equal bytes can't be told: only a read can fill this replica"
    assert refused(world.ready("other", 12)).message == f"{begin}{elsewhere}{taken}"
    assert refused(world.ready("same", 12, digest="ff")).message == f"{begin}with other bytes than these{taken}"
    off = "without digests, by which equal bytes could be told"
    assert refused(world.ready("same", 12, digest=NO_ROOT)).message == f"{begin}{off}{taken}"
    assert kinds(world.ready("same", 12)) == ["replica.ready"]
    world.publish("other", 13)
    world.say(Rewind(model=MODEL, to=12))
    world.register("b", "late", layout="M")
    retired = "was retired by a rewind (version 13 is taken): publish 14 or higher"
    assert refused(world.ready("late", 13)).message.endswith(f"the last published one, 13, and {retired}")


def test_whatever_is_said_in_a_deleted_job(world: World) -> None:
    world.say(DeleteJob())
    said = refused(world.say(register()), "JobGone").message
    assert said.startswith("job 'run-7' was deleted: take another name")


def test_a_move_that_no_table_has_is_named() -> None:
    """A bug: what is raised must say which transition was tried."""
    with pytest.raises(IllegalTransition, match=r"^ready knows no started$"):
        transition(SHARD_TRANSITIONS, ShardState.READY, ShardTransition.STARTED)
