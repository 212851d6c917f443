"""Publishing and unpublishing, sentence by sentence of the design."""

from typing import Any, Final

import pytest
from tests.unit.common.catalog.scenes import CONFLICT, NONE, holding, one, only, republished, standing, two

from tensorhub_common.errors import from_code
from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.commands import NO_ROOT, SHARDS_MAX, VERSION_MAX, Decline, Ready
from tensorhub_common.protocol.log.events import (
    PublishDeclined,
    PublishFailed,
    PublishJoined,
    PublishStands,
    PublishWished,
    PublishWithdrawn,
    ReplicaReady,
    VersionGone,
    VersionPublished,
)
from tensorhub_common.protocol.queries import VersionState
from tensorhub_simulator.drivers.catalog import MODEL, CatalogDriver, kinds, refused, root


def with_copy() -> CatalogDriver:
    """Return a trainer that has published 12, and another replica of the same layout."""
    world = standing(trainer="a", copy="b")
    world.publish("trainer", 12)
    return world


def test_a_version_exists_once_all_shards_of_one_replica_are_ready() -> None:
    world = two()
    joined = only(world.ready("trainer", 12, shard=0), PublishJoined)
    assert joined == world.events[-1]
    assert (joined.version, joined.missing) == (12, (1,))
    assert world.catalog.models[MODEL].versions == {}
    published, ready = world.ready("trainer", 12, shard=1)
    assert isinstance(published, VersionPublished)
    assert (published.version, published.replica, published.roots) == (12, "trainer", (root(12, 0), root(12, 1)))
    assert isinstance(ready, ReplicaReady)
    assert (ready.version, ready.round) == (12, None)
    assert world.states("trainer") == ["ready", "ready"]


def test_none_means_the_last_published_one_plus_one() -> None:
    world = two()
    for version in (1, 2):
        assert only(world.publish("trainer", None), VersionPublished).version == version
        world.empty("trainer")
    assert only(world.publish("trainer", VERSION_MAX), VersionPublished).version == VERSION_MAX
    assert only(one().publish("trainer", 0), VersionPublished).version == 0


@pytest.mark.parametrize(("number", "version"), [(12, 12), (None, 8)])
def test_none_is_what_a_sibling_names_or_is_counted_when_the_last_shard_comes(number: int | None, version: int) -> None:
    world = two()
    world.replica_of("other", "c")
    world.ready("trainer", None, shard=0)
    world.publish("other", 7)
    world.ready("trainer", number, shard=1)
    assert world.catalog.models[MODEL].last == version


def test_an_abandoned_number_may_be_used_again() -> None:
    world = two()
    world.ready("trainer", 12, shard=0)
    world.withdraw("trainer", shard=0)
    world.publish("trainer", 11)
    assert isinstance(republished(world, 12)[0], VersionPublished)
    assert kinds(republished(world, 12)) == ["version.available", "replica.ready"], "the same bytes may come again"


def test_all_shards_of_a_replica_name_one_version_else_it_fails_for_all() -> None:
    """At once, though a third shard has not come."""
    world = standing(trainer="abc")
    world.ready("trainer", 12, shard=0)
    failed = only(world.ready("trainer", 13, shard=2), PublishFailed)
    assert (failed.error, failed.shards) == (CONFLICT, (0, 2))
    assert "[12, 13]" in failed.message
    assert world.replica("trainer").offers == {}
    assert world.states("trainer") == ["empty"] * 3


def test_publishing_again_what_this_shard_already_holds_returns() -> None:
    world = two()
    world.publish("trainer", 12)
    stands = only(world.ready("trainer", 12, shard=1), PublishStands)
    assert (stands.shard, stands.version) == (1, 12)


NATS_PAYLOAD_BYTES_MAX: Final = 1 << 20
"""What a NATS server takes as it comes."""


@pytest.mark.long
def test_an_event_that_names_the_roots_of_the_most_shards_fits_into_a_message() -> None:
    world, shards = CatalogDriver(), 300
    world.join("a")
    for index in range(shards):
        world.register("a", "trainer", index, shards, layout=f"{index:064x}")
    for index in range(shards):
        events = world.ready("trainer", 1, index, digest=f"{index:064x}")
    assert isinstance(events[0], VersionPublished)
    assert len(encode(events[0])) * SHARDS_MAX < NATS_PAYLOAD_BYTES_MAX * shards


def test_an_equal_root_makes_a_holder_of_another_replica() -> None:
    world = with_copy()
    assert only(world.publish("copy", 12), ReplicaReady).replica == "copy"
    version = world.catalog.models[MODEL].versions[12]
    assert version.holders == 2
    assert kinds(world.unpublish("trainer")) == ["shard.draining"]
    assert version.state is VersionState.AVAILABLE
    world = with_copy()
    world.empty("trainer")
    assert kinds(world.publish("copy", 12)) == ["version.available", "replica.ready"], "its holders were gone"
    world = standing(trainer="a", copy="b")
    world.ready("trainer", 12, digest=NO_ROOT)
    refused(world.ready("copy", 12, digest=NO_ROOT), CONFLICT)


