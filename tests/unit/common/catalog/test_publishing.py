"""Publishing and unpublishing in the fold, sentence by sentence of the design."""

from typing import Any

import pytest
from tests.unit.common.catalog.catalog_world import MODEL, World, kinds, refused, root

from tensorhub_common.errors import VersionConflict, from_code
from tensorhub_common.protocol.log.commands import NO_ROOT, VERSION_MAX, Decline, Rewind
from tensorhub_common.protocol.log.events import (
    PublishDeclined,
    PublishFailed,
    PublishJoined,
    PublishStands,
    PublishWished,
    PublishWithdrawn,
    ReplicaReady,
    VersionPublished,
)


@pytest.fixture
def one() -> World:
    """A trainer of one shard."""
    world = World()
    world.replica_of("trainer", "a")
    return world


@pytest.fixture
def two() -> World:
    """A trainer of two shards on two agents."""
    world = World()
    world.replica_of("trainer", "a", "b")
    return world


# -------------------------------------------------------------------------------------------------------------- publish


def test_a_version_exists_once_all_shards_of_one_replica_are_ready(two: World) -> None:
    (joined,) = two.ready("trainer", 12, shard=0)
    assert joined == two.events[-1]
    assert isinstance(joined, PublishJoined)
    assert (joined.version, joined.missing) == (12, (1,))
    assert two.catalog.models[MODEL].versions == {}
    published, ready = two.ready("trainer", 12, shard=1)
    assert isinstance(published, VersionPublished)
    assert (published.version, published.replica, published.roots) == (12, "trainer", (root(12, 0), root(12, 1)))
    assert isinstance(ready, ReplicaReady)
    assert (ready.version, ready.round) == (12, None)
    assert two.states("trainer") == ["ready", "ready"]


def test_none_means_the_last_published_one_plus_one(two: World) -> None:
    assert isinstance(two.publish("trainer", None)[0], VersionPublished)
    assert two.catalog.models[MODEL].last == 1
    two.empty("trainer")
    two.publish("trainer", None)
    assert two.catalog.models[MODEL].last == 2


def test_a_shard_that_names_a_number_speaks_for_one_that_names_none(two: World) -> None:
    two.ready("trainer", None, shard=0)
    two.ready("trainer", 12, shard=1)
    assert two.catalog.models[MODEL].last == 12


def test_none_is_counted_from_what_is_published_when_the_last_shard_comes(two: World) -> None:
    two.replica_of("other", "c")
    two.ready("trainer", None, shard=0)
    two.publish("other", 7)
    two.ready("trainer", None, shard=1)
    assert two.catalog.models[MODEL].last == 8


def test_versions_are_compared_with_the_last_published_so_an_abandoned_number_may_be_used_again(two: World) -> None:
    two.ready("trainer", 12, shard=0)
    two.withdraw("trainer", shard=0)
    two.publish("trainer", 11)
    two.empty("trainer")
    assert isinstance(two.publish("trainer", 12)[0], VersionPublished)


@pytest.mark.parametrize("version", [11, 12])
def test_a_number_that_is_not_newer_is_refused_though_nobody_holds_the_last_one(one: World, version: int) -> None:
    one.publish("trainer", 12)
    one.empty("trainer")
    assert "publish 13 or higher" in refused(one.ready("trainer", version, digest="other"), "VersionConflict").message


def test_all_shards_of_a_replica_name_one_version_else_it_fails_for_all(two: World) -> None:
    two.ready("trainer", 12, shard=0)
    (failed,) = two.ready("trainer", 13, shard=1)
    assert isinstance(failed, PublishFailed)
    assert (failed.error, failed.shards) == ("VersionConflict", (0, 1))
    assert "[12, 13]" in failed.message
    assert two.replica("trainer").offers == {}
    assert two.states("trainer") == ["empty", "empty"]


def test_two_numbers_fail_at_once_though_a_third_shard_has_not_come() -> None:
    world = World()
    world.replica_of("trainer", "a", "b", "c")
    world.ready("trainer", 12, shard=0)
    (failed,) = world.ready("trainer", 13, shard=2)
    assert isinstance(failed, PublishFailed)
    assert failed.shards == (0, 2)


