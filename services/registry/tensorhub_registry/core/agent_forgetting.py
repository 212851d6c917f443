"""Which agents of a job were lost so long ago that its leader has them forgotten. Pure.

The fold decides, by JetStream's time of the command. A registry decides by its own clock when to send the command. It
therefore waits a little longer, and repeats the command only after a while, since one that comes too early changes
nothing.
"""

from dataclasses import dataclass, field
from typing import Final

import msgspec

from tensorhub_common.catalog.handlers.membership import kept_s
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.catalog.transitions import AgentState
from tensorhub_common.protocol.log.levels import Level

MARGIN_S: Final = 30.0
"""A registry waits this much longer than the fold, since clocks differ."""

AGAIN_S: Final = 600.0
"""The same command is repeated after this, in case the log did not take it or the fold refused it."""

FORGOTTEN_MAX: Final = 64
"""Limit of agents forgotten at a time, so that a job which lost thousands at once goes on meanwhile."""


class LostIncarnation(msgspec.Struct, frozen=True):
    """A lost incarnation of an agent."""

    agent: str
    incarnation: int


@dataclass(slots=True)
class AgentForgetting:
    """One job's lost agents, as its leader looks at them every few seconds."""

    _said: dict[LostIncarnation, float] = field(default_factory=dict)

    def due(self, catalog: Catalog, now: float) -> list[LostIncarnation]:
        """Return the agents to forget, at `now` in seconds since the epoch."""
        self._said = {each: at for each, at in self._said.items() if now - at < AGAIN_S}
        if catalog.level < Level.FORGETTING:
            return []
        due = [
            lost
            for agent in catalog.agents.values()
            if agent.state is AgentState.LOST
            and now - agent.lost_at >= kept_s(catalog, agent) + MARGIN_S
            and (lost := LostIncarnation(agent.name, agent.incarnation)) not in self._said
        ][:FORGOTTEN_MAX]
        self._said |= dict.fromkeys(due, now)
        return due
