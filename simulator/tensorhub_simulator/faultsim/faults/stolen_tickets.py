"""Strangers: somebody has seen a reader's ticket, and shows it to the source as well, sooner or later.

A ticket is good once, for whoever shows it first. So a read may lose its source to a stranger, but no two sessions are
ever opened with one ticket, and none with that of a lease which has ended.
"""

from typing import TYPE_CHECKING, Final

from tensorhub_simulator.faultsim.models.segments import Violation

if TYPE_CHECKING:
    from tensorhub_simulator.faultsim.nodes.agent import AgentNode
    from tensorhub_simulator.faultsim.world import World

OVERHEARD_ODDS: Final = 0.1
LATE_S: Final = 4.0


class StolenTickets:
    """Knows which tickets have opened a session."""

    def __init__(self, world: "World") -> None:
        """Begin with none."""
        self.world = world
        self._rng = world.streams.of(world.job, "fault", "stolen-ticket")
        self._opened: set[str] = set()

    def overhear(self, source: "AgentNode", ticket: str) -> None:
        """A ticket is on its way; now and then somebody else shows it too."""
        clock, life = self.world.clock, source.life
        if self.world.quiet_since is None and self._rng.random() < OVERHEARD_ODDS:
            clock.after(self._rng.random() * LATE_S, source, lambda: self._show(source, ticket), life)

    def _show(self, source: "AgentNode", ticket: str) -> None:
        lease = source.core.redeemed(ticket, source.now)
        source.set_timer()
        if lease is not None:
            self.world.note(f"a stranger has opened {lease.name} at {source.name}")
            self.opened(ticket)

    def opened(self, ticket: str) -> None:
        """A session was opened with a ticket."""
        if ticket in self._opened:
            raise Violation("a ticket opens once", f"{ticket} has opened another session")
        self._opened.add(ticket)
