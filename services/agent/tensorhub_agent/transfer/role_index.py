"""The sources of a read by their roles, and the next deadline of any source: kept up to date, and never searched. Pure.

A read may have thousands of sources, and most events concern one of them. A source that changes is noted as *touched*,
and `settle` counts the touched sources anew. So a query for idle or busy sources costs as many steps as it has results.

Invariants, once it has settled (`check` asserts them):
- Each role has exactly the sources that are in it.
- `in_flight_bytes` is the sum over all sources.
- For each source, the heap has an entry that is not later than the source's deadline.
"""

from collections.abc import Iterable
from enum import IntFlag
from heapq import heappop, heappush, heapreplace
from typing import Final

from tensorhub_agent.primitives.deadlines import NEVER
from tensorhub_agent.primitives.transport_traits import reads_memory
from tensorhub_agent.transfer.limits import TransferLimits
from tensorhub_agent.transfer.source import Source, SourcePhase
from tensorhub_agent.transfer.timeouts import deadline_of
from tensorhub_common.protocol.ranges import Range


class SourceRole(IntFlag):
    """What a source is in the eyes of the read; it may be several of these."""

    LIVE = 1
    """Pieces may be given to it."""
    OPENING = 2
    """Its lease or its transport is awaited, or its turn to be asked."""
    LATE = 4
    """The same, of one that crosses for the site."""
    ASKING = 8
    """It is being asked for a lease, or let in, and others wait for that."""
    INSIDE = 16
    """It takes one of the places of those that have a transport: not while it waits for folds, whose parts may be with
    those who wait for a place."""
    SETTLED = 32
    """Its lease is there."""
    CLOSING = 64
    BUSY = 128
    """It is open, and has something to be asked for, or under way."""
    IN_FLIGHT = 256
    """It has something under way, whatever its phase is."""
    IDLE = 512
    """It could be asked for pieces, and there are none for it."""
    GIVING = 1024
    """Of what it has to be asked for yet others may take some."""
    SLOWABLE = 2048
    """It brings something just now, and could be closed for being slow."""
    CROSSING = 4096
    """It is live, and crosses for the site."""
    AWAITING_FOLD = 8192
    """It has pieces that wait for their fold."""
    NEW_AWAITING_FOLD = 16384
    """It waits for folds that were not asked about yet."""
    PROMISING = 32768
    """It says what it promises."""
    HELD = 65536
    """Its lease is there, and its transport has to wait."""


LIVE: Final = int(SourceRole.LIVE)
OPENING: Final = int(SourceRole.OPENING)
LATE: Final = int(SourceRole.LATE)
ASKING: Final = int(SourceRole.ASKING)
INSIDE: Final = int(SourceRole.INSIDE)
SETTLED: Final = int(SourceRole.SETTLED)
CLOSING: Final = int(SourceRole.CLOSING)
BUSY: Final = int(SourceRole.BUSY)
IN_FLIGHT: Final = int(SourceRole.IN_FLIGHT)
IDLE: Final = int(SourceRole.IDLE)
GIVING: Final = int(SourceRole.GIVING)
SLOWABLE: Final = int(SourceRole.SLOWABLE)
CROSSING: Final = int(SourceRole.CROSSING)
AWAITING_FOLD: Final = int(SourceRole.AWAITING_FOLD)
NEW_AWAITING_FOLD: Final = int(SourceRole.NEW_AWAITING_FOLD)
PROMISING: Final = int(SourceRole.PROMISING)
HELD: Final = int(SourceRole.HELD)
BY_LAYOUT: Final = IDLE | GIVING | SLOWABLE

SourcesByNumber = dict[int, Source]
"""By number. Those of a role stand in the order in which they came to it."""


def _roles(source: Source) -> int:
    """Return what a source is now."""
    phase, crosses = source.phase, source.share.crosses
    if phase is SourcePhase.CLOSED:
        return 0
    roles = IN_FLIGHT if source.in_flight else 0
    if source.is_inside and source.is_asked and not (crosses or source.waits_for_folds):
        roles |= INSIDE
    if phase is SourcePhase.CLOSING:
        return roles | CLOSING
    roles |= _roles_of_pieces(source)
    if not source.is_suspect:
        roles |= LIVE | CROSSING if crosses else LIVE
    if phase is SourcePhase.OPEN:
        return roles | SETTLED | _roles_of_open(source, roles)
    if phase is SourcePhase.HELD:
        return roles | SETTLED | HELD
    if crosses:
        return roles | LATE
    return roles | OPENING | ASKING if source.is_asked else roles | OPENING


def _roles_of_pieces(source: Source) -> int:
    roles = GIVING if source.queue or source.awaiting_source else 0
    if source.awaiting_fold:
        roles |= AWAITING_FOLD | NEW_AWAITING_FOLD if source.new_awaiting_fold else AWAITING_FOLD
    return roles if source.promised is None else roles | PROMISING


def _roles_of_open(source: Source, roles: int) -> int:
    busy = BUSY if source.queue or source.in_flight else 0
    if source.confirming:
        return busy
    if source.in_flight:
        return busy if reads_memory(source.share.transport) else busy | SLOWABLE
    return busy if roles & GIVING else IDLE


