"""The driver of the catalog's fold: sends commands as agents would, and checks what must hold after each.

Always true after `say`: the catalog's invariants hold, the group is numbered 1..k, each event fits into a NATS message,
reads back as it was written and has a good subject; a refused command has changed nothing but the memory of it.
"""

import pickle
from collections.abc import Sequence
from dataclasses import fields

import msgspec

from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.invariants import check_invariants
from tensorhub_common.catalog.state import Catalog, Replica, Shard
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.log import codec
from tensorhub_common.protocol.log.commands import (
    AnyCommand,
    Drained,
    EndHold,
    Expire,
    Filled,
    ForgetAgent,
    GiveUp,
    Granted,
    HeldShard,
    Hold,
    Join,
    Publish,
    Ready,
    Register,
    Release,
    Replan,
    Sender,
    Settle,
    Unpublish,
    Unreadable,
    VersionRequest,
    Want,
    Withdraw,
)
from tensorhub_common.protocol.log.events import CommandRejected, Event, RoundDecided, RoundFailed, kind_of, model_of
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL

JOB = "run-7"
MODEL = "policy"
EVENT_BYTES_MAX = 1024 * 1024
REGISTRY = "_registry"
_MAY_CHANGE_WHEN_REFUSED = frozenset({"seq", "time", "lanes"})


def kinds(events: Sequence[Event]) -> list[str]:
    """Name the events' kinds, in their order."""
    return [kind_of(event) for event in events]


def refused(events: Sequence[Event], error: str | None = None) -> CommandRejected:
    """Assert that a command was refused, with this error where one is named; the refusal."""
    assert isinstance(events[0], CommandRejected), kinds(events)
    assert error in (None, events[0].error), events[0]
    return events[0]


def decided(events: Sequence[Event]) -> RoundDecided:
    """Return the one decision among the events."""
    (found,) = [event for event in events if isinstance(event, RoundDecided)]
    return found


def failed(events: Sequence[Event]) -> RoundFailed:
    """Return the one failure of a round among the events."""
    (found,) = [event for event in events if isinstance(event, RoundFailed)]
    return found


def root(version: int, shard: int = 0, layout: str = "L") -> str:
    """Return a root as a shard of this layout has it at this version."""
    return f"{layout}-{version}-{shard}"


def differences(one: Catalog, other: Catalog) -> list[str]:
    """Name the fields in which two catalogs differ, but for what a refusal may change."""
    names = [field.name for field in fields(Catalog) if field.name not in _MAY_CHANGE_WHEN_REFUSED]
    return [name for name in names if getattr(one, name) != getattr(other, name)]


