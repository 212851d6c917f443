"""A leader's term in one job's log. Pure.

The lease gives a term, and the log keeps the highest one. The lease's is usually higher, but its store may have been
lost, and then its terms begin low again. A leader therefore takes a term above the log's, appends it (`lead`), and
expires agents only under a term that the log has accepted. Each later command of an older leader is refused, whether or
not the new one has expired an agent yet.

Invariant: the log has accepted `term` from this registry, and has accepted no higher one.
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
    """The term under which it may expire agents now, or None."""
    level: int = 0
    """The level to which its next claim raises the job; a lower one than the job's changes nothing."""
    _asked: int | None = None
    _asked_level: int = 0

    def ask(self, lease_term: int, catalog: Catalog) -> Lead:
        """Return the command that this registry leads, to be appended until it is folded.

        Another level takes another term: a command with this one may be in the log already.
        """
        if self._asked is None or self._asked <= catalog.term or self._asked_level != self.level:
            self._asked = max(lease_term, catalog.term + 1, (self._asked or 0) + 1)
            self._asked_level = self.level
        by = Sender(REGISTRY, self._asked, 0)
        return Lead(by=by, registry=self.registry, term=self._asked, level=self._asked_level)

    def is_due(self, catalog: Catalog) -> bool:
        """Tell whether to append `ask`: this registry has no term yet, or the job is to be raised."""
        return not catalog.deleted and (self.term is None or catalog.level < self.level)

    def begin(self, lease_term: int) -> None:
        """Take the lease's term: the log is empty, so no older leader is to be refused."""
        self.term = self._asked = lease_term
        self._asked_level = 0

    def drop(self) -> None:
        """End: this registry does not lead any longer."""
        self.term = self._asked = None

    def see(self, event: AnyEvent) -> None:
        """Take the outcome of a command that was folded."""
        if not isinstance(event, RegistryLeads):
            return
        is_mine = event.registry == self.registry and event.term == self._asked
        self.term = event.term if is_mine else None
