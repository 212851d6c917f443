"""Rules that every log must satisfy, checked from its commands and events alone and not from the catalog's own state.

The rules hold for every fold of the log. So they find a mistake that every fold makes alike, which a comparison of
folds can't show.

Invariants:
- `LogRules`: a sender is alive, and a command counts once. Incarnations, terms and versions only rise. A root never
  changes, a deleted job stays deleted, and a replica is ready only when all of its shards are.
- `Leaders`: only the registry that last said in the log that it leads may cost an agent its place.
- `UpdateFloors`: an update never goes back. The version that a replica holds is taken from its last `ReplicaReady`,
  until an event says that one of its shards went elsewhere. If the version can't be told, nothing is demanded.
"""

from typing import Final

from tensorhub_common.catalog.state import root_key
from tensorhub_common.catalog.transitions import RoundState
from tensorhub_common.protocol.log.commands import AnyCommand, Expire, Join, Sender, Unreadable, Want
from tensorhub_common.protocol.log.events import (
    AgentForgotten,
    AgentJoined,
    AgentLost,
    AnyEvent,
    CommandRejected,
    CommandRepeated,
    CopyPlaced,
    JobDeleted,
    ModelDeleted,
    ModelRewound,
    RegistryLeads,
    ReplicaEvent,
    ReplicaReady,
    RoundDecided,
    RoundEvent,
    RoundJoined,
    RoundSettled,
    RoundStarted,
    ShardFilled,
    ShardRegistered,
    VersionPublished,
)
from tensorhub_common.protocol.log.levels import Level
from tensorhub_common.protocol.plans import ReadPriority
from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.models.job import Job
from tensorhub_simulator.faultsim.observations import CommandFolded, EventStored, PlanAsked

HUB: Final = "_"

Shelf = tuple[str, str, int]


class LogRules:
    """Sees each command with what became of it, in the log's order."""

    def __init__(self) -> None:
        """Begin with an empty log."""
        self._seq = 0
        self.round_of: dict[Sender, int] = {}
        """By the command that joined it, each round."""
        self.answers: dict[int, int | None] = {}
        """What the rounds that ended well are answered with."""
        self.turns: dict[tuple[str, str], ReadPriority] = {}
        """Of each replica's last round that was decided."""
        self._live: dict[str, int] = {}
        """By agent its live incarnation; negative once it is lost."""
        self._term = 0
        self._deleted = False
        self._last: dict[str, int] = {}
        self._said: dict[Sender, int] = {}
        self._layouts: dict[Shelf, tuple[int, str]] = {}
        self._roots: dict[tuple[str, int, str], str] = {}
        self._filled: dict[int, tuple[int, set[int]]] = {}
        """By round the version that it was decided for last, and the shards that hold that."""

    def see(self, seq: int, command: AnyCommand | Unreadable, events: tuple[AnyEvent, ...]) -> None:
        """Take a command and its events. Raises `Violation`."""
        if not isinstance(events[0], CommandRejected | CommandRepeated) and not isinstance(command, Unreadable):
            self._taken(seq, command)
        self._seq = seq
        for event in events:
            self._event(event)

    def on_plan_asked(self, asked: PlanAsked) -> None:
        """A planner that has folded the whole log knows which rounds are decided, and when. Raises `Violation`."""
        if asked.catalog.seq != self._seq:
            return
        for model in asked.catalog.models.values():
            for replica in model.replicas.values():
                current, told = replica.round, self.turns.get((model.name, replica.name))
                if current is None or current.state is RoundState.JOINING:
                    continue
                if told != ReadPriority(current.decided, current.number):
                    what = f"{current.decided} for that of {replica.name}, and its agents were told {told}"
                    raise Violation("turns are the log's", f"the planner takes {what}")

    def _taken(self, seq: int, command: AnyCommand) -> None:
        """The log has acted on a command: its sender must be alive, and say it for the first time."""
        if self._deleted:
            raise Violation("a deleted job stays deleted", f"{type(command).__name__} at {seq} was taken")
        by = command.by
        if by is None:
            return
        first = self._said.setdefault(by, seq)
        if first != seq:
            raise Violation("each command counts once", f"{by} counted at {first}, and again at {seq}")
        if isinstance(command, Expire):
            if command.term < self._term:
                raise Violation("terms only rise", f"term {command.term} expired an agent after term {self._term}")
            self._term = command.term
        elif not isinstance(command, Join) and not by.lane.startswith(HUB):
            live = self._live.get(by.process)
            if live != by.incarnation:
                raise Violation(
                    "the live incarnation alone counts",
                    f"{type(command).__name__} of {by} was taken, and the live incarnation is {live}",
                )

    def _event(self, event: AnyEvent) -> None:
        match event:
            case AgentJoined() | AgentLost():
                self._agent(event)
            case ShardRegistered():
                self._layouts[event.model, event.replica, event.shard] = (event.shards, event.layout)
            case CopyPlaced():
                for member in event.members:
                    self._layouts[event.model, event.replica, member.shard] = (len(event.members), member.layout)
            case VersionPublished():
                self._published(event)
            case ModelDeleted():
                self._last.pop(event.model, None)
                self._roots = {key: root for key, root in self._roots.items() if key[0] != event.model}
            case JobDeleted():
                self._deleted = True
            case _:
                self._round(event)

    def _agent(self, event: AgentJoined | AgentLost) -> None:
        if isinstance(event, AgentLost):
            self._live[event.agent] = -event.incarnation
            return
        if event.incarnation <= abs(self._live.get(event.agent, 0)):
            raise Violation("incarnations only rise", f"{event.agent} joined as {event.incarnation} once more")
        self._live[event.agent] = event.incarnation

    def _round(self, event: AnyEvent) -> None:
        match event:
            case RoundJoined() if event.by is not None:
                self.round_of.setdefault(event.by, event.round)
            case RoundDecided():
                self._filled[event.round] = (event.version, set(event.held))
                self.turns[event.model, event.replica] = ReadPriority(event.cmd, event.round)
            case ShardFilled():
                self._filled.setdefault(event.round, (event.version, set()))[1].add(event.shard)
                self._root((event.model, event.replica, event.shard), event.version, event.root)
            case ReplicaReady() if event.round is not None:
                self._ready(event, event.round)
            case RoundSettled():
                self.answers[event.round] = None
            case _:
                pass

    def _published(self, event: VersionPublished) -> None:
        last = self._last.get(event.model)
        if last is not None and event.version <= last:
            raise Violation("versions only rise", f"{event.model} published {event.version} after {last}")
        self._last[event.model] = event.version
        for shard, root in enumerate(event.roots):
            self._root((event.model, event.replica, shard), event.version, root)

    def _root(self, place: Shelf, version: int, root: str) -> None:
        """The bytes of a version in one place are the same for ever."""
        shards, layout = self._layouts[place]
        known = self._roots.setdefault((place[0], version, root_key(shards, place[2], layout)), root)
        if known != root:
            raise Violation("a root stands for ever", f"{place} has root {root} at {version}, and had {known}")

    def _ready(self, event: ReplicaReady, number: int) -> None:
        """A replica is ready once all of its shards have said so, or held the version when it was decided."""
        self.answers[number] = event.version
        decided, filled = self._filled.pop(number, (None, set[int]()))
        shards = self._layouts[event.model, event.replica, 0][0]
        # Decided anew for what all of them hold already, a round ends at once.
        if decided == event.version and filled != set(range(shards)):
            raise Violation(
                "all shards are ready", f"{event.replica} is ready at {event.version} with shards {filled} of {shards}"
            )


