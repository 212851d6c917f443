"""What users rule: rewinds, pins, retention, deleted models and drained agents; and how much the catalog remembers."""

import pytest
from tests.unit.common.catalog.scenes import (
    CONFLICT,
    FULL,
    GONE,
    drain,
    emptied,
    of,
    one,
    republished,
    retain,
    retaining,
    round_of,
    standing,
    two,
)

from tensorhub_common.catalog import availability
from tensorhub_common.catalog.state import ATTEMPTS_MAX, VERSIONS_KEPT_MAX
from tensorhub_common.catalog.transitions import RoundState
from tensorhub_common.protocol.log.commands import RETAINED_MAX, VERSION_MAX, Delete, Pin, Rewind, Unpin
from tensorhub_common.protocol.log.events import Event, VersionRetired
from tensorhub_common.protocol.queries import VersionState
from tensorhub_simulator.drivers.catalog import MODEL, CatalogDriver, decided, failed, kinds, refused, root


def rewind(world: CatalogDriver, to: int) -> tuple[Event, ...]:
    return world.say(Rewind(model=MODEL, to=to))


def pin(world: CatalogDriver, version: int) -> tuple[Event, ...]:
    return world.say(Pin(model=MODEL, version=version))


def lines() -> CatalogDriver:
    """Return a model with 8 and 9 readable, each on a replica of its own, and an engine."""
    world = standing(trainer="a", keeper="b", engine="c", other="d")
    world.publish("trainer", 8)
    world.fetch("keeper")
    republished(world, 9)
    return world


def test_a_rewind_retires_what_came_later_and_counting_goes_on_above() -> None:
    world = standing(trainer="a", engine="b")
    for number in (8, 9):
        world.publish("trainer", number)
        world.fetch("engine")
        world.empty("trainer")
    assert [event.version for event in of(rewind(world, 8), VersionRetired)] == [9]
    assert world.states("engine") == ["ready"]
    refused(world.publish("trainer", 9), CONFLICT)
    assert kinds(world.publish("trainer", None))[0] == "version.published"
    assert world.catalog.models[MODEL].last == 10
    assert kinds(world.fetch("engine", "newer"))[-1] == "replica.ready"
    assert 9 not in world.catalog.models[MODEL].versions
    world = lines()
    world.fetch("engine")
    rewind(world, 8)
    world.fetch("engine", "newer")
    assert world.replica("engine").version == 8, "an engine is led back to the version before"


@pytest.mark.parametrize("attempt", [1, ATTEMPTS_MAX - 1])
def test_a_rewind_turns_who_reads_what_is_retired_and_fails_who_asked_for_it(attempt: int) -> None:
    world = lines()
    world.start("engine", "latest")
    world.want("other", 9)
    round_of(world).attempt = attempt
    events = rewind(world, 8)
    decision = decided(events)
    assert (decision.replica, decision.version, decision.attempt) == ("engine", 8, attempt + 1)
    assert failed(events).replica == "other"
    assert "retired" in failed(events).message


def test_a_rewind_fails_a_round_that_was_decided_as_often_as_may_be() -> None:
    world = lines()
    world.start("engine", "latest")
    round_of(world).attempt = ATTEMPTS_MAX
    failure = failed(rewind(world, 8))
    assert (failure.model, failure.replica, failure.error) == (MODEL, "engine", GONE)
    assert f"version 9 was retired, after {ATTEMPTS_MAX} attempts" in failure.message
    assert world.states("engine") == ["empty"]
    assert world.replica("engine").round is None


def test_a_rewind_leaves_alone_who_reads_the_version_that_it_goes_back_to_and_who_has_only_joined() -> None:
    """A pin of that version does not stand in the way."""
    world = lines()
    pin(world, 8)
    world.start("engine", 8)
    world.want("other", 10)
    assert kinds(rewind(world, 8)) == ["model.rewound", "version.retired"]
    assert world.states("engine") == ["filling"]
    assert round_of(world, "other").state is RoundState.JOINING
    assert kinds(world.filled("engine", 8))[-1] == "replica.ready"


def test_a_rewind_may_go_to_the_last_version_and_to_before_the_first() -> None:
    world = lines()
    world.start("engine", "latest")
    assert kinds(rewind(world, 9)) == ["model.rewound"]
    assert world.states("engine") == ["filling"]
    retired = [(event.version, event.reason) for event in of(rewind(world, 0), VersionRetired)]
    assert retired == [(8, "rewound to 0"), (9, "rewound to 0")]


def test_offers_of_the_old_line_fail_at_a_rewind() -> None:
    world = two()
    world.publish("trainer", 1)
    republished(world, 2)
    world.empty("trainer")
    world.ready("trainer", None, 0)
    assert "publish.failed" in kinds(rewind(world, 1))


