"""Exactly one outcome per command: repeats, late words, old incarnations, and senders that are none."""

import copy

import msgspec
import pytest
from tests.unit.common.catalog.catalog_world import MODEL, REGISTRY, World, kinds, refused, root

from tensorhub_common.catalog.apply import MESSAGE_CHARS_MAX, apply
from tensorhub_common.catalog.state import HUB_LANES_MAX, LANES_MAX, Catalog
from tensorhub_common.protocol.log.commands import (
    VERSION_MAX,
    Drained,
    Expire,
    Join,
    Lead,
    Publish,
    Ready,
    Register,
    Sender,
    Unpublish,
    Unreadable,
)
from tensorhub_common.protocol.log.events import (
    HUB_MODEL,
    CommandRepeated,
    PublishWished,
    ShardDraining,
    ShardRegistered,
    VersionPublished,
)


def ready_by(by: Sender, version: int | None = 12) -> Ready:
    return Ready(by=by, model=MODEL, replica="trainer", shard=0, version=version, root=root(12))


def unpublish_by(by: Sender) -> Unpublish:
    return Unpublish(by=by, model=MODEL, replica="trainer", shard=0)


def register_by(by: Sender, replica: str = "other") -> Register:
    return Register(by=by, model=MODEL, replica=replica, shard=0, shards=1, layout="L", nbytes=64)


@pytest.fixture
def world() -> World:
    """A trainer of one shard on agent a."""
    world = World()
    world.replica_of("trainer", "a")
    return world


# -------------------------------------------------------------------------------------------------------------- repeats


def test_a_repeat_is_answered_with_the_outcome_of_the_first(world: World) -> None:
    command = ready_by(world.by("a", 0))
    first = world.say(command)
    assert isinstance(first[0], VersionPublished)
    (again,) = world.say(command)
    assert isinstance(again, CommandRepeated)
    assert (again.of, again.outcome, again.error, again.by) == (first[0].cmd, "version.published", None, command.by)
    assert again.model == MODEL, "who follows the model must hear it"


def test_a_repeat_of_a_refused_command_is_answered_with_the_refusal(world: World) -> None:
    command = unpublish_by(world.by("a", 0))
    refusal = refused(world.say(command))
    world.ready("trainer", 12)
    # The shard could be unpublished by now, but that word was answered long ago, on its own lane.
    other = msgspec.structs.replace(command, by=Sender("a/7", 1, 1))
    assert isinstance(world.say(other)[0], ShardDraining)
    (again,) = world.say(other)
    assert isinstance(again, CommandRepeated)
    assert again.outcome == "shard.draining"
    assert refusal.error == "NotPublished"


def test_a_refusal_names_what_was_asked_and_of_which_model(world: World) -> None:
    no = refused(world.say(unpublish_by(world.by("a", 0))))
    assert (no.verb, no.model) == ("unpublish", MODEL)


def test_a_refusal_is_remembered_with_its_error_and_message(world: World) -> None:
    command = unpublish_by(world.by("a", 0))
    refusal = refused(world.say(command))
    (again,) = world.say(command)
    assert isinstance(again, CommandRepeated)
    assert (again.outcome, again.error, again.message) == ("command.rejected", refusal.error, refusal.message)


def test_a_repeat_changes_nothing_at_any_distance(world: World) -> None:
    """JetStream's window is over, and much else was said on other lanes meanwhile."""
    command = ready_by(world.by("a", 0))
    world.say(command)
    world.replica_of("copy", "b")
    world.publish("copy", 12)
    world.say(unpublish_by(Sender("a/9", 1, 1)))
    before = copy.deepcopy(world.catalog)
    assert kinds(world.say(command)) == ["command.repeated"]
    world.catalog.seq, world.catalog.time = before.seq, before.time
    assert world.catalog == before


