"""A round that does not end with the version it began with: its sources are gone, or a newer one has come meanwhile.

And rounds that are staged, in which the old version stands until every shard is filled.
"""

from typing import Any

import pytest
from tests.unit.common.catalog.scenes import BAD, GONE, of, only, round_of, standing, updatable

from tensorhub_common.catalog.state import ATTEMPTS_MAX, SUPERSEDED_MAX
from tensorhub_common.protocol.log.commands import Drop, Rewind, VersionRequest, Want
from tensorhub_common.protocol.log.events import (
    Event,
    ReplicaReady,
    RoundOvertaken,
    RoundSettled,
    RoundStarted,
    VersionGone,
)
from tensorhub_common.protocol.log.levels import Level
from tensorhub_simulator.drivers.catalog import (
    MODEL,
    CatalogDriver,
    decided,
    failed,
    kinds,
    reader_of_two,
    refused,
    root,
)

# Sources that are gone.


def reading(wish: VersionRequest = "latest", *, attempt: int = 1) -> CatalogDriver:
    """Return an engine that reads 12, at this attempt, and another replica that holds nothing."""
    world = reader_of_two()
    world.replica_of("other", "e")
    world.start("engine", wish)
    round_of(world).attempt = attempt
    return world


def gives_up(world: CatalogDriver) -> tuple[Event, ...]:
    """Let a shard of the engine say that the sources of this attempt are gone."""
    return world.give_up_attempt("engine", 0, world.attempt("engine"))


@pytest.mark.parametrize(
    ("wish", "attempt", "ends"),
    [
        ("latest", 1, "round.reopened"),
        ("latest", ATTEMPTS_MAX - 1, "round.reopened"),
        ("latest", ATTEMPTS_MAX, "round.failed"),
        (12, 1, "round.failed"),
    ],
)
def test_latest_goes_on_with_another_version_when_its_own_went_in_good_order_and_only_so_often(
    wish: VersionRequest, attempt: int, ends: str
) -> None:
    world = reading(wish, attempt=attempt)
    world.empty("trainer")
    events = gives_up(world)
    assert kinds(events) == [ends]
    if ends == "round.failed":
        assert failed(events).message == "shard 0: no source is left"
    else:
        assert decided(world.publish("trainer", 13)).version == 13


@pytest.mark.parametrize(("crashed", "newer"), [(True, False), (False, False), (True, True)])
def test_a_crash_of_the_only_holder_fails_the_round_unless_a_newer_version_stands(
    *, crashed: bool, newer: bool
) -> None:
    """So do sources that can't be read though the log counts them: to ask for the same again would not end."""
    world = reading()
    if newer:
        world.publish("other", 13)
    if crashed:
        world.expire("a")
    assert decided(gives_up(world)).version == 13 if newer else failed(gives_up(world)).error == GONE


def overwritten(level: Level, left: int = 11) -> CatalogDriver:
    """Return an engine that held 12 and reads 13, which is unpublished meanwhile: what is `left` another one holds."""
    world = CatalogDriver(level=level)
    for name, agent in (("trainer", "a"), ("engine", "b"), ("elder", "c")):
        world.replica_of(name, agent)
    for version in (11, 12):
        world.publish("trainer", version)
        if version == left:
            world.fetch("elder")
        world.fetch("engine")
        world.empty("trainer")
    world.publish("trainer", 13)
    world.start("engine", "newer")
    world.empty("trainer")
    return world


def test_newer_takes_nothing_older_than_what_was_held_also_once_that_is_overwritten() -> None:
    world = overwritten(Level.NEVER_OLDER)
    assert kinds(gives_up(world)) == ["round.reopened"]
    assert decided(world.publish("trainer", 14)).version == 14
    world = overwritten(Level.NEVER_OLDER)
    gives_up(world)
    assert kinds(world.give_up("engine")) == ["round.withdrawn"]
    assert decided(world.want("engine", "newer")).version == 11, "a new call of who was told that it holds nothing"


@pytest.mark.parametrize(("level", "left", "version"), [(Level.NEVER_OLDER, 12, 12), (Level.FORGETTING, 11, 11)])
def test_what_was_held_may_be_read_again_and_below_the_level_an_older_one(
    level: Level, left: int, version: int
) -> None:
    assert decided(gives_up(overwritten(level, left))).version == version