def test_publishing_again_what_this_shard_already_holds_returns(two: World) -> None:
    two.publish("trainer", 12)
    (stands,) = two.ready("trainer", 12, shard=1)
    assert isinstance(stands, PublishStands)
    assert (stands.shard, stands.version) == (1, 12)


def test_publishing_again_what_was_retired_meanwhile_does_not_return_as_if_it_stood(one: World) -> None:
    one.replica_of("engine", "b")
    one.publish("trainer", 11)
    one.fetch("engine")
    one.empty("trainer")
    one.publish("trainer", 12)
    one.say(Rewind(model=MODEL, to=11))
    assert "unpublish 12 first" in refused(one.ready("trainer", 12), "VersionConflict").message


@pytest.mark.parametrize("version", [13, None])
def test_publishing_over_an_unreleased_version_is_a_conflict(one: World, version: int | None) -> None:
    one.publish("trainer", 11)
    assert "unpublish 11 first" in refused(one.ready("trainer", version), "VersionConflict").message


@pytest.mark.parametrize("version", [-1, VERSION_MAX + 1])
def test_a_number_out_of_range_is_refused(one: World, version: int) -> None:
    refused(one.ready("trainer", version), "VersionConflict")


def test_none_is_refused_above_the_highest_number(one: World) -> None:
    """Counting on would leave the range that every JSON reader keeps exact."""
    one.publish("trainer", VERSION_MAX)
    one.empty("trainer")
    refused(one.ready("trainer", None), "VersionConflict")
    assert one.catalog.models[MODEL].last == VERSION_MAX


def test_shards_that_name_none_fail_together_above_the_highest_number(two: World) -> None:
    two.replica_of("other", "c")
    two.ready("trainer", None, shard=0)
    two.publish("other", VERSION_MAX)
    (failed,) = two.ready("trainer", None, shard=1)
    assert isinstance(failed, PublishFailed)
    assert failed.shards == (0, 1)


def test_version_zero_can_be_published(one: World) -> None:
    assert isinstance(one.publish("trainer", 0)[0], VersionPublished)


@pytest.mark.parametrize("digest", ["", "x" * 65, "two words", "\x00", "ü", "a.b"])
def test_a_root_that_is_no_digest_is_refused(one: World, digest: str) -> None:
    """Events name the roots of all shards, so a long one would make an event larger than a NATS message."""
    refused(one.ready("trainer", 12, digest=digest), "BadCommand")


@pytest.mark.long
def test_an_event_that_names_the_roots_of_the_most_shards_fits_into_a_message() -> None:
    world = World()
    world.join("a")
    shards = 300
    for index in range(shards):
        world.register("a", "trainer", index, shards, layout=f"{index:064x}")
    for index in range(shards):
        events = world.ready("trainer", 1, index, digest=f"{index:064x}")
    assert isinstance(events[0], VersionPublished)


# ---------------------------------------------------------------------------------------------------- another publisher


def test_another_replica_may_publish_the_last_version_with_an_equal_root_and_becomes_a_holder(one: World) -> None:
    one.replica_of("copy", "b")
    one.publish("trainer", 12)
    (ready,) = one.publish("copy", 12)
    assert isinstance(ready, ReplicaReady)
    assert ready.replica == "copy"
    assert one.catalog.models[MODEL].versions[12].holders == 2


def test_an_equal_root_brings_a_version_back_whose_holders_are_gone(one: World) -> None:
    one.replica_of("copy", "b")
    one.publish("trainer", 12)
    one.empty("trainer")
    assert kinds(one.publish("copy", 12)) == ["version.available", "replica.ready"]


def test_another_root_at_the_same_number_is_a_conflict(one: World) -> None:
    one.replica_of("copy", "b")
    one.publish("trainer", 12)
    assert "other bytes" in refused(one.ready("copy", 12, digest="other"), "VersionConflict").message


def test_another_layout_can_not_show_that_its_bytes_are_equal(one: World) -> None:
    one.join("b")
    one.register("b", "copy", layout="K")
    one.publish("trainer", 12)
    refused(one.ready("copy", 12), "VersionConflict")