@pytest.mark.parametrize(
    ("first", "meanwhile", "second", "said"),
    [
        (13, 12, 12, "[12, 13]"),
        (12, 12, 12, "with other bytes than these"),
        (12, 13, 12, "not newer than the last published one, 13"),
        (12, 13, None, "not newer than the last published one, 13"),
        (None, VERSION_MAX, None, f"no version above {VERSION_MAX}"),
    ],
)
def test_an_offer_that_can_not_be_published_any_more_fails_for_all(
    first: int | None, meanwhile: int, second: int | None, said: str
) -> None:
    """The first shard must not wait for a sibling that can only be refused."""
    world = standing(trainer="ab", other="cd")
    world.ready("trainer", first, shard=0)
    world.publish("other", meanwhile)
    failed = only(world.ready("trainer", second, shard=1, digest="other"), PublishFailed)
    assert failed.shards == (0, 1)
    assert said in failed.message
    assert (world.replica("trainer").offers, world.catalog.models[MODEL].last) == ({}, meanwhile)


def test_a_replica_that_lost_one_shard_is_made_whole_by_that_shard_alone() -> None:
    """Agent b came back without its memory; its worker publishes the same bytes again."""
    world = two()
    world.publish("trainer", 12)
    world.join("b", holding(None, None, shard=1))
    assert world.states("trainer") == ["ready", "empty"]
    assert kinds(world.ready("trainer", 12, shard=1)) == ["version.available", "replica.ready"]


def test_a_shard_that_waits_may_withdraw_and_learns_who_was_missing() -> None:
    world = two()
    world.ready("trainer", 12, shard=0)
    assert only(world.withdraw("trainer", shard=0), PublishWithdrawn).missing == (1,)
    assert world.replica("trainer").offers == {}
    world.ready("trainer", 12, shard=1)
    assert isinstance(world.ready("trainer", 12, shard=0)[0], VersionPublished), "it may come again"


def test_a_withdrawal_after_the_decision_learns_that_it_is_published() -> None:
    """The log decides, so a call never both returns and is withdrawn."""
    world = two()
    world.publish("trainer", 12)
    assert only(world.withdraw("trainer", shard=0), PublishStands).version == 12
    assert world.states("trainer") == ["ready", "ready"]


def test_a_late_offer_of_an_old_lane_word_publishes_nothing() -> None:
    """A `Ready` that was lost and comes after its withdrawal is older than the lane's last word."""
    world = one()
    late = Ready(by=world.by("a", 0), model=MODEL, replica="trainer", shard=0, version=12, root=root(12))
    refused(world.withdraw("trainer"), NONE)
    assert "too late" in refused(world.say(late), "BadCommand").message


def test_publish_from_outside_is_a_wish_that_changes_nothing() -> None:
    world = two()
    wished = only(world.wish("trainer", 12), PublishWished)
    assert (wished.version, wished.shards) == (12, 2)
    assert world.states("trainer") == ["empty", "empty"]
    world.publish("trainer", 12)
    assert kinds(world.wish("trainer", 12)) == ["publish.wished"], "all shards hold it"
    world.join("b", holding(None, None, shard=1))
    assert kinds(world.wish("trainer", 12)) == ["publish.wished"], "one shard holds it and the other lost it"
    world.want("trainer", 12, 1)
    refused(world.wish("trainer", 12), "ReplicaConflict")
    world.give_up("trainer", 1)
    assert kinds(world.wish("trainer", 12)) == ["publish.wished"]


@pytest.mark.parametrize(("error", "code"), [(NONE, NONE), ("Nonsense", from_code("Nonsense", "").code)])
def test_why_a_wish_is_not_fulfilled_is_passed_on_to_everybody(error: str, code: str) -> None:
    world = one()
    about: dict[str, Any] = {"model": MODEL, "replica": "trainer", "shard": 0, "wish": 41}
    decline = Decline(by=world._shard_by("trainer", 0), **about, error=error, message="x" * 1001)
    told = only(world.say(decline), PublishDeclined)
    assert (told.model, told.replica, told.shard) == (MODEL, "trainer", 0)
    assert (told.wish, told.error, told.message) == (41, code, "x" * 1000)


def test_unpublish_ends_the_version_and_the_memory_is_free_only_when_drained() -> None:
    world = one()
    world.publish("trainer", 12)
    events = world.unpublish("trainer")
    assert kinds(events) == ["shard.draining", "version.unavailable"]
    assert only(events, VersionGone).reason == "unpublished"
    assert world.states("trainer") == ["draining"]
    refused(world.unpublish("trainer"), NONE)
    assert kinds(world.drained("trainer")) == ["shard.drained"]
    assert world.states("trainer") == ["empty"]


def test_one_shard_that_leaves_ends_the_whole_replicas_version() -> None:
    world = two()
    world.publish("trainer", 12)
    assert kinds(world.unpublish("trainer", 1)) == ["shard.draining", "version.unavailable"]
    assert world.states("trainer") == ["ready", "draining"]
    assert kinds(world.unpublish("trainer", 0)) == ["shard.draining"]


def test_an_offer_that_another_replica_overtook_with_other_bytes_fails_for_all() -> None:
    """With equal bytes it becomes a holder."""
    for digest in ("other", None):
        world = standing(trainer="ab", copy="cd")
        world.ready("trainer", 12, shard=0, digest=digest)
        world.publish("copy", 12)
        events = world.ready("trainer", 12, shard=1)
        if digest is None:
            assert kinds(events) == ["replica.ready"]
            assert world.catalog.models[MODEL].versions[12].holders == 2
        else:
            failed = only(events, PublishFailed)
            assert (failed.error, failed.shards) == (CONFLICT, (0, 1))