class CatalogDriver:
    """One job, its log of commands, and all events so far."""

    def __init__(self, level: int = NEWEST_LEVEL) -> None:
        self._level = level
        self.catalog = Catalog(JOB, level=level)
        self.log: list[tuple[int, float, AnyCommand | Unreadable]] = []
        self.events: list[Event] = []
        self._said = 0
        self._lanes: dict[tuple[str, str, int], int] = {}

    # Saying things.

    def say(self, command: AnyCommand | Unreadable) -> tuple[Event, ...]:
        """Fold a command and check what must hold after any."""
        seq = self.catalog.seq + 2
        before = pickle.dumps(self.catalog)
        events = apply(self.catalog, seq, 1000.0 + seq, command)
        self.log.append((seq, 1000.0 + seq, command))
        self.events.extend(events)
        check_invariants(self.catalog)
        check_group(events, seq, command)
        if isinstance(events[0], CommandRejected):
            assert len(events) == 1
            was: Catalog = pickle.loads(before)  # noqa: S301 (we wrote it three lines above; copying would take longer)
            assert not differences(was, self.catalog), f"a refused {command!r} changed the catalog"
        return events

    def replay(self) -> Catalog:
        """Fold the whole log anew."""
        catalog = Catalog(JOB, level=self._level)
        for seq, time, command in self.log:
            apply(catalog, seq, time, command)
        return catalog

    def skip(self, numbers: int) -> None:
        """Leave numbers out, so that what is said from now on is newer than what others said on the same lanes."""
        self._said += numbers

    def by(self, agent: str, lane: int | None = None) -> Sender:
        """Return the next sender of an agent's lane, in its live incarnation."""
        self._said += 1
        known = self.catalog.agents.get(agent)
        name = agent if lane is None else f"{agent}/{lane}"
        return Sender(name, 1 if known is None else known.incarnation, self._said)

    def _shard_by(self, replica: str, shard: int, model: str = MODEL, agent: str | None = None) -> Sender:
        lane = self._lanes.setdefault((model, replica, shard), len(self._lanes))
        return self.by(agent or self.shard(replica, shard, model).agent, lane)

    # Looking.

    def replica(self, name: str, model: str = MODEL) -> Replica:
        return self.catalog.models[model].replicas[name]

    def shard(self, replica: str, shard: int = 0, model: str = MODEL) -> Shard:
        return self.replica(replica, model).members[shard]

    def states(self, replica: str, model: str = MODEL) -> list[str]:
        """Return the state of each registered shard, by index."""
        members = self.replica(replica, model).members
        return [str(members[index].state) for index in sorted(members)]

    def round(self, replica: str) -> int:
        """Return the number of the replica's round."""
        current = self.replica(replica).round
        assert current is not None
        return current.number

    def attempt(self, replica: str) -> int:
        """Return the attempt that the replica's round is in."""
        current = self.replica(replica).round
        assert current is not None
        return current.attempt

    # Agents.

    def join(self, agent: str, *holds: HeldShard, incarnation: int | None = None) -> tuple[Event, ...]:
        """Let an agent come (again), by default with an incarnation one higher."""
        known = self.catalog.agents.get(agent)
        after = incarnation if incarnation is not None else 1 if known is None else known.incarnation + 1
        self._said += 1
        return self.say(Join(by=Sender(agent, after, self._said), host="host-0", site="site-0", holds=holds))

    def holding(self, replica: str, shard: int = 0) -> HeldShard:
        """Return what a truthful agent states of a shard as it stands."""
        held = self.shard(replica, shard)
        return HeldShard(model=MODEL, replica=replica, shard=shard, version=held.version, root=held.root)

    def expire(self, agent: str, term: int = 1, incarnation: int | None = None) -> tuple[Event, ...]:
        """Let the registry's leader count an agent as lost."""
        which = self.catalog.agents[agent].incarnation if incarnation is None else incarnation
        self._said += 1
        return self.say(Expire(by=Sender(REGISTRY, term, self._said), agent=agent, incarnation=which, term=term))

    def forget(self, agent: str, term: int = 1) -> tuple[Event, ...]:
        """Let the registry's leader say that a lost agent is forgotten."""
        known = self.catalog.agents.get(agent)
        self._said += 1
        by, incarnation = Sender(REGISTRY, term, self._said), 1 if known is None else known.incarnation
        return self.say(ForgetAgent(by=by, agent=agent, incarnation=incarnation, term=term))

    # Holds.

    def hold(
        self, *versions: int, holder: str = "rollouts", term: int = 1, n: int | None = None, lasts_s: int = 60
    ) -> tuple[Event, ...]:
        """Let somebody hold these versions alone, from now on."""
        self._said += 1
        number = self._said if n is None else n
        return self.say(Hold(model=MODEL, holder=holder, term=term, n=number, versions=versions, lasts_s=lasts_s))

    def end_hold(self, holder: str = "rollouts", term: int = 1) -> tuple[Event, ...]:
        """Let the registry's leader say that a hold has ended."""
        self._said += 1
        return self.say(EndHold(by=Sender(REGISTRY, term, self._said), model=MODEL, holder=holder, term=term))

    # Shards.

    def register(
        self,
        agent: str,
        replica: str,
        shard: int = 0,
        shards: int = 1,
        *,
        layout: str = "L",
        model: str = MODEL,
        spot: bool = False,
        mapped: bool = False,
    ) -> tuple[Event, ...]:
        """Let a worker bring a shard to an agent."""
        by = self._shard_by(replica, shard, model, agent)
        return self.say(
            Register(
                by=by,
                model=model,
                replica=replica,
                shard=shard,
                shards=shards,
                spot=spot,
                layout=layout,
                nbytes=64,
                mapped=mapped,
            )
        )

    def release(self, replica: str, shard: int = 0) -> tuple[Event, ...]:
        return self.say(Release(by=self._shard_by(replica, shard), model=MODEL, replica=replica, shard=shard))

    def ready(
        self, replica: str, version: int | None, shard: int = 0, *, digest: str | None = None
    ) -> tuple[Event, ...]:
        """Offer a shard's memory; by default with the root that `root` gives for the version."""
        last = self.catalog.models[MODEL].last
        number = version if version is not None else 1 if last is None else last + 1
        said = root(number, shard) if digest is None else digest
        by = self._shard_by(replica, shard)
        return self.say(Ready(by=by, model=MODEL, replica=replica, shard=shard, version=version, root=said))

    def withdraw(self, replica: str, shard: int = 0) -> tuple[Event, ...]:
        return self.say(Withdraw(by=self._shard_by(replica, shard), model=MODEL, replica=replica, shard=shard))

    def unpublish(self, replica: str, shard: int = 0) -> tuple[Event, ...]:
        return self.say(Unpublish(by=self._shard_by(replica, shard), model=MODEL, replica=replica, shard=shard))

    def drained(self, replica: str, shard: int = 0) -> tuple[Event, ...]:
        return self.say(Drained(by=self._shard_by(replica, shard), model=MODEL, replica=replica, shard=shard))

    def wish(self, replica: str, version: int | None = None, model: str = MODEL) -> tuple[Event, ...]:
        """Ask for a publication from outside."""
        return self.say(Publish(model=model, replica=replica, version=version))

    # Rounds.

    def want(
        self, replica: str, wish: VersionRequest, shard: int = 0, *, patient: bool = True, staged: bool = False
    ) -> tuple[Event, ...]:
        by = self._shard_by(replica, shard)
        return self.say(
            Want(by=by, model=MODEL, replica=replica, shard=shard, want=wish, patient=patient, staged=staged)
        )

    def settle(self, replica: str, shard: int = 0, number: int | None = None) -> tuple[Event, ...]:
        by, which = self._shard_by(replica, shard), self.round(replica) if number is None else number
        return self.say(Settle(by=by, model=MODEL, replica=replica, shard=shard, round=which))

    def give_up(
        self, replica: str, shard: int = 0, error: str = "RoundTimeout", number: int | None = None
    ) -> tuple[Event, ...]:
        by, which = self._shard_by(replica, shard), self.round(replica) if number is None else number
        return self.say(
            GiveUp(by=by, model=MODEL, replica=replica, shard=shard, round=which, error=error, message="too late")
        )

    def give_up_attempt(self, replica: str, shard: int, attempt: int) -> tuple[Event, ...]:
        """Say that this attempt's sources are gone."""
        by, which = self._shard_by(replica, shard), self.round(replica)
        error, why = "VersionUnavailable", "no source is left"
        return self.say(
            GiveUp(
                by=by, model=MODEL, replica=replica, shard=shard, round=which, attempt=attempt, error=error, message=why
            )
        )

    def give_up_unnumbered(self, replica: str, shard: int = 0) -> tuple[Event, ...]:
        """Leave whichever round the shard is in."""
        by, why = self._shard_by(replica, shard), "too late"
        return self.say(
            GiveUp(by=by, model=MODEL, replica=replica, shard=shard, round=None, error="RoundTimeout", message=why)
        )

    def granted(self, replica: str, shard: int = 0, attempt: int | None = None) -> tuple[Event, ...]:
        by, which = self._shard_by(replica, shard), self.attempt(replica) if attempt is None else attempt
        number = self.round(replica)
        return self.say(Granted(by=by, model=MODEL, replica=replica, shard=shard, round=number, attempt=which))

    def replan(self, replica: str, shard: int = 0, attempt: int | None = None) -> tuple[Event, ...]:
        by, which = self._shard_by(replica, shard), self.attempt(replica) if attempt is None else attempt
        number = self.round(replica)
        return self.say(Replan(by=by, model=MODEL, replica=replica, shard=shard, round=number, attempt=which))

    def filled(
        self,
        replica: str,
        version: int,
        shard: int = 0,
        *,
        digest: str | None = None,
        number: int | None = None,
        waits: bool = True,
        attempt: int | None = None,
    ) -> tuple[Event, ...]:
        by, which = self._shard_by(replica, shard), self.round(replica) if number is None else number
        said = root(version, shard) if digest is None else digest
        return self.say(
            Filled(
                by=by,
                model=MODEL,
                replica=replica,
                shard=shard,
                round=which,
                version=version,
                root=said,
                waits=waits,
                attempt=attempt,
            )
        )

    # Whole stories.

    def want_all(
        self, replica: str, wish: VersionRequest = "latest", *, patient: bool = True, staged: bool = False
    ) -> tuple[Event, ...]:
        """Join a round with all shards; the last one's events."""
        shards = range(self.replica(replica).shards)
        return [self.want(replica, wish, shard, patient=patient, staged=staged) for shard in shards][-1]

    def grant_all(self, replica: str) -> tuple[Event, ...]:
        """Say that all shards that are still to be filled have their leases; the last events."""
        current = self.replica(replica).round
        assert current is not None
        needed = [shard for shard in range(self.replica(replica).shards) if shard not in current.filled]
        return [self.granted(replica, shard) for shard in needed][-1]

    def replica_of(self, name: str, *agents: str, spot: bool = False) -> None:
        """Let a replica stand with one shard on each of the agents, which join if they have not."""
        for agent in agents:
            if agent not in self.catalog.agents:
                self.join(agent)
        for index, agent in enumerate(agents):
            self.register(agent, name, index, len(agents), spot=spot)

    def publish(self, replica: str, version: int | None) -> tuple[Event, ...]:
        """Publish with all shards; the last one's events."""
        return [self.ready(replica, version, shard) for shard in range(self.replica(replica).shards)][-1]

    def start(self, replica: str, wish: VersionRequest = "latest", *, patient: bool = True) -> tuple[Event, ...]:
        """Join a round with all shards and grant what is asked for, so that it is being filled; the last events."""
        self.want_all(replica, wish, patient=patient)
        return self.grant_all(replica)

    def fetch(self, replica: str, wish: VersionRequest = "latest") -> tuple[Event, ...]:
        """Do a whole round; the last events."""
        self.start(replica, wish)
        current = self.replica(replica).round
        assert current is not None
        assert current.version is not None
        version = current.version
        needed = [shard for shard in range(self.replica(replica).shards) if shard not in current.filled]
        return [self.filled(replica, version, shard) for shard in needed][-1]

    def empty(self, replica: str) -> None:
        """Unpublish and drain every shard."""
        for shard in range(self.replica(replica).shards):
            self.unpublish(replica, shard)
            self.drained(replica, shard)


