"""Rounds of mapped replicas: the last shard that is missing says with one word that it has leases and version."""

from itertools import count

import pytest
from tests.unit.common.catalog.scenes import BAD, of, standing

from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.invariants import check_invariants
from tensorhub_common.catalog.state import LANES_MAX, REPLICAS_MAX, Catalog
from tensorhub_common.protocol.log import commands
from tensorhub_common.protocol.log.events import Event, ReplicaReady, RoundDecided
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL, Level
from tensorhub_simulator.drivers.catalog import MODEL, CatalogDriver, kinds, refused


def mapping(shards: int = 1, *, staged: bool = True, mapped: bool = True) -> CatalogDriver:
    """A rollout that is to show version 12 of a trainer, which is decided."""
    world = standing(trainer="ab"[:shards])
    for index, agent in enumerate("cd"[:shards]):
        world.join(agent)
        world.register(agent, "rollout", index, shards, mapped=mapped)
    world.publish("trainer", 12)
    world.want_all("rollout", staged=staged)
    return world


@pytest.mark.parametrize("attempt", [1, None])
def test_a_round_begins_and_ends_with_one_word_and_the_longer_way_is_still_there(attempt: int | None) -> None:
    world = mapping()
    assert kinds(world.filled("rollout", 12, attempt=1)) == ["replica.ready"]
    assert (world.replica("rollout").version, world.replica("rollout").round) == (12, None)
    world = mapping()
    assert kinds(world.granted("rollout")) == ["round.started"]
    assert kinds(world.filled("rollout", 12, attempt=attempt)) == ["shard.filled", "replica.ready"]


@pytest.mark.parametrize("attempt", [None, 0, 2])
def test_leases_of_another_attempt_or_none_are_no_leases(attempt: int | None) -> None:
    assert refused(mapping().filled("rollout", 12, attempt=attempt), BAD).error == BAD


def test_what_was_decided_again_meanwhile_is_not_ended_by_the_old_word() -> None:
    world = mapping()
    world.replan("rollout")
    refused(world.filled("rollout", 12, attempt=1), BAD)
    assert kinds(world.filled("rollout", 12, attempt=2)) == ["replica.ready"]


def test_what_is_overtaken_meanwhile_is_shown_whole() -> None:
    world = mapping()
    world.replica_of("other", "e")
    world.publish("other", 13)
    assert kinds(world.filled("rollout", 12, attempt=1)) == ["replica.ready"]
    world.want("rollout", "newer", staged=True)
    assert kinds(world.filled("rollout", 13, attempt=1)) == ["replica.ready"]


def test_another_version_or_root_is_refused_as_ever() -> None:
    world = mapping()
    refused(world.filled("rollout", 11, attempt=1), BAD)
    refused(world.filled("rollout", 12, attempt=1, digest="another"), "IntegrityError")
    assert kinds(world.granted("rollout")) == ["round.started"], "nothing was begun by what was refused"


def test_while_a_sibling_is_missing_the_round_is_not_begun() -> None:
    world = mapping(2)
    refused(world.filled("rollout", 12, 0, attempt=1), BAD)
    world.grant_all("rollout")
    world.filled("rollout", 12, 0)
    assert kinds(world.filled("rollout", 12, 1)) == ["shard.filled", "replica.ready"]


@pytest.mark.parametrize(("mapped", "how"), [(True, "with"), (False, "without")])
def test_all_shards_of_a_replica_are_mapped_or_none(*, mapped: bool, how: str) -> None:
    """Who maps is no holder, so a version of which some shards were mapped would be held by halves."""
    world = CatalogDriver()
    world.join("c")
    world.register("c", "rollout", 0, 2, mapped=mapped)
    message = refused(world.register("c", "rollout", 1, 2, mapped=not mapped), "LayoutMismatch").message
    assert message.startswith(f"policy/rollout was registered {how} install='mapped': ")
    assert kinds(world.register("c", "rollout", 1, 2, mapped=mapped)) == ["shard.registered"]


