"""What must hold of a log whoever folds it: known from its commands and events alone, not from the catalog's own state.

So a mistake that the fold makes everywhere alike, which comparing folds can't show, is still found.
"""

from typing import Final

from tensorhub_common.catalog.state import root_key
from tensorhub_common.protocol.log.any_event import AnyEvent
from tensorhub_common.protocol.log.commands import AnyCommand, Expire, Join, Sender, Unreadable
from tensorhub_common.protocol.log.hub import AgentJoined, AgentLost, CommandRejected, CommandRepeated, JobDeleted
from tensorhub_common.protocol.log.replicas import CopyPlaced, ReplicaReady
from tensorhub_common.protocol.log.rounds import RoundDecided, RoundSettled
from tensorhub_common.protocol.log.shards import ShardFilled, ShardRegistered
from tensorhub_common.protocol.log.versions import ModelDeleted, VersionPublished
from tensorhub_common.protocol.plans import Turn
from tensorhub_simulator.faultsim.models.segments import Violation

HUB: Final = "_"

Shelf = tuple[str, str, int]


class LogRules:
    """Sees each command with what became of it, in the log's order."""

    def __init__(self) -> None:
        """Begin with an empty log."""
        self.answers: dict[int, int | None] = {}
        """What the rounds that ended well are answered with."""
        self.turns: dict[tuple[str, str], Turn] = {}
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
        for event in events:
            self._event(event)

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
            case RoundDecided():
                self._filled[event.round] = (event.version, set(event.held))
                self.turns[event.model, event.replica] = Turn(event.cmd, event.round)
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