class Leaders:
    """Sees every command and event as it is stored."""

    def __init__(self) -> None:
        """Begin with an empty log, in which no registry leads."""
        self._senders: dict[int, str] = {}
        """By command, the name with which its message id begins."""
        self._led: list[tuple[int, str]] = []
        """From which command on which registry led."""

    def on_command(self, folded: CommandFolded) -> None:
        """Note which process sent a command."""
        self._senders[folded.seq] = folded.msg_id.split(".")[0]

    def on_event(self, stored: EventStored) -> None:
        """Take the event that was just stored. Raises `Violation`."""
        event = stored.event
        if isinstance(event, RegistryLeads):
            self._led.append((event.cmd, event.registry))
        elif isinstance(event, AgentLost):
            speaker = self._senders[event.cmd]
            leader = next((name for cmd, name in reversed(self._led) if cmd < event.cmd), None)
            if leader not in (None, speaker):
                raise Violation("only the leader expires", f"{speaker} expired {event.agent} while {leader} led")


Replica = tuple[str, str]


class UpdateFloors:
    """Sees each command with what became of it, in the log's order."""

    def __init__(self, level: int) -> None:
        """Begin with an empty log, at this level."""
        self._level = level
        self._ready: dict[Replica, int] = {}
        """What a replica holds, where that is known."""
        self._floors: dict[int, int] = {}
        """By round that asks for something newer alone: what its replica held when the first shard joined."""

    def see(self, command: AnyCommand | Unreadable, events: tuple[AnyEvent, ...]) -> None:
        """Take a command and its events. Raises `Violation`."""
        for event in events:
            match event:
                case RegistryLeads():
                    self._level = max(self._level, event.level)
                case AgentJoined() | AgentLost() | AgentForgotten():
                    self._ready.clear()
                case ModelRewound():
                    # From there newer leads back.
                    self._ready = {key: held for key, held in self._ready.items() if key[0] != event.model}
                    self._floors.clear()
                case RoundJoined():
                    self._joined(command, event)
                case ReplicaEvent():
                    self._replica(event)
                case _:
                    pass

    def _replica(self, event: ReplicaEvent) -> None:
        match event:
            case RoundDecided():
                self._decided(event)
            case ReplicaReady():
                self._ready[event.model, event.replica] = event.version
                if event.round is not None:
                    self._floors.pop(event.round, None)
            case RoundStarted() if event.stands:
                pass
            case RoundEvent() if not isinstance(event, RoundStarted):
                pass
            case ShardFilled():
                pass
            case _:
                self._ready.pop((event.model, event.replica), None)

    def _joined(self, command: AnyCommand | Unreadable, event: RoundJoined) -> None:
        if not isinstance(command, Want):
            return
        held = self._ready.get((event.model, event.replica))
        if event.round == event.cmd and held is not None and self._level >= Level.NEVER_OLDER:
            self._floors[event.round] = held
        if command.want != "newer":
            self._floors.pop(event.round, None)

    def _decided(self, event: RoundDecided) -> None:
        floor = self._floors.get(event.round)
        if floor is not None and event.version < floor:
            raise Violation(
                "updates never go back",
                f"round {event.round} of {event.model}/{event.replica} is decided for version {event.version}, and the "
                f"replica held {floor} when it began",
            )


def watch_log(job: Job) -> LogRules:
    """Have all rules of this module judge a job's log."""
    rules, floors, leaders = LogRules(), UpdateFloors(job.first_level), Leaders()

    def on_command(folded: CommandFolded) -> None:
        rules.see(folded.seq, folded.command, folded.events)
        floors.see(folded.command, folded.events)

    job.subscribe(CommandFolded, on_command)
    job.subscribe(CommandFolded, leaders.on_command)
    job.subscribe(EventStored, leaders.on_event)
    job.subscribe(PlanAsked, rules.on_plan_asked)
    return rules
