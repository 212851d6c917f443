"""Every bound of the catalog, by its name: what comes on top is refused or forgotten, and nothing else changes."""

import pytest
from tests.unit.common.catalog.catalog_world import MODEL, World, kinds, refused

from tensorhub_common.catalog import availability
from tensorhub_common.catalog.handlers import membership
from tensorhub_common.catalog.state import VERSIONS_KEPT_MAX
from tensorhub_common.protocol.log.commands import SHARDS_MAX, VERSION_MAX, Expire, Lead, Sender
from tensorhub_common.protocol.log.events import VersionRetired
from tensorhub_common.protocol.queries import VersionState


@pytest.fixture
def world() -> World:
    world = World()
    world.replica_of("trainer", "a")
    return world


def test_only_so_many_unavailable_versions_are_remembered(world: World) -> None:
    for number in range(1, VERSIONS_KEPT_MAX + 3):
        world.publish("trainer", number)
        world.empty("trainer")
    versions = world.catalog.models[MODEL].versions
    assert list(versions) == list(range(3, VERSIONS_KEPT_MAX + 3))
    assert [event.version for event in world.events if isinstance(event, VersionRetired)] == [1, 2]


def test_a_version_that_can_be_read_is_never_retired(world: World) -> None:
    world.replica_of("keeper", "b")
    world.publish("keeper", 1)
    for number in range(2, VERSIONS_KEPT_MAX + 5):
        world.publish("trainer", number)
        world.empty("trainer")
    assert world.catalog.models[MODEL].versions[1].state is VersionState.AVAILABLE


def test_a_version_of_which_a_shard_is_left_is_not_retired(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its siblings may come back, and then it is whole again."""
    monkeypatch.setattr(availability, "VERSIONS_KEPT_MAX", 1)
    world.replica_of("pair", "b", "c")
    world.publish("pair", 1)
    world.expire("b")
    for number in (2, 3, 4):
        world.publish("trainer", number)
        world.empty("trainer")
    assert sorted(world.catalog.models[MODEL].versions) == [1, 4]
    world.join("b", world.holding("pair", 0).__class__(model=MODEL, replica="pair", shard=0, version=1, root="L-1-0"))
    assert world.replica("pair").version == 1


def test_a_version_that_a_round_is_filling_is_not_retired(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "VERSIONS_KEPT_MAX", 1)
    world.replica_of("engine", "b")
    world.publish("trainer", 1)
    world.start("engine", 1)
    world.empty("trainer")
    for number in (2, 3, 4):
        world.publish("trainer", number)
        world.empty("trainer")
    assert kinds(world.filled("engine", 1)) == ["shard.filled", "version.available", "replica.ready"]


def test_the_last_version_is_not_retired(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another replica may publish it again with equal bytes, which only its roots can show."""
    monkeypatch.setattr(availability, "VERSIONS_KEPT_MAX", 0)
    world.publish("trainer", 1)
    world.empty("trainer")
    assert kinds(world.publish("trainer", 1)) == ["version.available", "replica.ready"]


def test_a_retired_version_can_not_come_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "VERSIONS_KEPT_MAX", 0)
    world.publish("trainer", 1)
    holding = world.holding("trainer")
    world.empty("trainer")
    world.publish("trainer", 2)
    world.empty("trainer")
    world.replica_of("other", "b")
    world.publish("other", 3)
    world.empty("other")
    assert list(world.catalog.models[MODEL].versions) == [3]
    assert kinds(world.join("a", holding)) == ["agent.joined"]
    assert world.states("trainer") == ["empty"]


def test_so_many_agents(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "AGENTS_MAX", 1)
    refused(world.join("b"), "BadCommand")
    assert kinds(world.join("a")) == ["agent.joined"]


def test_so_many_models(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MODELS_MAX", 1)
    refused(world.register("a", "trainer", model="other"), "BadCommand")


def test_so_many_replicas(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "REPLICAS_MAX", 1)
    refused(world.register("a", "other"), "BadCommand")
    assert kinds(world.register("a", "trainer")) == ["shard.registered"]


def test_the_largest_replica_has_events_that_fit_into_a_message() -> None:
    """Its siblings' layouts in one event, and the shards that are missing in another. `World.say` measures both."""
    world = World()
    world.join("a")
    replica = "trainer"
    world.register("a", replica, 0, SHARDS_MAX, layout="0" * 64)
    members = world.replica(replica).members
    first = members[0]
    for index in range(1, SHARDS_MAX - 1):
        members[index] = type(first)(index, "a", f"{index:064x}", 64)
        world.catalog.agents["a"].shards[MODEL, replica, index] = None
    world.register("a", replica, SHARDS_MAX - 1, SHARDS_MAX, layout="f" * 64)
    world.want(replica, "latest", 0)
    world.ready(replica, 1, 1, digest="f" * 64)
    assert len(world.catalog.agents["a"].shards) == SHARDS_MAX


def test_what_a_registry_that_leads_says_wrongly_is_called_by_its_name() -> None:
    def said(by: Sender, registry: str = "r-0", term: int = 1) -> str:
        return refused(World().say(Lead(by=by, registry=registry, term=term))).message

    assert said(Sender("agent", 1, 1)) == "only a registry may say that it leads"
    assert said(Sender("_registry", 1, 1), registry="a.b").startswith("registry name 'a.b' can't be used")
    assert said(Sender("_registry", 1, 1), term=-1).startswith("term -1 is out of range")


@pytest.mark.parametrize(("number", "can_be"), [(-1, False), (0, True), (VERSION_MAX, True), (VERSION_MAX + 1, False)])
def test_a_version_that_can_not_exist_is_not_waited_for(world: World, number: int, can_be: bool) -> None:  # noqa: FBT001
    events = world.want("trainer", number)
    assert kinds(events) == (["round.joined"] if can_be else ["command.rejected"])


def test_an_expiry_that_is_said_wrongly_is_called_by_its_name(world: World) -> None:
    def said(by: Sender, term: int = 1) -> str:
        return refused(world.say(Expire(by=by, agent="a", incarnation=1, term=term))).message

    assert said(Sender("a", 1, 99)) == "only a registry may say that an agent is lost"
    assert said(Sender("_registry", 1, 1), term=-1).startswith("term -1 is out of range")