def test_a_repeated_repeat_names_the_first_command(world: World) -> None:
    command = ready_by(world.by("a", 0))
    first = world.say(command)[0]
    for _ in range(3):
        (again,) = world.say(command)
        assert isinstance(again, CommandRepeated)
        assert again.of == first.cmd


def test_a_repeat_after_the_agent_was_lost_still_gets_its_outcome(world: World) -> None:
    command = ready_by(world.by("a", 0))
    world.say(command)
    world.expire("a")
    assert kinds(world.say(command)) == ["command.repeated"]


def test_a_repeated_join_is_answered_and_does_not_begin_the_agent_anew(world: World) -> None:
    command = Join(by=Sender("a", 2, 100), host="h", site="s", holds=())
    assert kinds(world.say(command)) == ["agent.joined"]
    world.register("a", "trainer")
    assert kinds(world.say(command)) == ["command.repeated"]
    assert world.states("trainer") == ["empty"]


# ----------------------------------------------------------------------------------------------------------- late words


def test_an_older_word_of_a_lane_is_refused(world: World) -> None:
    late = unpublish_by(Sender("a/0", 1, 50))
    world.say(ready_by(Sender("a/0", 1, 51)))
    said = refused(world.say(late), "BadCommand").message
    assert said == "lane 'a/0' has said (1, 51) already, so (1, 50) comes too late"
    assert world.states("trainer") == ["ready"]


def test_a_refused_late_word_does_not_displace_the_lanes_last_outcome(world: World) -> None:
    last = ready_by(Sender("a/0", 1, 51))
    world.say(last)
    world.say(unpublish_by(Sender("a/0", 1, 50)))
    (again,) = world.say(last)
    assert isinstance(again, CommandRepeated)
    assert again.outcome == "version.published"


def test_lanes_do_not_hinder_each_other(world: World) -> None:
    world.say(ready_by(Sender("a/0", 1, 51)))
    assert isinstance(world.say(register_by(Sender("a/1", 1, 1)))[0], ShardRegistered)


# --------------------------------------------------------------------------------------------------------- incarnations


def test_what_an_older_incarnation_still_says_is_refused(world: World) -> None:
    old = world.by("a", 0)
    world.join("a", world.holding("trainer"))
    message = refused(world.say(ready_by(old)), "StaleSender").message
    assert "join again with a higher one" in message
    assert world.catalog.models[MODEL].last is None


def test_an_older_incarnation_with_a_higher_n_is_refused_too(world: World) -> None:
    world.join("a", world.holding("trainer"))
    refused(world.say(ready_by(Sender("a/0", 1, 10_000))))
    refused(world.say(ready_by(Sender("a/77", 1, 10_000))))


def test_an_incarnation_that_has_not_joined_is_refused(world: World) -> None:
    refused(world.say(ready_by(Sender("a/0", 2, 1))))
    refused(world.say(register_by(Sender("nobody", 1, 1))))
    assert "nobody" not in world.catalog.lanes


def test_an_expired_agent_is_refused_until_it_joins_with_a_higher_incarnation(world: World) -> None:
    world.expire("a")
    refused(world.ready("trainer", 12))
    refused(world.join("a", incarnation=1))
    world.join("a", world.holding("trainer"))
    assert isinstance(world.ready("trainer", 12)[0], VersionPublished)


@pytest.mark.parametrize("incarnation", [1, 0, -5])
def test_a_join_that_is_no_higher_is_refused(world: World, incarnation: int) -> None:
    refused(world.join("a", incarnation=incarnation), "BadCommand" if incarnation < 0 else "StaleSender")


@pytest.mark.parametrize("lane", ["a", "a/0", "a/1"])
def test_lanes_of_older_incarnations_are_forgotten(world: World, lane: str) -> None:
    """Whichever the agent joins on, the one of its first join included: else each process leaves some behind."""
    world.say(ready_by(Sender("a/0", 1, 51)))
    world.join("ab")
    world.say(Join(by=Sender(lane, 2, 100), host="h", site="s"))
    assert {known: last.incarnation for known, last in world.catalog.lanes.items()} == {"ab": 1, lane: 2}