def test_a_root_of_no_digest_vouches_for_nothing(one: World) -> None:
    one.replica_of("copy", "b")
    one.ready("trainer", 12, digest=NO_ROOT)
    refused(one.ready("copy", 12, digest=NO_ROOT), "VersionConflict")


def test_an_offer_that_another_replica_overtook_with_equal_bytes_becomes_a_holder(two: World) -> None:
    two.replica_of("copy", "c", "d")
    two.ready("trainer", 12, shard=0)
    two.publish("copy", 12)
    assert kinds(two.ready("trainer", 12, shard=1)) == ["replica.ready"]
    assert two.catalog.models[MODEL].versions[12].holders == 2


def test_an_offer_that_another_replica_overtook_with_other_bytes_fails_for_all(two: World) -> None:
    two.replica_of("copy", "c", "d")
    two.ready("trainer", 12, shard=0, digest="other")
    two.publish("copy", 12)
    (failed,) = two.ready("trainer", 12, shard=1)
    assert isinstance(failed, PublishFailed)
    assert (failed.error, failed.shards) == (VersionConflict.__name__, (0, 1))


@pytest.mark.parametrize("version", [12, None])
def test_an_offer_that_was_overtaken_by_a_newer_version_fails_for_all(two: World, version: int | None) -> None:
    """The first shard must not wait for a sibling that can only be refused."""
    two.replica_of("other", "c")
    two.ready("trainer", 12, shard=0)
    two.publish("other", 13)
    (failed,) = two.ready("trainer", version, shard=1)
    assert isinstance(failed, PublishFailed)
    assert failed.shards == (0, 1)
    assert two.replica("trainer").offers == {}


def test_a_shard_that_names_an_old_number_fails_its_waiting_siblings_too(two: World) -> None:
    two.publish("trainer", 12)
    two.empty("trainer")
    two.ready("trainer", 13, shard=0)
    (failed,) = two.ready("trainer", 12, shard=1, digest="other")
    assert isinstance(failed, PublishFailed)
    assert "[12, 13]" in failed.message


def test_a_replica_that_lost_one_shard_is_made_whole_by_that_shard_alone(two: World) -> None:
    """Agent b came back without its memory; its worker publishes the same bytes again."""
    two.publish("trainer", 12)
    two.join("b", two.holding("trainer", 1).__class__(model=MODEL, replica="trainer", shard=1))
    assert two.states("trainer") == ["ready", "empty"]
    assert kinds(two.ready("trainer", 12, shard=1)) == ["version.available", "replica.ready"]


# ------------------------------------------------------------------------------------------------------------- withdraw


def test_a_shard_that_waits_may_withdraw_and_learns_who_was_missing(two: World) -> None:
    two.ready("trainer", 12, shard=0)
    (withdrawn,) = two.withdraw("trainer", shard=0)
    assert isinstance(withdrawn, PublishWithdrawn)
    assert withdrawn.missing == (1,)
    assert two.replica("trainer").offers == {}


def test_a_withdrawal_after_the_decision_learns_that_it_is_published(two: World) -> None:
    """The log decides, so a call never both returns and is withdrawn."""
    two.publish("trainer", 12)
    (stands,) = two.withdraw("trainer", shard=0)
    assert isinstance(stands, PublishStands)
    assert stands.version == 12
    assert two.states("trainer") == ["ready", "ready"]


def test_a_withdrawal_after_the_failure_is_refused(two: World) -> None:
    two.ready("trainer", 12, shard=0)
    two.ready("trainer", 13, shard=1)
    refused(two.withdraw("trainer", shard=0), "NotPublished")


def test_a_withdrawn_shard_may_come_again_and_meets_its_sibling(two: World) -> None:
    two.ready("trainer", 12, shard=0)
    two.withdraw("trainer", shard=0)
    two.ready("trainer", 12, shard=1)
    assert isinstance(two.ready("trainer", 12, shard=0)[0], VersionPublished)


# -------------------------------------------------------------------------------------------------- wishes from outside


