"""Leases: which readers may read which shard of this agent. Pure.

A lease keeps a shard's memory as it is while somebody reads it: `unpublish` waits for the open ones or breaks them. A
ticket opens a transport once. A lease holds only while it is open here, so a reader that asks after its last byte
learns whether the memory was what it asked for all the time.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from tensorhub_agent.effects import Key
from tensorhub_common.digests import PIECE_DIGEST_BYTES
from tensorhub_common.wire.commands import NO_ROOT
from tensorhub_common.wire.transfer import DIGESTS_PAGE_PIECES, LeaseAsk, LeaseGrant, LeaseRefusal

TICKET_S: Final = 5.0
"""A ticket that was not shown within this is void, and its lease over."""

SILENCE_S_MAX: Final = 10.0
"""A reader that renewed nothing for this long has lost its lease. It renews each second on the data path."""

READERS_MAX: Final = 256
"""A shard serves at most so many readers at once."""


class LeaseState(StrEnum):
    """How far a lease is."""

    GRANTED = "granted"
    OPEN = "open"
    ENDED = "ended"
    BROKEN = "broken"


class LeaseMove(StrEnum):
    """What happens to a lease."""

    REDEEMED = "redeemed"
    DONE = "done"
    READER_GONE = "reader-gone"
    EXPIRED = "expired"
    BROKEN = "broken"


LEASE_MOVES: Final = {
    (LeaseState.GRANTED, LeaseMove.REDEEMED): LeaseState.OPEN,
    (LeaseState.GRANTED, LeaseMove.EXPIRED): LeaseState.ENDED,
    (LeaseState.GRANTED, LeaseMove.BROKEN): LeaseState.BROKEN,
    (LeaseState.OPEN, LeaseMove.DONE): LeaseState.ENDED,
    (LeaseState.OPEN, LeaseMove.READER_GONE): LeaseState.ENDED,
    (LeaseState.OPEN, LeaseMove.EXPIRED): LeaseState.BROKEN,
    (LeaseState.OPEN, LeaseMove.BROKEN): LeaseState.BROKEN,
}


@dataclass(slots=True)
class Lease:
    """One reader's lease on one shard."""

    name: str
    key: Key
    reader: str
    ticket: str
    deadline: float
    state: LeaseState = LeaseState.GRANTED


@dataclass(slots=True)
class Offered:
    """A shard that stands ready. `version` is None while its publication has not been numbered yet."""

    version: int | None
    root: str
    digests: bytes
    granting: bool = True
    leases: dict[str, Lease] = field(default_factory=dict)


