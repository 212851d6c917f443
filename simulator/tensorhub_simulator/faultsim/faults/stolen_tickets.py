"""Stolen tickets: a stranger has seen a reader's ticket, and shows it to the source as well, sooner or later.

A ticket is good once, for the process that shows it first. So a read may lose its source to a stranger.
"""

from typing import Final

from tensorhub_simulator.faultsim.models.host import AgentHost
from tensorhub_simulator.faultsim.models.job import Job
from tensorhub_simulator.faultsim.observations import TicketRedeemed, TicketSent

OVERHEARD_ODDS: Final = 0.1
LATE_S: Final = 4.0


class StolenTickets:
    """Shows tickets of one job's leases once more."""

    def __init__(self, job: Job) -> None:
        """Watch the tickets that are sent."""
        self.job = job
        self._rng = job.stream("fault", "stolen-ticket")
        job.subscribe(TicketSent, self._overhear)

    def _overhear(self, sent: TicketSent) -> None:
        source = self.job.hosts[sent.agent]
        life = source.life
        if not self.job.is_quiet and self._rng.random() < OVERHEARD_ODDS:
            late_s = self._rng.random() * LATE_S
            self.job.clock.after(late_s, source, lambda: self._show(source, sent.ticket), life)

    def _show(self, source: AgentHost, ticket: str) -> None:
        lease = source.core.redeemed(ticket, source.now)
        source.set_timer()
        if lease is not None:
            self.job.log_line(f"a stranger has opened {lease.name} at {source.name}")
            self.job.observe(TicketRedeemed(ticket))