def check_group(events: Sequence[Event], seq: int, command: AnyCommand | Unreadable) -> None:
    """Assert what holds of every group of events."""
    assert events, f"{command!r} has no outcome"
    assert [event.i for event in events] == list(range(1, len(events) + 1))
    sender = None if isinstance(command, Unreadable) else command.by
    for event in events:
        assert (event.cmd, event.k, event.time, event.by) == (seq, len(events), 1000.0 + seq, sender)
        data = codec.encode(event)
        assert len(data) < EVENT_BYTES_MAX, f"{kind_of(event)} has {len(data)} bytes"
        assert codec.decode_event(data) == event
        noun, what = kind_of(event).split(".")
        subjects.event(JOB, model_of(event), noun, what)


def recoded(command: AnyCommand, level: int) -> AnyCommand | Unreadable:
    """Return the command as a registry reads it out of the log."""
    verb = msgspec.json.decode(codec.encode(command))["verb"]
    process = None if command.by is None else command.by.process
    return codec.decode_command(verb, process, codec.encode(command), level)


def reader_of_two(*, published: int | None = 12) -> CatalogDriver:
    """Return a trainer and an engine of two shards each, on four agents."""
    world = CatalogDriver()
    world.replica_of("trainer", "a", "b")
    world.replica_of("engine", "c", "d")
    if published is not None:
        world.publish("trainer", published)
    return world
