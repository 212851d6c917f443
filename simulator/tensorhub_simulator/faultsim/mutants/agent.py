"""Planted bugs of what an agent keeps that it must not, and leaves out that it must say."""

# ruff: noqa: ANN401 (what stands in for a method takes what that takes)

from typing import TYPE_CHECKING, Any, Final

from tensorhub_agent.core.operations.read import ReadOperation
from tensorhub_agent.core.operations.register import RegisterOperation
from tensorhub_agent.core.shard import ShardCore
from tensorhub_common.protocol.log.commands import AnyCommand
from tensorhub_simulator.faultsim.nodes.command_queue import Lanes

if TYPE_CHECKING:
    from tensorhub_simulator.faultsim.mutants.planting import Replacement

ROOM: Final = 2
"""So many commands of a lane wait, and the next one is left out."""


def refused_kept() -> list["Replacement"]:
    """A registration that is refused forgets the shard and keeps its memory, until the agent starts again."""

    def drop(self: Any, error: str, message: str) -> None:
        self.core.fail(error, message)
        self.core.gone = True

    return [(RegisterOperation, "_drop", drop)]


def lane_leaves_out() -> list["Replacement"]:
    """A lane that has no room drops one command, and says the next."""
    say = Lanes.say

    def with_gaps(self: Lanes, command: AnyCommand) -> None:
        assert command.by is not None
        lane = self._lanes.get(command.by.lane)
        if lane is None or len(lane.waiting) < ROOM:
            say(self, command)

    return [(Lanes, "say", with_gaps)]


def counts_unkept() -> list["Replacement"]:
    """The log is told of a fill as soon as its bytes stand, be its manifest written by then or not."""

    def filled(self: Any, root: str | None) -> None:
        self._root = root
        self._say_filled()

    return [(ReadOperation, "_filled", filled)]


def given_up_kept() -> list["Replacement"]:
    """What the log has given up for a round that nobody follows any more stays published at its agent."""

    def overwritten(_: Any, version: int) -> None:
        del version

    return [(ShardCore, "overwritten_for_log", overwritten)]
