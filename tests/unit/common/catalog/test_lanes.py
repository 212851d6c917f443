"""Exactly one outcome per command: repeats, late words, old incarnations, and senders that are none."""

import copy

import msgspec
import pytest
from tests.unit.common.catalog.scenes import BAD, one, only

from tensorhub_common.catalog.apply import MESSAGE_CHARS_MAX, apply
from tensorhub_common.catalog.state import HUB_LANES_MAX, LANES_MAX, Catalog
from tensorhub_common.protocol.log.commands import (
    VERSION_MAX,
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
from tensorhub_common.protocol.log.events import HUB_MODEL, CommandRepeated
from tensorhub_simulator.drivers.catalog import MODEL, REGISTRY, CatalogDriver, kinds, refused, root


def ready_by(by: Sender) -> Ready:
    return Ready(by=by, model=MODEL, replica="trainer", shard=0, version=12, root=root(12))


def unpublish_by(by: Sender, model: str = MODEL) -> Unpublish:
    return Unpublish(by=by, model=model, replica="trainer", shard=0)


def register_by(by: Sender) -> Register:
    return Register(by=by, model=MODEL, replica="other", shard=0, shards=1, layout="L", nbytes=64)


def expire_by(by: Sender, agent: str = "a", incarnation: int = 1, term: int = 1) -> Expire:
    return Expire(by=by, agent=agent, incarnation=incarnation, term=term)


@pytest.fixture
def world() -> CatalogDriver:
    """A trainer of one shard on agent a."""
    return one()


def test_a_repeat_is_answered_with_the_outcome_of_the_first_however_often(world: CatalogDriver) -> None:
    command = ready_by(world.by("a", 0))
    first = world.say(command)[0]
    for _ in range(3):
        again = only(world.say(command), CommandRepeated)
        assert (again.of, again.outcome, again.error, again.by) == (first.cmd, "version.published", None, command.by)
        assert again.model == MODEL, "who follows the model must hear it"
    world.expire("a")
    assert kinds(world.say(command)) == ["command.repeated"], "also after the agent was lost"


def test_a_refusal_is_remembered_with_its_error_and_message(world: CatalogDriver) -> None:
    command = unpublish_by(world.by("a", 0))
    refusal = refused(world.say(command), "NotPublished")
    assert (refusal.verb, refusal.model) == ("unpublish", MODEL)
    again = only(world.say(command), CommandRepeated)
    assert (again.outcome, again.error, again.message) == ("command.rejected", refusal.error, refusal.message)
    world.ready("trainer", 12)
    # The shard could be unpublished by now, but that word was answered long ago, on its own lane.
    other = msgspec.structs.replace(command, by=Sender("a/7", 1, 1))
    assert kinds(world.say(other))[0] == "shard.draining"
    assert only(world.say(other), CommandRepeated).outcome == "shard.draining"


def test_a_repeat_changes_nothing_at_any_distance(world: CatalogDriver) -> None:
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


def test_a_repeated_join_is_answered_and_does_not_begin_the_agent_anew(world: CatalogDriver) -> None:
    command = Join(by=Sender("a", 2, 100), host="h", site="s", holds=())
    assert kinds(world.say(command)) == ["agent.joined"]
    world.register("a", "trainer")
    assert kinds(world.say(command)) == ["command.repeated"]
    assert world.states("trainer") == ["empty"]


def test_an_older_word_of_a_lane_is_refused(world: CatalogDriver) -> None:
    last = ready_by(Sender("a/0", 1, 51))
    world.say(last)
    said = refused(world.say(unpublish_by(Sender("a/0", 1, 50))), BAD).message
    assert said == "lane 'a/0' has said (1, 51) already, so (1, 50) comes too late"
    assert world.states("trainer") == ["ready"]
    assert only(world.say(last), CommandRepeated).outcome == "version.published", "the last outcome is not displaced"
    assert kinds(world.say(register_by(Sender("a/1", 1, 1)))) == ["shard.registered"], "nor is another lane hindered"


def test_an_older_incarnation_with_a_higher_n_is_refused_too(world: CatalogDriver) -> None:
    old = world.by("a", 0)
    world.join("a", world.holding("trainer"))
    assert "join again with a higher one" in refused(world.say(ready_by(old)), "StaleSender").message
    refused(world.say(ready_by(Sender("a/0", 1, 10_000))))
    refused(world.say(ready_by(Sender("a/77", 1, 10_000))))
    assert world.catalog.models[MODEL].last is None


@pytest.mark.parametrize("lane", ["a", "a/0", "a/1"])
def test_lanes_of_older_incarnations_are_forgotten(world: CatalogDriver, lane: str) -> None:
    """Whichever the agent joins on, the one of its first join included: else each process leaves some behind."""
    world.say(ready_by(Sender("a/0", 1, 51)))
    for name in ("ab", "a-b", "b"):
        world.join(name)
    world.say(Join(by=Sender(lane, 2, 100), host="h", site="s"))
    assert {known: last.incarnation for known, last in world.catalog.lanes.items()} == {
        "ab": 1,
        "a-b": 1,
        "b": 1,
        lane: 2,
    }


# Senders that are none.

LANES = ["", "a/", "a/x", "a/-1", "a/007", "a/²", "a/1/2", f"a/{LANES_MAX}", "a b", "_registry/0", "a/" + "x" * 100_000]


@pytest.mark.parametrize("lane", [*LANES, "a/" + "9" * 5000])
def test_a_lane_that_can_not_be_remembered_is_refused(world: CatalogDriver, lane: str) -> None:
    """Else its commands would count, and their repeats would count again."""
    before = dict(world.catalog.lanes)
    refused(world.say(register_by(Sender(lane, 1, 1))), BAD)
    assert world.catalog.lanes == before


@pytest.mark.parametrize("lane", ["a", "a/0", f"a/{LANES_MAX - 1}"])
def test_good_lanes_count(world: CatalogDriver, lane: str) -> None:
    assert kinds(world.say(register_by(Sender(lane, 1, 100)))) == ["shard.registered"]
    assert lane in world.catalog.lanes


@pytest.mark.parametrize(("incarnation", "n"), [(1, -1), (1, 10**30), (-1, 1), (10**30, 1)])
def test_a_sender_whose_numbers_can_not_be_kept_exactly_is_refused(
    world: CatalogDriver, incarnation: int, n: int
) -> None:
    refused(world.say(register_by(Sender("a/0", incarnation, n))), BAD)
    refused(world.say(Join(by=Sender("b", incarnation, n), host="h", site="s")), BAD)
    assert "b" not in world.catalog.agents
    world.join("b", incarnation=VERSION_MAX)


def test_a_wish_from_outside_is_not_remembered(world: CatalogDriver) -> None:
    """It has no sender: JetStream's window alone recognises a repeat, and a wish twice is still one version."""
    before = dict(world.catalog.lanes)
    assert kinds(world.wish("trainer")) == ["publish.wished"]
    assert world.catalog.lanes == before


@pytest.mark.parametrize("model", ["_hub", "_x", "a.b", "", "x" * 65, "ü", "*", ">"])
def test_a_model_that_can_not_stand_in_a_subject_is_refused_in_the_hubs_name(world: CatalogDriver, model: str) -> None:
    """Else a registry could not publish the outcome, and would be stuck at a command that anyone may send."""
    assert refused(world.wish("trainer", model=model)).model == HUB_MODEL
    command = unpublish_by(world.by("a", 3), model)
    refused(world.say(command))
    assert only(world.say(command), CommandRepeated).model == HUB_MODEL, "a repeat has a subject, too"
    refused(world.register("a", model), "InvalidName")
    refused(world.register("a", "trainer", model=model), "InvalidName")


def test_a_refusal_repeats_only_so_much_of_what_was_sent(world: CatalogDriver) -> None:
    no = refused(world.say(Unreadable("publish", "the body is no command")), BAD)
    assert (no.verb, no.message, no.model, no.by) == ("publish", "the body is no command", HUB_MODEL, None)
    no = refused(world.say(Unreadable("v" * 1000, "\x00" * 10_000)))
    assert (len(no.verb), len(no.message)) == (64, MESSAGE_CHARS_MAX)
    assert len(refused(world.wish("r" * 200_000, model="m" * 200_000)).message) <= MESSAGE_CHARS_MAX


def test_a_folder_takes_no_sequence_twice() -> None:
    catalog = Catalog("job")
    apply(catalog, 5, 1.0, Publish(model="m", replica="r"))
    for seq in (5, 4):
        with pytest.raises(ValueError, match="was folded before"):
            apply(catalog, seq, 1.0, Publish(model="m", replica="r"))
    assert catalog.seq == 5


def test_an_expiry_carries_the_leaders_term_and_a_lower_one_is_refused(world: CatalogDriver) -> None:
    """Also of one who leads, and has expired nobody yet."""
    world.join("b")
    world.say(Lead(by=Sender(REGISTRY, 5, 0), registry="registry-1", term=5))
    refused(world.expire("a", term=4), "StaleSender")
    refused(world.say(expire_by(Sender("_other", 9, 1), term=4)), BAD)
    command = expire_by(Sender(REGISTRY, 7, 9), term=7)
    assert kinds(world.say(command))[0] == "agent.lost"
    assert only(world.say(command), CommandRepeated).outcome == "agent.lost"
    world.skip(10)
    assert kinds(world.expire("b", term=7)) == ["agent.lost"], "the same term, again"


def test_lanes_of_the_hub_are_bounded(world: CatalogDriver) -> None:
    for number in range(2 * HUB_LANES_MAX):
        world.say(expire_by(Sender(f"_registry-{number}", 1, 1), incarnation=5))
    assert sum(lane.startswith("_") for lane in world.catalog.lanes) == HUB_LANES_MAX
