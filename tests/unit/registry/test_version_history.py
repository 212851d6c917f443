"""The story of a version: a transcript that a person reads."""

from typing import cast

from tests.unit.common.catalog.catalog_world import MODEL, World

from tensorhub_common.protocol.log.events import AnyEvent, CommandRejected
from tensorhub_registry.queries.version_history import line, story


def told(world: World, version: int | None = None, model: str = MODEL) -> list[str]:
    return list(story(cast("list[AnyEvent]", world.events), model, version))


def small_story() -> World:
    world = World()
    world.replica_of("trainer", "a")
    world.replica_of("engine", "b")
    world.publish("trainer", 12)
    world.fetch("engine")
    world.empty("trainer")
    world.expire("b", term=3)
    return world


def test_a_models_story_has_a_line_for_each_event() -> None:
    assert (
        "\n".join(told(small_story()))
        == """\
     2.1/1  agent.joined         agent=a incarnation=1 host=host-0 site=site-0  by a
     4.1/1  shard.registered     replica=trainer shard=0 shards=1 spot=False agent=a layout=L  by a/0
     6.1/1  agent.joined         agent=b incarnation=1 host=host-0 site=site-0  by b
     8.1/1  shard.registered     replica=engine shard=0 shards=1 spot=False agent=b layout=L  by b/1
    10.1/2  version.published    version=12 replica=trainer roots=('L-12-0',)  by a/0
    10.2/2  replica.ready        replica=trainer version=12  by a/0
    12.1/2  round.joined         replica=engine round=12 shard=0  by b/1
    12.2/2  round.decided        replica=engine round=12 attempt=1 version=12 roots=('L-12-0',)  by b/1
    14.1/1  round.started        replica=engine round=12 attempt=1 version=12  by b/1
    16.1/2  shard.filled         replica=engine shard=0 version=12 round=12 root=L-12-0  by b/1
    16.2/2  replica.ready        replica=engine version=12 round=12  by b/1
    18.1/1  shard.draining       replica=trainer shard=0 version=12  by a/0
    20.1/1  shard.drained        replica=trainer shard=0 version=12  by a/0
    22.1/3  agent.lost           agent=b incarnation=1 term=3  by _registry
    22.2/3  replica.lost         replica=engine agent=b version=12  by _registry
    22.3/3  version.unavailable  version=12 reason=lost  by _registry"""
    )


def test_one_versions_story_leaves_the_others_out() -> None:
    world = small_story()
    world.publish("trainer", 13)
    lines = told(world, 13)
    assert [text.split()[1] for text in lines] == [
        *["agent.joined"] * 2,
        "agent.lost",
        "version.published",
        "replica.ready",
    ]


def test_a_round_that_reads_the_version_is_told_to_its_end() -> None:
    """Also where it goes on with another version, or fails."""
    world = World()
    world.replica_of("trainer", "a")
    world.replica_of("engine", "b")
    world.publish("trainer", 12)
    world.want("engine", "latest")
    world.empty("trainer")
    world.replan("engine")
    world.publish("trainer", 13)
    world.give_up("engine")
    kinds = [text.split()[1] for text in told(world, 12)]
    assert kinds[-3:] == ["round.reopened", "round.decided", "round.failed"]


def test_another_models_events_are_left_out() -> None:
    world = small_story()
    world.register("a", "trainer", model="other")
    assert not any("shard" in text for text in told(world, model="nobody"))
    assert sum("shard.registered" in text for text in told(world, model="other")) == 1


def test_a_long_value_is_cut_so_that_a_line_fits_a_terminal() -> None:
    text = line(CommandRejected(cmd=1, i=1, k=1, verb="publish", error="BadCommand", message="x" * 5000))
    assert text.endswith("x...")
    assert len(text) < 150


def test_what_is_long_is_cut_so_that_a_line_fits_a_terminal() -> None:
    def said(length: int) -> str:
        return line(CommandRejected(verb="join", error="BadCommand", message="x" * length))

    assert f"message={'x' * 60}" in said(60)
    assert f"message={'x' * 57}..." in said(61)