class RoleIndex:
    """The sources of one read by their roles."""

    def __init__(self, limits: TransferLimits) -> None:
        """Begin with none; nothing is expected of an open one before the read is `running`."""
        self.running = False
        self.touched: SourcesByNumber = {}
        self.fresh: SourcesByNumber = {}
        """Those that have settled since the read last got on."""
        self.in_flight_bytes = 0
        self.offered: list[Range] = []
        """What was loose when that was last offered to all who are idle."""
        self.offered_crossing = 0
        """How many were crossing then."""
        self.limits = limits
        self._by_role: dict[int, SourcesByNumber] = {int(role): {} for role in SourceRole}
        self._by_layout: dict[int, dict[str | None, SourcesByNumber]] = {IDLE: {}, GIVING: {}, SLOWABLE: {}}
        self.by_number: SourcesByNumber = {}
        self._heap: list[tuple[float, int]] = []

    def add(self, source: Source) -> None:
        """Take a new source."""
        self.by_number[source.number] = source
        source.touched, source.roles, source.counted_bytes, source.look_at = self.touched, 0, 0, NEVER
        source.mark_changed()

    def begins(self) -> None:
        """Expect something of open sources from now on."""
        self.running = True
        self.refresh()

    def refresh(self) -> None:
        """Look at all live sources: what holds for all of them has changed."""
        self.settle()
        self.touched.update(self._by_role[LIVE])

    # The sources of a role.

    def of(self, role: int) -> SourcesByNumber:
        """Return the sources of a role."""
        return self._by_role[role]

    def count(self, role: int) -> int:
        """Return how many there are."""
        return len(self._by_role[role])

    def of_layout(self, role: int, layout: str | None) -> SourcesByNumber:
        """Return those of a role that have a layout; None: all, for one who takes from whatever layout."""
        if layout is None:
            return self._by_role[role]
        return self._by_layout[role].get(layout, {})

    def idle_of(self, kind: str | None) -> SourcesByNumber:
        """Return the idle ones of a takeover group (`Source.takeover_group`)."""
        return self._by_layout[IDLE].get(kind, {})

    def idle_kinds(self) -> Iterable[str | None]:
        """Return the kinds of which some are idle."""
        return self._by_layout[IDLE]

    @property
    def quiet(self) -> bool:
        """Whether no byte can be written into the destination any more.

        What a source has flying is forgotten only when it has answered for it or is closed.
        """
        self.settle()
        return not self._by_role[IN_FLIGHT]

    @property
    def is_settled(self) -> bool:
        """Whether the leases are there: of a group's crossers one may come late, as long as anybody is open."""
        self.settle()
        if self._by_role[CLOSING] or self._by_role[OPENING]:
            return False
        return bool(self._by_role[SETTLED]) or not self._by_role[LATE]

    # Keeping it.

    def settle(self) -> None:
        """Count those anew that something has happened to."""
        if not self.touched:
            return
        heap = self._heap
        for number, source in self.touched.items():
            self.in_flight_bytes += source.in_flight_bytes - source.counted_bytes
            source.counted_bytes = source.in_flight_bytes
            roles = _roles(source)
            if roles != source.roles:
                self._move(source, roles)
            due = self._due(source)
            if due < source.look_at:
                source.look_at = due
                heappush(heap, (due, number))
        self.fresh.update(self.touched)
        self.touched.clear()

    def _move(self, source: Source, roles: int) -> None:
        changed, number = roles ^ source.roles, source.number
        source.roles = roles
        while changed:
            role = changed & -changed
            changed ^= role
            if roles & role:
                self._by_role[role][number] = source
            else:
                del self._by_role[role][number]
            if role & BY_LAYOUT:
                self._move_layout(source, role, joins=bool(roles & role))

    def _move_layout(self, source: Source, role: int, *, joins: bool) -> None:
        kind = source.takeover_group if role == IDLE else source.layout
        all_of_it = self._by_layout[role]
        if joins:
            all_of_it.setdefault(kind, {})[source.number] = source
            return
        del all_of_it[kind][source.number]
        if not all_of_it[kind]:
            del all_of_it[kind]

    # Deadlines.

    def _due(self, source: Source) -> float:
        """Return when a source is left; before the read begins nothing is expected of an open one."""
        if not self.running and source.phase is SourcePhase.OPEN:
            return NEVER
        return deadline_of(source)

    def due_after(self) -> float:
        """Return a moment before which no source times out. It costs less than to know when the first one does."""
        if self.touched:
            self.settle()
        return self._heap[0][0] if self._heap else NEVER

    def next_due(self) -> float:
        """Return when the first patience ends. What has moved further away meanwhile is looked at only now."""
        self.settle()
        heap = self._heap
        while heap:
            when, number = heap[0]
            source = self.by_number[number]
            due = self._due(source)
            if when == source.look_at == due:
                return when
            if when == source.look_at and due < NEVER:
                source.look_at = due
                heapreplace(heap, (due, number))
                continue
            if when == source.look_at:
                source.look_at = NEVER
            heappop(heap)
        return NEVER

    def overdue(self, now: float) -> list[Source]:
        """Return the sources whose deadline has passed, by number."""
        found: SourcesByNumber = {}
        while self.due_after() <= now and self.next_due() <= now:
            _, number = heappop(self._heap)
            source = self.by_number[number]
            source.look_at = NEVER
            found[number] = source
        # They count as touched: each is handled now, and otherwise would never be looked at again.
        self.touched.update(found)
        return [found[number] for number in sorted(found)]

    def check(self) -> None:
        """Raise AssertionError unless everybody is counted as what it is."""
        self.settle()
        for role, sources in self._by_role.items():
            right = {number for number, source in self.by_number.items() if _roles(source) & role}
            assert sources.keys() == right, (
                f"{SourceRole(role).name} are {sorted(right)}, and {sorted(sources)} are known"
            )
        assert self.in_flight_bytes == sum(source.in_flight_bytes for source in self.by_number.values())
        due = min((self._due(source) for source in self.by_number.values()), default=NEVER)
        assert self.next_due() == due, f"somebody is due at {due}, and {self.next_due()} is known"


def by_number(sources: SourcesByNumber) -> list[Source]:
    """Return sources by their numbers."""
    return [sources[number] for number in sorted(sources)]