# ------------------------------------------------------------------------------------------------ senders that are none


@pytest.mark.parametrize(
    "lane",
    [
        "",
        "a/",
        "a/x",
        "a/-1",
        "a/007",
        "a/²",
        "a/1/2",
        f"a/{LANES_MAX}",
        "a/" + "9" * 5000,
        "a b",
        "_registry/0",
        "a/" + "x" * 100_000,
    ],
)
def test_a_lane_that_can_not_be_remembered_is_refused(world: World, lane: str) -> None:
    """Else its commands would count, and their repeats would count again."""
    before = dict(world.catalog.lanes)
    refused(world.say(register_by(Sender(lane, 1, 1))), "BadCommand")
    assert world.catalog.lanes == before
    assert "other" not in world.catalog.models[MODEL].replicas


@pytest.mark.parametrize("lane", ["a", "a/0", f"a/{LANES_MAX - 1}"])
def test_good_lanes_count(world: World, lane: str) -> None:
    assert isinstance(world.say(register_by(Sender(lane, 1, 100)))[0], ShardRegistered)
    assert lane in world.catalog.lanes


@pytest.mark.parametrize(
    "by", [Sender("a/0", 1, -1), Sender("a/0", 1, 10**30), Sender("a/0", -1, 1), Sender("a/0", 10**30, 1)]
)
def test_a_sender_whose_numbers_can_not_be_kept_exactly_is_refused(world: World, by: Sender) -> None:
    refused(world.say(register_by(by)), "BadCommand")


def test_numbers_that_can_not_be_kept_exactly_are_no_incarnation(world: World) -> None:
    refused(world.join("b", incarnation=10**30), "BadCommand")
    refused(world.join("b", incarnation=-1), "BadCommand")
    assert "b" not in world.catalog.agents
    world.join("b", incarnation=VERSION_MAX)


def test_a_command_that_must_name_its_sender_is_refused_without(world: World) -> None:
    refused(world.say(Drained(model=MODEL, replica="trainer", shard=0)), "BadCommand")
    refused(world.say(Join(host="h", site="s")), "BadCommand")
    refused(world.say(Expire(agent="a", incarnation=1, term=1)), "BadCommand")


def test_a_wish_from_outside_is_not_remembered(world: World) -> None:
    """It has no sender: JetStream's window alone recognises a repeat, and a wish twice is still one version."""
    before = dict(world.catalog.lanes)
    assert isinstance(world.say(Publish(model=MODEL, replica="trainer"))[0], PublishWished)
    assert world.catalog.lanes == before


@pytest.mark.parametrize("model", ["_hub", "_x", "a.b", "", "x" * 65, "ü", "*", ">"])
def test_a_model_that_can_not_stand_in_a_subject_is_refused_in_the_hubs_name(world: World, model: str) -> None:
    """Else a registry could not publish the outcome, and would be stuck at a command that anyone may send."""
    assert refused(world.say(Publish(model=model, replica="trainer"))).model == HUB_MODEL


def test_a_repeat_about_such_a_model_has_a_subject_too(world: World) -> None:
    command = Unpublish(by=world.by("a", 3), model="_x", replica="trainer", shard=0)
    world.say(command)
    (again,) = world.say(command)
    assert isinstance(again, CommandRepeated)
    assert again.model == HUB_MODEL


# ----------------------------------------------------------------------------------------------------------- unreadable


def test_what_is_no_command_is_rejected_with_its_reason(world: World) -> None:
    no = refused(world.say(Unreadable("publish", "the body is no command")), "BadCommand")
    assert (no.verb, no.message, no.model, no.by) == ("publish", "the body is no command", HUB_MODEL, None)


