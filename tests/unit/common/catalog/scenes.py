"""The scenes at which tests of the catalog's fold begin, and what they look for among the events."""

from collections.abc import Iterable
from typing import TypeVar

from tensorhub_common.catalog.state import Round
from tensorhub_common.protocol.log.commands import DrainAgent, HeldShard, Join, Retain, Sender
from tensorhub_common.protocol.log.events import CopyPlaced, Event
from tensorhub_simulator.drivers.catalog import MODEL, CatalogDriver

BAD = "BadCommand"
CONFLICT = "VersionConflict"
FULL = "RetentionFull"
GONE = "VersionUnavailable"
NONE = "NotPublished"

Kind = TypeVar("Kind", bound=Event)


def of(events: Iterable[Event], kind: type[Kind]) -> list[Kind]:
    """Return the events of one kind."""
    return [event for event in events if isinstance(event, kind)]


def only(events: Iterable[Event], kind: type[Kind]) -> Kind:
    """Return the one event of its kind."""
    (found,) = of(events, kind)
    return found


def round_of(world: CatalogDriver, replica: str = "engine") -> Round:
    current = world.replica(replica).round
    assert current is not None
    return current


def holding(version: int | None, digest: str | None, *, replica: str = "trainer", shard: int = 0) -> HeldShard:
    return HeldShard(model=MODEL, replica=replica, shard=shard, version=version, root=digest)


def standing(**replicas: str) -> CatalogDriver:
    """Return a job with these replicas, one shard on each agent that its letters name."""
    world = CatalogDriver()
    for name, agents in replicas.items():
        world.replica_of(name, *agents)
    return world


def one() -> CatalogDriver:
    """A trainer of one shard."""
    return standing(trainer="a")


def two() -> CatalogDriver:
    """A trainer of two shards on two agents."""
    return standing(trainer="ab")


def updatable() -> CatalogDriver:
    """Return an engine that holds 12, and a trainer that has published 13; each of two shards."""
    world = standing(trainer="ab", engine="cd")
    world.publish("trainer", 12)
    world.fetch("engine")
    world.empty("trainer")
    world.publish("trainer", 13)
    return world


def republished(world: CatalogDriver, version: int) -> tuple[Event, ...]:
    """Publish a version instead of the trainer's last one; the last events."""
    world.empty("trainer")
    return world.publish("trainer", version)


def two_lines() -> CatalogDriver:
    """Return a trainer that has published 9, and an engine that holds 8."""
    world = standing(trainer="a", engine="b")
    world.publish("trainer", 8)
    world.fetch("engine")
    republished(world, 9)
    return world


def caching(world: CatalogDriver, agent: str, room: int, host: str = "host-1") -> None:
    """Let an agent join that has this many bytes of room for copies."""
    world.say(Join(by=Sender(agent, 1, 1), host=host, site="site-0", cache_bytes=room))


def retain(world: CatalogDriver, last: int, model: str = MODEL) -> tuple[Event, ...]:
    return world.say(Retain(model=model, last=last))


def retaining(last: int = 1, *, room: int = 1024) -> CatalogDriver:
    """Return a trainer of two shards that has published 1, two cache agents, and a retention."""
    world = two()
    caching(world, "c", room)
    caching(world, "d", room)
    retain(world, last)
    world.publish("trainer", 1)
    return world


def placed(world: CatalogDriver) -> CopyPlaced:
    """Return the last placement."""
    return of(world.events, CopyPlaced)[-1]


def emptied(world: CatalogDriver) -> str:
    """Let the first copy of 1 be filled, and the trainer go; the copy's name."""
    copy = placed(world).replica
    world.fetch(copy, 1)
    world.empty("trainer")
    return copy


def drain(world: CatalogDriver, agent: str, *, on: bool = True) -> tuple[Event, ...]:
    return world.say(DrainAgent(agent=agent, on=on))
