"""A deleted job, one step at a time: what it ends, what is refused from then on, and what is left of it."""

from tensorhub_common.catalog.snapshot import Snapshot, decode, encode
from tensorhub_common.protocol.log import commands
from tensorhub_common.protocol.log.events import JobDeleted
from tensorhub_simulator.drivers.catalog import JOB, MODEL, REGISTRY, CatalogDriver, kinds, refused


def busy() -> CatalogDriver:
    """Return a job with a published and retained version, a copy of it, a round, an offer and a drained agent."""
    world = CatalogDriver()
    world.replica_of("trainer", "a", "b")
    world.replica_of("engine", "a", "b")
    world.say(commands.Join(by=commands.Sender("c", 1, 1), host="host-1", site="site-0", cache_bytes=1024))
    world.say(commands.Retain(model=MODEL, last=1))
    world.publish("trainer", 1)
    world.say(commands.Want(by=commands.Sender("a/77", 1, 1), model=MODEL, replica="engine", shard=0, want="latest"))
    world.say(commands.DrainAgent(agent="b"))
    world.say(commands.Quota(nbytes=4096))
    return world


def test_nothing_stands_in_it_any_more() -> None:
    """One event says so, whoever held what, and a fold of the same log comes to the same."""
    world = busy()
    [event] = world.say(commands.DeleteJob())
    assert isinstance(event, JobDeleted)
    assert event.job == JOB
    catalog = world.catalog
    assert (catalog.deleted, catalog.deleted_at) == (event.cmd, event.time)
    assert not any((catalog.models, catalog.agents, catalog.lanes, catalog.tended, catalog.leaving))
    assert world.replay() == catalog


def test_every_later_word_is_refused_with_what_to_do() -> None:
    """Whoever says what, also a registry, and also what was said before: nothing counts."""
    world = busy()
    said = [command for _, _, command in world.log if not isinstance(command, commands.Unreadable)]
    world.say(commands.DeleteJob())
    later: tuple[commands.AnyCommand, ...] = (
        commands.DeleteJob(),
        commands.Publish(model=MODEL, replica="trainer"),
        commands.Delete(model=MODEL),
        commands.Join(by=commands.Sender("a", 2, 1), host="host-0", site="site-0"),
        commands.Join(by=commands.Sender("z", 1, 1), host="host-0", site="site-0"),
        commands.Ready(by=commands.Sender("a/1", 1, 9), model=MODEL, replica="trainer", shard=0, version=2, root="r"),
        commands.Lead(by=commands.Sender(REGISTRY, 9, 0), registry="registry-1", term=9),
        commands.Expire(by=commands.Sender(REGISTRY, 9, 1), agent="a", incarnation=1, term=9),
    )
    for command in (*later, *said):
        why = refused(world.say(command), "JobGone").message
        assert f"'tensorhub delete --job {JOB} --forget'" in why
    assert refused(world.say(commands.Unreadable("x", "no command"))).error == "BadCommand"
    catalog = world.catalog
    assert not any((catalog.models, catalog.agents, catalog.tended))
    assert set(catalog.lanes) == {REGISTRY}, "what is left stays small"
    assert world.replay() == catalog


def test_what_is_left_is_small_and_stays_so() -> None:
    """A tombstone has the same size whatever the job had, and whoever goes on talking to it."""
    world, empty = busy(), CatalogDriver()
    for each in (world, empty):
        each.say(commands.DeleteJob())
    sizes = [len(encode(Snapshot(1, 1.0, each.catalog))) for each in (world, empty)]
    assert sizes[0] < sizes[1] + 20
    for number in range(50):
        world.say(commands.Join(by=commands.Sender(f"agent-{number}", 1, 1), host="h", site="s"))
    assert len(encode(Snapshot(1, 1.0, world.catalog))) < sizes[0] + 20


def test_it_is_deleted_by_those_who_use_it_alone() -> None:
    """An agent's word does not do it, and neither does a registry's."""
    world = busy()
    for by in (commands.Sender("a", 1, 99), commands.Sender(REGISTRY, 9, 9)):
        refused(world.say(commands.DeleteJob(by=by)), "BadCommand")
    assert kinds(world.say(commands.DeleteJob())) == ["job.deleted"]


def test_a_snapshot_knows_of_it() -> None:
    """Who begins with the sum refuses what who has folded all of it refuses."""
    world = busy()
    world.say(commands.DeleteJob())
    restored = decode(JOB, encode(Snapshot(world.catalog.seq, 1.0, world.catalog)))
    assert restored.catalog == world.catalog
    world.catalog = restored.catalog
    refused(world.say(commands.Publish(model=MODEL, replica="trainer")), "JobGone")
