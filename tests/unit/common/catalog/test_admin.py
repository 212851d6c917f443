"""What users rule, at its edges: what a rewind leaves alone, the last attempt, and how many may be pinned or named."""

import pytest
from tests.unit.common.catalog.catalog_world import MODEL, World, failed, kinds, refused

from tensorhub_common.catalog.state import ATTEMPTS_MAX
from tensorhub_common.catalog.transitions import RoundState
from tensorhub_common.errors import ReplicaConflict, RetentionFull, VersionUnavailable
from tensorhub_common.protocol.log.commands import RETAINED_MAX, Delete, DrainAgent, Pin, Quota, Retain, Rewind, Unpin
from tensorhub_common.protocol.log.events import RoundDecided, VersionRetired


def two_lines() -> World:
    """Return a model with 8 and 9 readable, each on a replica of its own, and an engine."""
    world = World()
    for name, agent in (("trainer", "a"), ("keeper", "b"), ("engine", "c")):
        world.replica_of(name, agent)
    world.publish("trainer", 8)
    world.fetch("keeper")
    world.empty("trainer")
    world.publish("trainer", 9)
    return world


def attempts_are(world: World, attempt: int) -> None:
    """Let the engine's round have been decided so often."""
    current = world.replica("engine").round
    assert current is not None
    current.attempt = attempt


def test_a_rewind_leaves_alone_who_reads_the_version_that_it_goes_back_to() -> None:
    world = two_lines()
    world.start("engine", 8)
    assert kinds(world.say(Rewind(model=MODEL, to=8))) == ["model.rewound", "version.retired"]
    assert world.states("engine") == ["filling"]
    assert kinds(world.filled("engine", 8))[-1] == "replica.ready"


def test_a_rewind_leaves_alone_who_has_only_joined() -> None:
    world = two_lines()
    world.want("engine", 10)
    assert "round.decided" not in kinds(world.say(Rewind(model=MODEL, to=8)))
    current = world.replica("engine").round
    assert current is not None
    assert current.state is RoundState.JOINING


@pytest.mark.parametrize("attempt", [1, ATTEMPTS_MAX - 1])
def test_a_rewind_turns_who_reads_what_is_retired(attempt: int) -> None:
    world = two_lines()
    world.start("engine", "latest")
    attempts_are(world, attempt)
    (decision,) = [event for event in world.say(Rewind(model=MODEL, to=8)) if isinstance(event, RoundDecided)]
    assert (decision.replica, decision.version, decision.attempt) == ("engine", 8, attempt + 1)


def test_a_rewind_fails_a_round_that_was_decided_as_often_as_may_be() -> None:
    world = two_lines()
    world.start("engine", "latest")
    attempts_are(world, ATTEMPTS_MAX)
    failure = failed(world.say(Rewind(model=MODEL, to=8)))
    assert (failure.model, failure.replica, failure.error) == (MODEL, "engine", VersionUnavailable.__name__)
    assert f"version 9 was retired, after {ATTEMPTS_MAX} attempts" in failure.message
    assert world.states("engine") == ["empty"]
    assert world.replica("engine").round is None


def test_a_rewind_to_the_last_version_retires_nothing_and_ends_nothing() -> None:
    world = two_lines()
    world.start("engine", "latest")
    assert kinds(world.say(Rewind(model=MODEL, to=9))) == ["model.rewound"]
    assert world.states("engine") == ["filling"]


def test_a_rewind_may_go_to_before_the_first_version() -> None:
    world = two_lines()
    events = world.say(Rewind(model=MODEL, to=0))
    assert kinds(events) == ["model.rewound", "version.retired", "version.retired"]
    retired = [(event.version, event.reason) for event in events if isinstance(event, VersionRetired)]
    assert retired == [(8, "rewound to 0"), (9, "rewound to 0")]
    refused(world.say(Rewind(model=MODEL, to=-1)), VersionUnavailable.__name__)


def test_a_pin_below_the_line_does_not_stand_in_the_way_of_a_rewind() -> None:
    world = two_lines()
    world.say(Pin(model=MODEL, version=8))
    assert kinds(world.say(Rewind(model=MODEL, to=8)))[0] == "model.rewound"


def test_so_many_versions_may_be_pinned_and_one_that_is_may_be_pinned_again() -> None:
    world = World()
    world.replica_of("trainer", "a")
    world.join("b")
    for number in range(RETAINED_MAX + 1):
        world.register("b", f"engine-{number}")
        world.publish("trainer", number)
        world.fetch(f"engine-{number}")
        world.empty("trainer")
    for number in range(RETAINED_MAX):
        assert kinds(world.say(Pin(model=MODEL, version=number)))[0] == "version.pinned"
    said = refused(world.say(Pin(model=MODEL, version=RETAINED_MAX)), RetentionFull.__name__).message
    assert f"{RETAINED_MAX} pinned versions already" in said
    assert kinds(world.say(Pin(model=MODEL, version=0)))[0] == "version.pinned"
    world.say(Unpin(model=MODEL, version=1))
    assert kinds(world.say(Pin(model=MODEL, version=RETAINED_MAX)))[0] == "version.pinned"


def test_as_many_versions_as_the_bound_says_may_be_retained() -> None:
    world = two_lines()
    assert kinds(world.say(Retain(model=MODEL, last=RETAINED_MAX)))[0] == "model.retention"
    refused(world.say(Retain(model=MODEL, last=RETAINED_MAX + 1)), RetentionFull.__name__)


@pytest.mark.parametrize(("replicas", "more"), [(8, ""), (9, " and 1 more"), (11, " and 3 more")])
def test_a_model_that_is_stood_in_is_not_deleted_and_some_of_who_stands_there_are_named(
    replicas: int, more: str
) -> None:
    world = World()
    world.join("a")
    for number in range(replicas):
        world.register("a", f"r{number:02}")
    said = refused(world.say(Delete(model=MODEL)), ReplicaConflict.__name__).message
    assert f"'r07']{more} on live agents" in said


def test_a_model_is_deleted_whose_replicas_all_stand_on_lost_agents() -> None:
    world = World()
    world.replica_of("trainer", "a", "b")
    world.expire("a")
    refused(world.say(Delete(model=MODEL)), ReplicaConflict.__name__)
    world.expire("b")
    assert kinds(world.say(Delete(model=MODEL)))[0] == "model.deleted"


def test_an_agent_that_is_drained_again_is_told_drained_again() -> None:
    world = World()
    world.replica_of("trainer", "a")
    for _ in range(2):
        assert kinds(world.say(DrainAgent(agent="a"))) == ["agent.draining", "agent.drained"]
    assert kinds(world.say(DrainAgent(agent="a", on=False))) == ["agent.draining"]
    assert not world.catalog.leaving


def test_what_can_not_be_pinned_or_counted_is_named() -> None:
    world = two_lines()
    said = refused(world.say(Pin(model=MODEL, version=7)), VersionUnavailable.__name__).message
    assert said.endswith("version 7 of model 'policy' has no live holder, so it can't be pinned; available now: [8, 9]")
    world.unpublish("keeper")
    world.unpublish("trainer")
    assert refused(world.say(Pin(model=MODEL, version=9))).message.endswith("available now: none")
    assert refused(world.say(Unpin(model=MODEL, version=-1))).message.startswith("version -1 is out of range")
    assert refused(world.say(Quota(nbytes=-1))).message.startswith("quota -1 is out of range")