def test_a_refusal_repeats_only_so_much_of_what_was_sent(world: World) -> None:
    no = refused(world.say(Unreadable("v" * 1000, "\x00" * 10_000)))
    assert (len(no.verb), len(no.message)) == (64, MESSAGE_CHARS_MAX)
    long = Publish(model="m" * 200_000, replica="r" * 200_000)
    assert len(refused(world.say(long)).message) <= MESSAGE_CHARS_MAX


# ------------------------------------------------------------------------------------------------------------- the fold


def test_a_folder_takes_no_sequence_twice() -> None:
    catalog = Catalog("job")
    apply(catalog, 5, 1.0, Publish(model="m", replica="r"))
    for seq in (5, 4):
        with pytest.raises(ValueError, match="was folded before"):
            apply(catalog, seq, 1.0, Publish(model="m", replica="r"))
    assert catalog.seq == 5


def test_an_expiry_carries_the_leaders_term_and_a_lower_one_is_refused(world: World) -> None:
    world.join("b")
    world.expire("a", term=7)
    late = Expire(by=Sender("_other", 9, 1), agent="b", incarnation=1, term=6)
    assert "term 6 is over" in refused(world.say(late)).message
    refused(world.expire("b", term=6), "StaleSender")
    assert kinds(world.expire("b", term=7)) == ["agent.lost"]


def test_an_expiry_that_is_said_again_is_refused(world: World) -> None:
    world.expire("a", term=7)
    refused(world.expire("a", term=7), "BadCommand")


def test_what_an_older_leader_says_after_a_new_one_leads_is_refused() -> None:
    """Although the new one has expired nobody yet."""
    world = World()
    world.join("a")
    world.say(Lead(by=Sender(REGISTRY, 5, 0), registry="registry-1", term=5))
    refused(world.expire("a", term=4), "StaleSender")
    refused(world.say(Expire(by=Sender(REGISTRY, 6, 1), agent="a", incarnation=1, term=4)), "BadCommand")
    refused(world.say(Lead(by=Sender(REGISTRY, 7, 0), registry="registry-0", term=5)), "BadCommand")
    refused(world.say(Lead(by=Sender("a", 1, 90), registry="a", term=50)), "BadCommand")
    assert kinds(world.expire("a", term=8))[0] == "agent.lost"


def test_an_expiry_of_an_older_incarnation_is_refused(world: World) -> None:
    """The leader's word was on its way while the agent came back."""
    world.join("a", world.holding("trainer"))
    refused(world.expire("a", incarnation=1))
    assert world.catalog.agents["a"].state == "live"


def test_an_agents_word_never_expires_an_agent(world: World) -> None:
    world.join("b")
    refused(world.say(Expire(by=world.by("b"), agent="a", incarnation=1, term=99)), "BadCommand")
    refused(world.say(Expire(by=Sender("registry-0", 1, 1), agent="a", incarnation=1, term=99)), "BadCommand")
    assert world.catalog.term == 0


@pytest.mark.parametrize("term", [-1, 10**30])
def test_a_term_that_can_not_be_counted_is_refused(world: World, term: int) -> None:
    refused(world.expire("a", term=term))


def test_the_hub_is_no_agent(world: World) -> None:
    refused(world.join("_registry"), "BadCommand")
    refused(world.say(register_by(Sender(REGISTRY, 1, 10_000))), "StaleSender")
    assert REGISTRY not in world.catalog.agents


def test_a_repeated_expiry_is_answered_like_any_repeat(world: World) -> None:
    command = Expire(by=Sender(REGISTRY, 3, 1), agent="a", incarnation=1, term=3)
    world.say(command)
    (again,) = world.say(command)
    assert isinstance(again, CommandRepeated)
    assert again.outcome == "agent.lost"


def test_lanes_of_the_hub_are_bounded(world: World) -> None:
    for number in range(2 * HUB_LANES_MAX):
        world.say(Expire(by=Sender(f"_registry-{number}", 1, 1), agent="a", incarnation=5, term=1))
    assert sum(lane.startswith("_") for lane in world.catalog.lanes) == HUB_LANES_MAX
