"""What an agent says to the log: one command of a lane under way at a time, again until it is acknowledged."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.commands import AnyCommand
from tensorhub_common.protocol.subjects import command_subject
from tensorhub_simulator.engine.clock import Node
from tensorhub_simulator.faultsim.models.job import Job

LATE_S_MAX: Final = 4.0
"""So late a command arrives now and then, whatever its sender has done meanwhile."""


@dataclass(slots=True)
class Lane:
    """Commands that wait for the log."""

    waiting: deque[AnyCommand] = field(default_factory=deque)


class CommandQueue:
    """All lanes of one agent."""

    def __init__(self, job: Job, node: Node) -> None:
        """Begin with none."""
        self.job, self.node = job, node
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
        clock, job, life = node.clock, self.job, node.life
        assert by is not None
        msg_id = f"{by.lane}:{by.incarnation}:{by.n}"
        subject, data = command_subject(job.name, str(command.__struct_config__.tag), by.process), encode(command)

        def arrive() -> None:
            if not job.log.up:
                return
            job.log.append(subject, data, msg_id)
            if not job.network.loses(node):
                clock.after(job.nats.lag(), node, lambda: self._acknowledged(name, command), life)

        if not job.network.loses(node):
            late_s = node.messages.random() * LATE_S_MAX if node.happens(job.config.late_odds) else 0.0
            clock.after(node.lag() + late_s, job.nats, arrive)
        clock.after(job.config.append_attempt_s, node, lambda: self._send(name, command))

    def _acknowledged(self, name: str, command: AnyCommand) -> None:
        if not self._is_first(name, command):
            return
        waiting = self._lanes[name].waiting
        waiting.popleft()
        if waiting:
            self._send(name, waiting[0])
