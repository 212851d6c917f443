"""When each source of a read is asked for its lease, and when its transport is opened. Pure.

A read has the leases of all its sources before it overwrites anything, so each source keeps its memory until the read
comes to it. A transport costs more than a lease (descriptors, buffers, a renewal each second). So of many sources some
have a transport, and of the others the lease is held. A source that has brought its part is closed, and the next one
gets a transport. docs/design/protocol/many-sources.md has what may come in between.

Invariants:
- At most `opening_max` sources are being asked for a lease or a transport.
- At most `transports_max` sources have a transport or are closing one. Two kinds are not counted, since sources behind
  them might wait for ever: crossers, and sources that wait for folds of which other sources have parts.
- The source whose lease came first gets its transport first.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tensorhub_agent.transfer.role_index import ASKING, CLOSING, HELD, IDLE, INSIDE, RoleIndex, by_number
from tensorhub_agent.transfer.source import Source, SourcePhase
from tensorhub_common.protocol.plans import Share


@dataclass(slots=True, eq=False)
class Admission:
    """The sources of one read that wait for a turn."""

    _crossing: list[Source] = field(default_factory=list)
    _unasked: deque[Source] = field(default_factory=deque)
    _held: deque[Source] = field(default_factory=deque)
    """Both in order, and among them some that were given up meanwhile."""

    def add(self, source: Source) -> None:
        """A new source waits to be asked."""
        source.is_asked = source.is_inside = False
        (self._crossing if source.share.crosses else self._unasked).append(source)

    def hold(self, source: Source) -> None:
        """The source's lease is there, and its transport has to wait."""
        source.leased()
        self._held.append(source)

    @property
    def are_awaited(self) -> bool:
        """Whether any source waits for its turn."""
        return bool(self._held or self._unasked or self._crossing)

    def admit(self, index: RoleIndex, now: float) -> list[int]:
        """Return the sources whose transport is opened now, of those whose lease is held."""
        entering: list[int] = []
        limits = index.limits
        index.settle()
        room = min(limits.transports_max - index.count(INSIDE), limits.opening_max - index.count(ASKING))
        while self._held and room > 0:
            source = self._held.popleft()
            if source.phase is SourcePhase.HELD:
                source.request_transport(now)
                entering.append(source.number)
                room -= 1
        return entering

    def request_leases(self, index: RoleIndex, now: float) -> Iterable[tuple[int, Share, bool]]:
        """Yield the sources that are asked now for a lease, and whether it is only to be held."""
        index.settle()
        turns, self._crossing = [each for each in self._crossing if each.phase is SourcePhase.OPENING], []
        room, places = (
            index.limits.opening_max - index.count(ASKING),
            index.limits.transports_max - index.count(INSIDE),
        )
        while self._unasked and room > 0:
            source = self._unasked.popleft()
            if source.phase is SourcePhase.OPENING:
                turns.append(source)
                room -= 1
        for source in sorted(turns, key=lambda each: each.number):
            inside = places > 0 or source.share.crosses
            places -= not source.share.crosses
            source.request_lease(now, inside=inside)
            yield source.number, source.share, not inside

    def leaving(self, index: RoleIndex) -> list[Source]:
        """Return sources that have brought their part and whose transport another source needs."""
        wanted = index.count(HELD) - index.count(CLOSING)
        if wanted <= 0 or not index.count(IDLE) or index.count(INSIDE) < index.limits.transports_max:
            return []
        return [source for source in by_number(index.of(IDLE)) if source.is_finished][:wanted]