def test_publish_from_outside_is_a_wish_that_changes_nothing(two: World) -> None:
    (wished,) = two.wish("trainer", 12)
    assert isinstance(wished, PublishWished)
    assert (wished.version, wished.shards) == (12, 2)
    assert two.states("trainer") == ["empty", "empty"]


def test_a_wish_for_what_all_shards_hold_is_passed_on(two: World) -> None:
    two.publish("trainer", 12)
    assert isinstance(two.wish("trainer", 12)[0], PublishWished)


def test_a_wish_for_what_one_shard_holds_and_the_other_lost_is_passed_on(two: World) -> None:
    two.publish("trainer", 12)
    two.expire("b")
    two.join("b", two.holding("trainer", 1))
    assert isinstance(two.wish("trainer", 12)[0], PublishWished)


@pytest.mark.parametrize(
    ("version", "error"), [(13, "VersionConflict"), (None, "VersionConflict"), (11, "VersionConflict")]
)
def test_a_wish_over_an_unreleased_version_is_refused_at_once(two: World, version: int | None, error: str) -> None:
    two.publish("trainer", 12)
    refused(two.wish("trainer", version), error)


@pytest.mark.parametrize("version", [-1, 12, VERSION_MAX + 1])
def test_a_wish_for_a_number_that_can_not_be_is_refused_at_once(two: World, version: int) -> None:
    two.publish("trainer", 13)
    two.empty("trainer")
    refused(two.wish("trainer", version), "VersionConflict")


def test_a_wish_for_a_replica_that_is_not_whole_is_refused() -> None:
    world = World()
    world.join("a")
    world.register("a", "trainer", 0, 2)
    assert "[1]" in refused(world.wish("trainer", 1), "BadCommand").message


def test_a_wish_for_nothing_known_is_refused(one: World) -> None:
    refused(one.wish("nobody", 1), "BadCommand")
    refused(one.wish("trainer", 1, model="other"), "VersionUnavailable")


def test_a_wish_while_a_round_runs_is_refused(one: World) -> None:
    one.want("trainer", "latest")
    refused(one.wish("trainer", 1), "ReplicaConflict")


def test_why_a_wish_is_not_fulfilled_is_passed_on_to_everybody(one: World) -> None:
    by = one._shard_by("trainer", 0)
    about: dict[str, Any] = {"model": MODEL, "replica": "trainer", "shard": 0}
    (told,) = one.say(Decline(by=by, **about, wish=41, error="NotPublished", message="x" * 1001))
    assert isinstance(told, PublishDeclined)
    assert (told.model, told.replica, told.shard) == (MODEL, "trainer", 0)
    assert (told.wish, told.error, told.message) == (41, "NotPublished", "x" * 1000)


def test_a_decline_of_no_wish_or_from_another_agent_is_refused(one: World) -> None:
    about: dict[str, Any] = {"model": MODEL, "replica": "trainer", "shard": 0, "error": "NotPublished", "message": ""}
    said = refused(one.say(Decline(by=one._shard_by("trainer", 0), **about, wish=-1)), "BadCommand").message
    assert said.startswith("wish -1 is out of range")
    one.join("other")
    refused(one.say(Decline(by=one.by("other", 5), **about, wish=1)), "BadCommand")


def test_an_error_that_nobody_knows_is_passed_on_as_one_that_is_known(one: World) -> None:
    about: dict[str, Any] = {"model": MODEL, "replica": "trainer", "shard": 0}
    (told,) = one.say(Decline(by=one._shard_by("trainer", 0), **about, wish=1, error="Nonsense", message="why"))
    assert isinstance(told, PublishDeclined)
    assert told.error == from_code("Nonsense", "").code


def test_a_wish_for_what_one_shard_holds_already_is_refused_while_another_is_busy(two: World) -> None:
    two.publish("trainer", 12)
    two.join("b")
    two.register("b", "trainer", 1, 2)
    two.want("trainer", 12, 1)
    refused(two.wish("trainer", 12), "ReplicaConflict")
    two.give_up("trainer", 1)
    assert isinstance(two.wish("trainer", 12)[0], PublishWished)
