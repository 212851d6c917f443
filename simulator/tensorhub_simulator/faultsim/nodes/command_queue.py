"""What an agent says to the log: one command of a lane under way at a time, again until it is acknowledged."""

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.commands import AnyCommand
from tensorhub_common.protocol.subjects import command_subject

if TYPE_CHECKING:
    from tensorhub_simulator.faultsim.nodes.agent import AgentNode

LATE_S_MAX: Final = 4.0
"""So late a command arrives now and then, whatever its sender has done meanwhile."""


@dataclass(slots=True)
class Lane:
    """Commands that wait for the log."""

    waiting: deque[AnyCommand] = field(default_factory=deque)


class CommandQueue:
    """All lanes of one agent."""

    def __init__(self, node: "AgentNode") -> None:
        """Begin with none."""
        self.node = node
        self._lanes: dict[str, Lane] = {}

    @property
    def are_silent(self) -> bool:
        """Whether the log has all that was said."""
        return not any(lane.waiting for lane in self._lanes.values())

    def clear(self) -> None:
        """Forget what was to be said."""
        self._lanes.clear()

    def say(self, command: AnyCommand) -> None:
        """Say something behind all that its lane has said before."""
        assert command.by is not None
        lane = self._lanes.setdefault(command.by.lane, Lane())
        lane.waiting.append(command)
        if len(lane.waiting) == 1:
            self._send(command.by.lane, command)

    def _is_first(self, name: str, command: AnyCommand) -> bool:
        lane = self._lanes.get(name)
        return lane is not None and bool(lane.waiting) and lane.waiting[0] is command

    def _send(self, name: str, command: AnyCommand) -> None:
        """Try to append the lane's first command, and again until it is acknowledged."""
        if not self._is_first(name, command):
            return
        node, by = self.node, command.by
        clock, world, life = node.clock, node.world, node.life
        assert by is not None
        msg_id = f"{by.lane}:{by.incarnation}:{by.n}"
        subject, data = command_subject(world.job, str(command.__struct_config__.tag), by.process), encode(command)

        def arrive() -> None:
            if not world.log.up:
                return
            world.log.append(subject, data, msg_id)
            if not world.net_loses(node):
                clock.after(world.nats.lag(), node, lambda: self._acknowledged(name, command), life)

        if not world.net_loses(node):
            late_s = node.messages.random() * LATE_S_MAX if node.happens(world.plan.late_odds) else 0.0
            clock.after(node.lag() + late_s, world.nats, arrive)
        clock.after(world.plan.append_attempt_s, node, lambda: self._send(name, command))

    def _acknowledged(self, name: str, command: AnyCommand) -> None:
        if not self._is_first(name, command):
            return
        waiting = self._lanes[name].waiting
        waiting.popleft()
        if waiting:
            self._send(name, waiting[0])
