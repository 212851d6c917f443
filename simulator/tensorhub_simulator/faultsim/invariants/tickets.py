"""A ticket opens one session: that of the process which shows it first."""

from tensorhub_simulator.engine.violation import Violation
from tensorhub_simulator.faultsim.env import Env
from tensorhub_simulator.faultsim.observations import TicketRedeemed


class TicketRule:
    """Knows which tickets have opened a session."""

    def __init__(self, env: Env) -> None:
        """Begin with none."""
        self._opened: set[str] = set()
        env.subscribe(TicketRedeemed, self._on_redeemed)

    def _on_redeemed(self, redeemed: TicketRedeemed) -> None:
        if redeemed.ticket in self._opened:
            raise Violation("a ticket opens once", f"{redeemed.ticket} has opened another session")
        self._opened.add(redeemed.ticket)
