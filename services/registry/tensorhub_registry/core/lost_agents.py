"""Which agents are lost, for the log of a registry: one line for an agent, in however many jobs it is lost. Pure.

Always true: an agent that is lost is told once until it beats again, and then that it is back; at most `LOST_MAX` are
remembered.
"""

from collections.abc import Iterable
from typing import Final

from tensorhub_registry.core.liveness import ExpireAgent

LOST_MAX: Final = 4096


class LostAgents:
    """The agents that this registry, while it leads, has found lost."""

    def __init__(self) -> None:
        """Begin with none."""
        self._since: dict[str, float] = {}

    def lost(self, expiries: Iterable[ExpireAgent], now: float) -> list[tuple[str, int]]:
        """Return the agents that are news, and in how many jobs each is lost."""
        jobs: dict[str, int] = {}
        for each in expiries:
            jobs[each.agent] = jobs.get(each.agent, 0) + 1
        news = [(agent, count) for agent, count in jobs.items() if agent not in self._since]
        for agent, _ in news:
            while len(self._since) >= LOST_MAX:
                del self._since[next(iter(self._since))]
            self._since[agent] = now
        return news

    def beats(self, agent: str, now: float) -> float | None:
        """Return for how long an agent was lost that beats again; None for one that was not."""
        since = self._since.pop(agent, None)
        return None if since is None else now - since