def test_what_was_held_and_is_retired_counts_no_more() -> None:
    """A rewind leads back, also who reads something newer by then."""
    world = overwritten(Level.NEVER_OLDER)
    decision = decided(world.say(Rewind(model=MODEL, to=11)))
    assert (decision.replica, decision.version) == ("engine", 11)


BOTH = (True, True)


def want(world: CatalogDriver, replica: str, wish: VersionRequest = "latest", knows: tuple[bool, bool] = BOTH) -> None:
    """Let both shards of the replica join a round, as agents that know of superseding do."""
    for shard, supersede in enumerate(knows):
        by = world._shard_by(replica, shard)
        world.say(Want(by=by, model=MODEL, replica=replica, shard=shard, want=wish, supersede=supersede))


def drop(world: CatalogDriver, shard: int = 0, **said: Any) -> tuple[Event, ...]:
    """Let a shard of the engine say that it would rather read the newer version."""
    about: dict[str, Any] = {"round": world.round("engine"), "attempt": world.attempt("engine"), **said}
    about.setdefault("by", world._shard_by("engine", shard))
    return world.say(Drop(model=MODEL, replica="engine", shard=shard, **about))


def overtakable(wish: VersionRequest = "latest", knows: tuple[bool, bool] = BOTH) -> CatalogDriver:
    """Return an engine of two shards that reads 1, from a replica other than the trainer."""
    world = standing(trainer="ab", engine="cd", keeper="ef", waiting="gh", second="ij")
    world.publish("trainer", 1)
    world.fetch("keeper")
    world.empty("trainer")
    want(world, "engine", wish, knows)
    world.grant_all("engine")
    return world


def test_who_reads_an_older_version_is_told_of_the_newer_one_and_who_waits_for_leases_is_not() -> None:
    world = overtakable()
    for name in ("waiting", "second"):
        want(world, name)
    world.grant_all("second")
    told, second = of(world.publish("trainer", 2), RoundOvertaken)
    assert (told.model, told.replica, told.version) == (MODEL, "engine", 2)
    assert (told.round, told.attempt) == (world.round("engine"), world.attempt("engine"))
    assert second.replica == "second"


def test_one_shard_turns_the_round_to_the_newer_version() -> None:
    world = overtakable()
    world.publish("trainer", 2)
    decision = decided(drop(world, 1))
    assert (decision.replica, decision.version, decision.attempt) == ("engine", 2, 2)
    assert round_of(world).superseded == 1
    world = overtakable()
    round_of(world).attempt = ATTEMPTS_MAX
    assert not of(world.publish("trainer", 2), RoundOvertaken), "not at its last attempt"
    round_of(world).attempt = ATTEMPTS_MAX - 1
    assert decided(drop(world)).attempt == ATTEMPTS_MAX


def test_a_word_about_another_attempt_or_round_or_shard_is_refused() -> None:
    world = overtakable()
    assert "nothing newer" in refused(drop(world), BAD).message
    old = world.round("engine")
    world.give_up("engine", 0)
    want(world, "engine")
    world.grant_all("engine")
    world.publish("trainer", 2)
    refused(drop(world, round=old), BAD)
    refused(drop(world, 0, by=world.by("d", 77)), BAD)
    refused(drop(world, attempt=world.attempt("engine") + 1), BAD)
    refused(drop(world, attempt=world.attempt("engine") - 1), BAD)
    drop(world)
    assert "is over" in refused(drop(world), BAD).message  # Decided anew, and not started yet.


@pytest.mark.parametrize(
    ("wish", "knows"), [(1, BOTH), ("latest", (False, False)), ("latest", (True, False)), ("latest", (False, True))]
)
def test_who_asked_for_a_number_or_knows_nothing_of_superseding_reads_to_the_end(
    wish: VersionRequest, knows: tuple[bool, bool]
) -> None:
    """One shard that would not understand that the round turns keeps all from it, whichever comes first."""
    world = overtakable(wish, knows)
    assert not of(world.publish("trainer", 2), RoundOvertaken)
    refused(drop(world), BAD)


def test_a_round_is_turned_at_most_so_often_and_then_reads_to_its_end() -> None:
    world = overtakable()
    for number in range(2, 2 + SUPERSEDED_MAX):
        world.publish("trainer", number)
        drop(world)
        world.grant_all("engine")
        world.fetch("keeper", "latest")
        world.empty("trainer")
    assert (round_of(world).superseded, round_of(world).version) == (SUPERSEDED_MAX, 1 + SUPERSEDED_MAX)
    assert not of(world.publish("trainer", 2 + SUPERSEDED_MAX), RoundOvertaken)
    refused(drop(world), BAD)
    world.filled("engine", 1 + SUPERSEDED_MAX, 0)
    assert kinds(world.filled("engine", 1 + SUPERSEDED_MAX, 1))[-1] == "replica.ready"


