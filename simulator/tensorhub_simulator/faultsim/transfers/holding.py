"""A lease that its reader holds until it opens the transport, as `leasing.py` of the agent keeps it."""

from typing import TYPE_CHECKING, Final

from tensorhub_agent.core.effects import SourceHeld
from tensorhub_common.protocol.plans import LeaseAsk, LeaseGrant, LeaseRefusal

if TYPE_CHECKING:
    from tensorhub_simulator.faultsim.transfers.source_session import Link

HOLD_S: Final = 3.0
HOLD_TIMES: Final = 3


class Holding:
    """What one link has instead of a transport."""

    def __init__(self, link: "Link") -> None:
        """Hold nothing yet."""
        self._link, self._clock = link, link.clock
        self._grant: LeaseGrant | None = None
        self._over = 0.0
        self.entered = False

    @property
    def holds(self) -> bool:
        """Whether there is a lease, and no transport is wanted yet."""
        return self._grant is not None

    def take(self, grant: LeaseGrant) -> None:
        """Keep a lease that was granted."""
        link = self._link
        self._grant, self._over = grant, self._clock.now + grant.ticket_s
        digests = b"" if link.program is not None else grant.digests
        link.tell(SourceHeld(link.key, link.number, digests))
        self._again_later()

    def enter(self) -> LeaseGrant | None:
        """The transport is wanted; returns the lease whose ticket is to be shown, if it is there already."""
        self.entered = True
        grant, self._grant = self._grant, None
        return grant

    def _again_later(self) -> None:
        if self._grant is not None:
            self._link.at_reader(self._grant.ticket_s / HOLD_TIMES, self._again)

    def _again(self) -> None:
        """Ask to hold it longer; what is asked or said may be lost."""
        link, grant = self._link, self._grant
        if grant is None or link.closing:
            return
        if self._clock.now >= self._over:
            self._grant = None
            link.lost("its agent did not say that it still holds the lease")
            return
        if link.source_lives and not link.reader.world.net_loses(link.reader, link.source):
            ask = link.question(hold_s=HOLD_S, again=grant.lease)
            self._clock.after(self._clock.lag(), link.source, lambda: self._asked(ask))
        self._again_later()

    def _asked(self, ask: LeaseAsk) -> None:
        link = self._link
        answer = link.source.core.lease_asked(ask, "", "", "here", link.source.now)
        link.source.set_timer()
        if answer is not None and not link.reader.world.net_loses(link.reader, link.source):
            link.at_reader(self._clock.lag(), lambda: self._answer(answer))

    def _answer(self, answer: LeaseGrant | LeaseRefusal) -> None:
        if self._grant is None:
            return
        if isinstance(answer, LeaseGrant):
            self._over = self._clock.now + answer.ticket_s
        else:
            self._grant = None
            self._link.lost(answer.reason)