class LeaseTable:
    """All leases of one agent in one job. Lease names and tickets come from outside, and must be unguessable."""

    def __init__(self) -> None:
        """Begin with nothing offered."""
        self.offers: dict[Key, Offered] = {}
        self._leases: dict[str, Lease] = {}
        self._tickets: dict[str, Lease] = {}

    def offer(self, key: Key, version: int | None, root: str, digests: bytes) -> None:
        """Grant leases on the shard from now on. Readers that are in it already stay in it."""
        known = self.offers.get(key)
        leases = known.leases if known is not None else {}
        self.offers[key] = Offered(version, root, digests, leases=leases)

    def stop(self, key: Key) -> None:
        """Grant no new lease on the shard."""
        offered = self.offers.get(key)
        if offered is not None:
            offered.granting = False

    def reading(self, key: Key) -> int:
        """Return how many leases on the shard are under way."""
        offered = self.offers.get(key)
        return len(offered.leases) if offered is not None else 0

    def forget(self, key: Key) -> list[str]:
        """End the offer; returns the leases that were broken by it."""
        broken = self.break_all(key)
        self.offers.pop(key, None)
        return broken

    def break_all(self, key: Key) -> list[str]:
        """Break every lease on the shard; returns their names."""
        offered = self.offers.get(key)
        names = list(offered.leases) if offered is not None else []
        for name in names:
            self._end(self._leases[name], LeaseMove.BROKEN)
        return names

    def grant(self, ask: LeaseAsk, name: str, ticket: str, endpoint: str, now: float) -> LeaseGrant | LeaseRefusal:
        """Grant a lease if exactly what is asked for stands here and stays."""
        key = Key(ask.model, ask.source.replica, ask.source.shard)
        offered = self.offers.get(key)
        if offered is None or not offered.granting:
            return LeaseRefusal(reason="the shard is not published here, or it is draining")
        if ask.root is not None and ask.root != offered.root:
            return LeaseRefusal(reason=f"the shard holds other bytes than version {ask.version} has by the log")
        if offered.version is not None and offered.version != ask.version:
            return LeaseRefusal(reason=f"the shard holds version {offered.version}, not {ask.version}")
        if offered.version is None and (ask.root is None or ask.root == NO_ROOT):
            # Only a root of real digests says that these are the bytes of the version that the log has numbered
            # meanwhile.
            return LeaseRefusal(reason="the shard's publication has no number yet")
        if len(offered.leases) >= READERS_MAX:
            return LeaseRefusal(reason=f"the shard has {READERS_MAX} readers already")
        lease = Lease(name, key, f"{ask.reader.agent}/{ask.reader.replica}/{ask.reader.shard}", ticket, now + TICKET_S)
        offered.leases[name] = self._leases[name] = self._tickets[ticket] = lease
        page = offered.digests[: DIGESTS_PAGE_PIECES * PIECE_DIGEST_BYTES]
        pieces = len(offered.digests) // PIECE_DIGEST_BYTES
        return LeaseGrant(lease=name, ticket=ticket, ticket_s=TICKET_S, endpoint=endpoint, pieces=pieces, digests=page)

    def page(self, name: str, first: int) -> bytes:
        """Return a page of digests for a lease that is under way, else nothing."""
        lease = self._leases.get(name)
        if lease is None or first < 0:
            return b""
        digests = self.offers[lease.key].digests
        return digests[first * PIECE_DIGEST_BYTES : (first + DIGESTS_PAGE_PIECES) * PIECE_DIGEST_BYTES]

    def redeem(self, ticket: str, now: float) -> Lease | None:
        """Take a ticket, once. Returns the lease that is open now, or None for a void ticket."""
        lease = self._tickets.get(ticket)
        if lease is None or now >= lease.deadline:
            # A late one ends, with its lease, when `expire` comes to it.
            return None
        del self._tickets[ticket]
        lease.state = LEASE_MOVES[lease.state, LeaseMove.REDEEMED]
        lease.deadline = now + SILENCE_S_MAX
        return lease

    def states(self) -> list[str]:
        """Return the state of each lease under way. It may be called from another thread."""
        return [str(lease.state) for lease in list(self._leases.values())]

    def renew(self, name: str, now: float) -> bool:
        """Note that the reader is alive; False when the lease is over."""
        lease = self._leases.get(name)
        if lease is None:
            return False
        lease.deadline = now + SILENCE_S_MAX
        return True

    def holds(self, name: str) -> bool:
        """Tell whether the memory has been kept for this lease up to now."""
        lease = self._leases.get(name)
        return lease is not None and lease.state is LeaseState.OPEN

    def finish(self, name: str, how: LeaseMove) -> Key | None:
        """End a lease that is done or whose reader went. Returns the shard if this was a lease under way."""
        lease = self._leases.get(name)
        if lease is None:
            return None
        self._end(lease, how if lease.state is LeaseState.OPEN else LeaseMove.EXPIRED)
        return lease.key

    def expire(self, now: float) -> list[Lease]:
        """End the leases whose time is over; returns them."""
        late = [lease for lease in self._leases.values() if now >= lease.deadline]
        for lease in late:
            self._end(lease, LeaseMove.EXPIRED)
        return late

    def deadline(self) -> float | None:
        """Say when `expire` has something to do."""
        return min((lease.deadline for lease in self._leases.values()), default=None)

    def check(self) -> None:
        """Raise AssertionError when the indexes disagree."""
        for name, lease in self._leases.items():
            assert lease.state in (LeaseState.GRANTED, LeaseState.OPEN), f"lease {name} is kept though {lease.state}"
            assert self.offers[lease.key].leases[name] is lease
            assert (lease.ticket in self._tickets) == (lease.state is LeaseState.GRANTED)

    def _end(self, lease: Lease, how: LeaseMove) -> None:
        lease.state = LEASE_MOVES[lease.state, how]
        self._tickets.pop(lease.ticket, None)
        del self._leases[lease.name]
        del self.offers[lease.key].leases[lease.name]
