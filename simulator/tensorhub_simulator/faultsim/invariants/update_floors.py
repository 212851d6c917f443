"""That an update never goes back: known from a log's commands and events alone, as `logrules` is.

What a replica holds is taken from its last `replica.ready`, until any event says that one of its shards went elsewhere;
where that can't be told, nothing is demanded.
"""

from tensorhub_common.protocol.log.any_event import AnyEvent
from tensorhub_common.protocol.log.commands import AnyCommand, Unreadable, Want
from tensorhub_common.protocol.log.events import ReplicaEvent, RoundEvent
from tensorhub_common.protocol.log.hub import AgentForgotten, AgentJoined, AgentLost, RegistryLeads
from tensorhub_common.protocol.log.levels import Level
from tensorhub_common.protocol.log.replicas import ReplicaReady
from tensorhub_common.protocol.log.rounds import RoundDecided, RoundJoined, RoundStarted
from tensorhub_common.protocol.log.shards import ShardFilled
from tensorhub_common.protocol.log.versions import ModelRewound
from tensorhub_simulator.faultsim.models.segments import Violation

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
