"""A leader's term in one job's log. Pure.

The lease gives a term, and the log keeps the highest that has spoken. Usually the lease's is higher. But the lease's
store may have been lost, and then its terms begin low again: so a leader takes one above the log's, says so in the log
(`lead`), and speaks of agents only under a term that was accepted there. Whatever an older leader says after that is
refused, whether or not the new one has expired anybody yet.

Always true: `term` is one that the log has accepted from this registry, and above which none has been accepted.
"""

from dataclasses import dataclass

from tensorhub_common.catalog.state import Catalog
from tensorhub_common.protocol.log.commands import Lead, Sender
from tensorhub_common.protocol.log.events import AnyEvent, RegistryLeads
from tensorhub_common.protocol.subjects import REGISTRY


@dataclass(slots=True)
class TermFence:
    """One registry's term in one job."""

    registry: str
    term: int | None = None
    """Under which it may speak now, or None."""
    level: int = 0
    """To which it raises the job with its next word; a lower one than the job's changes nothing."""
    _asked: int | None = None
    _asked_level: int = 0

    def ask(self, lease_term: int, catalog: Catalog) -> Lead:
        """Return the word that this registry leads; say it in the log, again until it is folded.

        Another level takes another term: what was said under this one may stand in the log already.
        """
        if self._asked is None or self._asked <= catalog.term or self._asked_level != self.level:
            self._asked = max(lease_term, catalog.term + 1, (self._asked or 0) + 1)
            self._asked_level = self.level
        by = Sender(REGISTRY, self._asked, 0)
        return Lead(by=by, registry=self.registry, term=self._asked, level=self._asked_level)

    def is_due(self, catalog: Catalog) -> bool:
        """Tell whether `ask` is to be said: it has no term yet, or the job is to be raised."""
        return not catalog.deleted and (self.term is None or catalog.level < self.level)

    def begin(self, lease_term: int) -> None:
        """Nobody has spoken in this log yet, so that no older leader is to be refused: the lease's term is enough."""
        self.term = self._asked = lease_term
        self._asked_level = 0

    def drop(self) -> None:
        """It leads no more."""
        self.term = self._asked = None

    def see(self, event: AnyEvent) -> None:
        """Take the outcome of a command that was folded."""
        if not isinstance(event, RegistryLeads):
            return
        is_mine = event.registry == self.registry and event.term == self._asked
        self.term = event.term if is_mine else None