def test_so_many_versions_may_be_pinned_and_one_that_is_may_be_pinned_again() -> None:
    world = one()
    world.join("b")
    for number in range(RETAINED_MAX + 1):
        world.register("b", f"engine-{number}")
        world.publish("trainer", number)
        world.fetch(f"engine-{number}")
        world.empty("trainer")
    for number in range(RETAINED_MAX):
        assert kinds(pin(world, number))[0] == "version.pinned"
    assert f"{RETAINED_MAX} pinned versions already" in refused(pin(world, RETAINED_MAX), FULL).message
    assert kinds(pin(world, 0))[0] == "version.pinned"
    for _ in range(2):
        assert kinds(world.say(Unpin(model=MODEL, version=1)))[0] == "version.unpinned"
    assert kinds(pin(world, RETAINED_MAX))[0] == "version.pinned"
    assert kinds(retain(world, RETAINED_MAX))[0] == "model.retention"


def test_a_model_is_deleted_once_nobody_stands_in_it() -> None:
    world = retaining()
    assert "release them first" in refused(world.say(Delete(model=MODEL)), "ReplicaConflict").message
    emptied(world)
    world.release("trainer", 0)
    world.release("trainer", 1)
    assert kinds(world.say(Delete(model=MODEL))) == ["model.deleted", "shard.released", "shard.released"]
    assert MODEL not in world.catalog.models
    assert world.catalog.agents["c"].cached_bytes == 0


@pytest.mark.parametrize(("replicas", "more"), [(8, ""), (9, " and 1 more"), (11, " and 3 more")])
def test_a_model_that_is_stood_in_is_not_deleted_and_some_of_who_stands_there_are_named(
    replicas: int, more: str
) -> None:
    world = CatalogDriver()
    world.join("a")
    for number in range(replicas):
        world.register("a", f"r{number:02}")
    assert f"'r07']{more} on live agents" in refused(world.say(Delete(model=MODEL)), "ReplicaConflict").message


def test_a_model_is_deleted_whose_replicas_all_stand_on_lost_agents() -> None:
    world = two()
    world.expire("a")
    refused(world.say(Delete(model=MODEL)), "ReplicaConflict")
    world.expire("b")
    assert kinds(world.say(Delete(model=MODEL)))[0] == "model.deleted"


def test_an_agent_that_is_drained_again_is_told_drained_again() -> None:
    world = one()
    for _ in range(2):
        assert kinds(drain(world, "a")) == ["agent.draining", "agent.drained"]
    for _ in range(2):
        assert kinds(drain(world, "a", on=False)) == ["agent.draining"]
    assert not world.catalog.leaving


def publish_each(world: CatalogDriver, *numbers: int) -> None:
    """Publish one after the other, and unpublish each."""
    for number in numbers:
        world.publish("trainer", number)
        world.empty("trainer")


def test_only_so_many_unavailable_versions_are_remembered_and_one_that_can_be_read_is_never_retired() -> None:
    world = standing(trainer="a", keeper="b")
    world.publish("keeper", 1)
    publish_each(world, *range(2, VERSIONS_KEPT_MAX + 4))
    versions = world.catalog.models[MODEL].versions
    assert versions[1].state is VersionState.AVAILABLE
    assert list(versions) == [1, *range(4, VERSIONS_KEPT_MAX + 4)]
    assert [event.version for event in of(world.events, VersionRetired)] == [2, 3]


def test_a_version_of_which_a_shard_is_left_is_not_retired(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its siblings may come back, and then it is whole again."""
    monkeypatch.setattr(availability, "VERSIONS_KEPT_MAX", 1)
    world = standing(trainer="a", pair="bc")
    world.publish("pair", 1)
    held = world.holding("pair", 0)
    world.expire("b")
    publish_each(world, 2, 3, 4)
    assert sorted(world.catalog.models[MODEL].versions) == [1, 4]
    world.join("b", held)
    assert world.replica("pair").version == 1


def test_a_version_that_a_round_is_filling_is_not_retired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "VERSIONS_KEPT_MAX", 1)
    world = standing(trainer="a", engine="b")
    world.publish("trainer", 1)
    world.start("engine", 1)
    world.empty("trainer")
    publish_each(world, 2, 3, 4)
    assert kinds(world.filled("engine", 1)) == ["shard.filled", "version.available", "replica.ready"]


def test_the_last_version_is_not_retired_and_one_that_is_can_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another replica may publish the last one again with equal bytes, which only its roots can show."""
    monkeypatch.setattr(availability, "VERSIONS_KEPT_MAX", 0)
    world = one()
    publish_each(world, 1)
    assert kinds(world.publish("trainer", 1)) == ["version.available", "replica.ready"]
    held = world.holding("trainer")
    world.empty("trainer")
    publish_each(world, 2, 3)
    assert list(world.catalog.models[MODEL].versions) == [3]
    assert held.root == root(1)
    assert kinds(world.join("a", held)) == ["agent.joined"]
    assert world.states("trainer") == ["empty"]


@pytest.mark.parametrize("number", [0, VERSION_MAX])
def test_the_lowest_and_the_highest_number_may_be_waited_for(number: int) -> None:
    assert kinds(one().want("trainer", number)) == ["round.joined"]