@pytest.mark.parametrize(("staged", "mapped"), [(True, False), (False, True), (False, False)])
def test_who_moves_bytes_waits_for_the_start(*, staged: bool, mapped: bool) -> None:
    """A retained last copy may have to stay, and others must hear that a round reads: for a newer version's sake."""
    assert refused(mapping(staged=staged, mapped=mapped).filled("rollout", 12, attempt=1), BAD).error == BAD


class Crowd:
    """As many mapped replicas as a model may have beside their publisher, folded without a check after each word."""

    def __init__(self, level: Level) -> None:
        self.catalog = Catalog("run-7", level=level)
        self.replicas = [f"rollout-{number}" for number in range(REPLICAS_MAX - 1)]
        self._numbers = count(1)
        for agent in range(-(-REPLICAS_MAX // LANES_MAX)):
            self._say(commands.Join(by=self._by(agent * LANES_MAX), host="h", site="s"))
        self.of("trainer", commands.Register, shards=1, layout="L", nbytes=64)
        for replica in self.replicas:
            self.of(replica, commands.Register, shards=1, layout="L", nbytes=0, mapped=True)

    def of(self, replica: str, kind: type[commands.AnyCommand], **fields: object) -> tuple[Event, ...]:
        lane = REPLICAS_MAX - 1 if replica == "trainer" else int(replica.removeprefix("rollout-"))
        return self._say(kind(by=self._by(lane), model=MODEL, replica=replica, shard=0, **fields))  # type: ignore[arg-type, call-arg]

    def _by(self, lane: int) -> commands.Sender:
        agent, own = divmod(lane, LANES_MAX)
        return commands.Sender(f"a{agent}/{own}", 1, next(self._numbers))

    def _say(self, command: commands.AnyCommand) -> tuple[Event, ...]:
        return apply(self.catalog, self.catalog.seq + 1, float(self.catalog.seq), command)


@pytest.mark.long
@pytest.mark.parametrize("level", [Level.FIRST, NEWEST_LEVEL])
def test_a_model_full_of_replicas_that_hold_what_comes_back_is_ready_in_one_command(level: Level) -> None:
    """Each of them is ready at once and lets the next go on; a call for each would be deeper than Python's stack."""
    crowd = Crowd(level)
    crowd.of("trainer", commands.Ready, version=1, root="r")
    for replica in crowd.replicas:
        crowd.of(replica, commands.Want, want="latest", staged=True)
        number = crowd.catalog.seq
        crowd.of(replica, commands.Filled, round=number, version=1, root="r", attempt=1)
    crowd.of("trainer", commands.Unpublish)
    crowd.of("trainer", commands.Drained)
    for replica in crowd.replicas:
        assert kinds(crowd.of(replica, commands.Want, want="latest", staged=True)) == ["round.joined"]
    events = crowd.of("trainer", commands.Ready, version=1, root="r")
    assert [event.replica for event in of(events, ReplicaReady)] == ["trainer", *crowd.replicas]
    check_invariants(crowd.catalog)


@pytest.mark.parametrize(("level", "decisions"), [(Level.TOLERANT, 4), (Level.WAKING_ONCE, 1), (NEWEST_LEVEL, 1)])
def test_one_that_reads_is_decided_once_beside_those_that_are_ready_at_once(level: Level, decisions: int) -> None:
    """Below the level it was decided again for each of the others, and so used up its attempts."""
    world = CatalogDriver(level=level)
    world.replica_of("trainer", "a")
    world.join("c")
    shown = ["rollout-0", "rollout-1", "rollout-2"]
    for replica in shown:
        world.register("c", replica, mapped=True)
    world.publish("trainer", 12)
    for replica in shown:
        world.want(replica, "latest", staged=True)
        world.filled(replica, 12, attempt=1)
    world.empty("trainer")
    world.register("c", "reader")
    for replica in (*shown, "reader"):
        world.want(replica, "latest", staged=True)
    events = world.publish("trainer", 12)
    assert [event.replica for event in of(events, ReplicaReady)] == ["trainer", *shown]
    assert [event.replica for event in of(events, RoundDecided)] == ["reader"] * decisions
    assert world.attempt("reader") == decisions
