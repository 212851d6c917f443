"""Which agents of a job were lost so long ago that its leader says they are forgotten. Pure.

The fold decides, by JetStream's time of the word. This is asked with a registry's own clock, so it waits a little
longer, and says the same again only after a while: a word that comes too early stands in the log for nothing.
"""

from dataclasses import dataclass, field
from typing import Final

import msgspec

from tensorhub_common.catalog.handlers.membership import kept_s
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.catalog.transitions import AgentState
from tensorhub_common.protocol.log.levels import Level

MARGIN_S: Final = 30.0
"""So much longer than the fold a registry waits: clocks differ."""

AGAIN_S: Final = 600.0
"""The same word is said again after this, should the log not have taken it, or the fold have refused it."""

FORGOTTEN_MAX: Final = 64
"""So many agents are forgotten at a time, so that a job which lost thousands at once goes on meanwhile."""


class LostIncarnation(msgspec.Struct, frozen=True):
    """A lost incarnation of an agent."""

    agent: str
    incarnation: int


@dataclass(slots=True)
class AgentForgetting:
    """One job's lost agents, as its leader looks at them now and then."""

    _said: dict[LostIncarnation, float] = field(default_factory=dict)

    def due(self, catalog: Catalog, now: float) -> list[LostIncarnation]:
        """Return whom to forget, at `now` in seconds since the epoch."""
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
