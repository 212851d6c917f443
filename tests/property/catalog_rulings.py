"""Commands by chance where things are retained, pinned, rewound and drained, and what must hold of retention.

Always true, whatever is said: a retained version that stood whole on a replica which may not vanish goes on doing so,
unless an agent was lost or began anew, or a publication was void.
It is worked out from the shards alone, not by the code that it judges.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from tests.property.catalog_chance import AGENTS, KEYS, Chance
from tests.property.catalog_watcher import Watcher
from tests.unit.common.catalog.catalog_world import MODEL, World

from tensorhub_common.catalog.state import Catalog, Model, Replica, Shard
from tensorhub_common.catalog.transitions import AgentState, RoundState, ShardState
from tensorhub_common.protocol.log.commands import (
    AnyCommand,
    Delete,
    DeleteJob,
    DrainAgent,
    Drop,
    Expire,
    Join,
    Pin,
    Quota,
    Retain,
    Rewind,
    Stay,
    Unpin,
    Unpublish,
    Unreadable,
    Want,
)
from tensorhub_common.protocol.log.events import Event, VersionExposed

ONCE_ALL_WAS_SEEN_AND_SLOWLY_ALL = (
    pytest.param(False, id="once-all-was-seen"),
    pytest.param(True, id="all", marks=pytest.mark.slow),
)
"""For tests of what seeded lives come to: the default suite ends when that is all of it, the slow ones live each."""

ROOMS = (0, 64, 128, 1024)
CACHE_LANE = 900
END_ODDS = 8
"""A job is deleted so rarely that most of a life lies before it."""


class RulingChance(Chance):
    """Draws also what users rule, and what the agents of cache replicas say."""

    def command(self) -> AnyCommand | Unreadable:
        if self.pick(range(9)) == 0:
            return self._ruling()
        caches = [key for key in self._caches() if self.pick((True, False))]
        if caches and self.pick(range(3)) == 0:
            self._honest = bool(self.pick(range(6)))
            self._target = self.pick(caches)
            drawn: AnyCommand = getattr(self, f"_{self._sensible()}")()
            return drawn
        return super().command()

    def _caches(self) -> list[tuple[str, int]]:
        model = self.world.catalog.models.get(MODEL)
        replicas = model.replicas.values() if model is not None else ()
        return [(r.name, index) for r in replicas if r.cache is not None for index in r.members]

    def _record(self) -> Replica | None:
        model = self.world.catalog.models.get(MODEL)
        return model.replicas.get(self._target[0]) if model is not None else None

    def _sensible(self) -> str:
        verb = super()._sensible()
        replica = self._record()
        shard = replica.members.get(self._target[1]) if replica is not None else None
        if replica is None or shard is None:
            return verb
        if shard.leaving and self.pick((True, False)):
            return "stay"
        if replica.round is not None and replica.round.state is RoundState.STARTED and self.pick(range(4)) == 0:
            return "drop"
        if replica.cache is not None and replica.round is None and verb != "join":
            if shard.state is ShardState.EMPTY:
                return str(self.pick(("want",) * 8 + ("release",)))
            return "want"
        return verb

    def _shard(self) -> tuple[dict[str, Any], Shard | None]:
        replica, index = self._target
        if (replica, index) in KEYS:
            return super()._shard()
        record = self._record()
        shard = record.members[index] if record is not None else None
        assert shard is not None
        by = self._sender(shard.agent, CACHE_LANE + index)
        return {"by": by, "model": MODEL, "replica": replica, "shard": index}, shard

    def _want(self) -> Want:
        record = self._record()
        if record is None or record.cache is None:
            drawn = super()._want()
            return Want(**{**_fields(drawn), "supersede": self.pick((True, True, False))})
        return Want(**self._shard()[0], want=record.cache)

    def _unpublish(self) -> Unpublish:
        return Unpublish(**self._shard()[0], void=self.pick((False, False, False, True)))

    def _stay(self) -> Stay:
        return Stay(**self._shard()[0])

    def _drop(self) -> Drop:
        about, _ = self._shard()
        number, attempt, _ = self._round(about)
        return Drop(**about, round=number, attempt=self.often(attempt, attempt - 1))

    def _join(self) -> Join:
        return Join(**{**_fields(super()._join()), "cache_bytes": self.pick(ROOMS)})

    def _ruling(self) -> AnyCommand:
        version = self._version() or 1
        agent = self.pick(AGENTS)
        kind = self.pick(("retain",) * 6 + ("pin", "unpin", "rewind", "drain", "drain", "quota", "delete", "end"))
        match kind:
            case "retain":
                return Retain(model=MODEL, last=self.pick((0, 1, 1, 1, 2, 2, -1, 33)))
            case "pin":
                return Pin(model=MODEL, version=version)
            case "unpin":
                return Unpin(model=MODEL, version=version)
            case "rewind":
                return Rewind(model=MODEL, to=max(0, version - self.pick((0, 1, 2))))
            case "drain":
                return DrainAgent(agent=agent, on=self.pick((True, False, False)))
            case "quota":
                return Quota(nbytes=self.pick((0, 0, 256, 1024)))
            case "end" if self.pick(range(END_ODDS)) == 0:
                return DeleteJob(by=self.often(None, self._sender(agent, None)))
        return Delete(model=MODEL)


def _fields(command: AnyCommand) -> dict[str, Any]:
    return {name: getattr(command, name) for name in command.__struct_fields__}


def retained_by_rule(model: Model) -> set[int]:
    """Say by the words of the documentation what is retained."""
    standing = sorted(number for number, version in model.versions.items() if str(version.state) != "retired")
    last = set(standing[len(standing) - model.retain :]) if 0 < model.retain < len(standing) else set()
    last |= set(standing) if model.retain >= len(standing) else set()
    return last | {number for number in model.pins if number in model.versions}


def safe_copies(catalog: Catalog, model: Model, version: int) -> list[str]:
    """Name the replicas that hold all of the version, ready, on agents that live, and are neither spot nor mapped."""
    return [
        replica.name
        for replica in model.replicas.values()
        if not replica.spot
        and not replica.mapped
        and len(replica.members) == replica.shards
        and all(
            shard.state is ShardState.READY
            and shard.version == version
            and catalog.agents[shard.agent].state is AgentState.LIVE
            for shard in replica.members.values()
        )
    ]


class RetentionWatcher:
    """Knows which retained versions stand safe, and what may end that."""

    def __init__(self) -> None:
        self.safe: set[tuple[str, int]] = set()
        self.exposed = 0

    def see(self, catalog: Catalog, command: AnyCommand | Unreadable, events: Sequence[Event]) -> None:
        """Compare with what was safe before the command."""
        now = {
            (model.name, number)
            for model in catalog.models.values()
            for number in retained_by_rule(model)
            if safe_copies(catalog, model, number)
        }
        kept = {(model.name, number) for model in catalog.models.values() for number in retained_by_rule(model)}
        lost = {each for each in self.safe - now if each in kept}
        told = {(event.model, event.version) for event in events if isinstance(event, VersionExposed)}
        void = isinstance(command, Unpublish) and command.void
        assert not lost or void or isinstance(command, Expire | Join), f"{command} took the last copy of {lost}"
        assert lost == told, f"{lost} were lost by a crash, and the events tell of {told}"
        self.exposed += len(lost)
        self.safe = now


def live(world: World, pick: Any, steps: int) -> RetentionWatcher:
    """Say so many commands by chance, and watch."""
    watcher, events_alone, chance = RetentionWatcher(), Watcher(), RulingChance(world, pick)
    for _ in range(steps):
        command = chance.command()
        events = world.say(command)
        watcher.see(world.catalog, command, events)
        events_alone.see(events)
        events_alone.check(world.catalog)
    return watcher