def test_nobody_begins_with_a_version_that_is_overtaken_by_then() -> None:
    world = overtakable()
    want(world, "second")
    for number in range(1, SUPERSEDED_MAX + 1):
        world.granted("second", 0)
        world.publish("trainer", number + 1)
        assert decided(world.granted("second", 1)).version == number + 1
        assert (round_of(world, "second").superseded, round_of(world, "second").granted) == (number, set())
        world.fetch("keeper")
        world.empty("trainer")
    world.granted("second", 0)
    world.publish("trainer", SUPERSEDED_MAX + 2)
    assert kinds(world.granted("second", 1)) == ["round.started"]


def staged_over_twelve(*staged: int, granted: bool = True) -> CatalogDriver:
    """An engine that holds 12 reads 13; these of its two shards are staged."""
    world = updatable()
    for shard in (0, 1):
        world.want("engine", "newer", shard, staged=shard in staged)
    if granted:
        world.grant_all("engine")
    return world


@pytest.mark.parametrize(("staged", "stands"), [((), None), ((0,), None), ((0, 1), True)])
def test_an_engine_stands_through_a_round_in_which_every_shard_is_staged(
    staged: tuple[int, ...], *, stands: bool | None
) -> None:
    world = staged_over_twelve(*staged, granted=False)
    events = world.grant_all("engine")
    assert only(events, RoundStarted).stands is stands
    gone = [(event.version, event.reason) for event in of(events, VersionGone)]
    assert gone == ([] if stands else [(12, "replaced")]), "in good order: whoever reads it goes on with another one"


def test_the_old_version_stands_and_all_shards_swap_when_the_last_is_filled() -> None:
    world = staged_over_twelve(0, 1)
    members = world.replica("engine").members
    assert world.states("engine") == ["ready", "ready"]
    assert kinds(world.filled("engine", 13, 0)) == ["shard.filled"]
    refused(world.filled("engine", 13, 0), BAD)
    assert world.replica("engine").version == 12
    assert [shard.version for shard in members.values()] == [12, 12]
    events = world.filled("engine", 13, 1)
    assert kinds(events) == ["shard.filled", "version.unavailable", "replica.ready"]
    gone = only(events, VersionGone)
    assert (gone.version, gone.reason) == (12, "replaced")
    assert [(shard.version, shard.root) for shard in members.values()] == [(13, root(13, 0)), (13, root(13, 1))]


@pytest.mark.parametrize("filled", [0, 1])
def test_a_round_that_fails_leaves_the_old_version_untouched(filled: int) -> None:
    world = staged_over_twelve(0, 1)
    refused(world.filled("engine", 13, 1 - filled, digest=root(12, 1 - filled)), "IntegrityError")
    world.filled("engine", 13, filled)
    assert failed(world.give_up("engine", 1 - filled)).error == "RoundTimeout"
    assert world.replica("engine").version == 12
    assert world.catalog.models["policy"].versions[12].holders == 1


def test_a_sibling_in_place_is_overwritten_and_a_staged_shard_is_not() -> None:
    world = staged_over_twelve(0)
    assert world.states("engine") == ["ready", "filling"]
    world.filled("engine", 13, 0)
    assert world.states("engine") == ["ready", "filling"]
    assert isinstance(world.filled("engine", 13, 1)[-1], ReplicaReady)
    assert world.replica("engine").version == 13


def test_an_empty_shard_is_filled_beside_too_and_holds_nothing_before_the_end() -> None:
    world = reader_of_two()
    world.want_all("engine", staged=True)
    world.grant_all("engine")
    world.filled("engine", 12, 0)
    assert world.states("engine") == ["empty", "empty"]
    world.filled("engine", 12, 1)
    assert world.states("engine") == ["ready", "ready"]


def test_a_source_that_goes_in_good_order_lets_a_staged_engine_go_on_with_what_it_has() -> None:
    """Nothing was overwritten, so None is an answer still."""
    world = staged_over_twelve(0, 1)
    world.empty("trainer")
    assert kinds(world.give_up_attempt("engine", 0, 1)) == ["round.reopened"]
    assert isinstance(world.settle("engine", 1)[-1], RoundSettled)
    assert world.replica("engine").version == 12
