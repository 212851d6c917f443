"""The table of leases: which readers may read which shard of this agent. Pure.

A lease keeps a shard's memory unchanged while a reader reads it: `unpublish` waits for the open leases or breaks them.
A ticket opens a transport once. A lease holds only while it is open here, so a reader that asks after its last byte
learns whether the memory was the requested version all the time.

A shard that is being filled also grants leases, on the version that it will hold (`coming`), to readers of later turns.
It announces which pieces are there and verified. Readers may ask for these pieces and for no others. When the shard has
all pieces, the leases continue as those of a ready shard. When its filling is given up, or decided anew, the leases are
broken before the memory is used again.

A reader of any turn may have a lease that counts on promises. Of the pieces that are not there yet, it waits only for
those that are promised. A shard promises only pieces for which it does not itself wait on another shard.

A shard that is filled by a transfer program announces its pieces to readers of any layout and program. It announces
units to readers that use the same program. Only such a reader may count on promises, because the units of another
program are other bytes.

`refuse_ready`, `refuse_filling` and `refuse_for_room` return the reason against a requested lease in words, or None.

Invariants:
- A reader with a lease reads exactly the version that was asked for.
- No reader gets a lease by which it could wait for itself, over however many others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from tensorhub_agent.leases.delta_store import PatchOffer
from tensorhub_agent.leases.lease import LEASE_TRANSITIONS, Lease, LeaseOffer, LeaseState, LeaseTransition
from tensorhub_agent.leases.reader_load import reader_of
from tensorhub_agent.primitives.deadlines import DeadlineHeap
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.primitives.program_units import PieceCompletion
from tensorhub_agent.primitives.ranges import clear_marks, set_marks, split_by_marks
from tensorhub_common.protocol.heartbeat import ReaderLoad
from tensorhub_common.protocol.leases import DIGESTS_PAGE_PIECES, LeaseGrant, LeaseRefusal, LeaseRequest
from tensorhub_common.protocol.log.commands import NO_ROOT
from tensorhub_common.protocol.plans import ReadPriority, Transport, has_priority
from tensorhub_common.protocol.ranges import Range

READERS_MAX: Final = 256
"""A shard serves at most this many readers at once."""

LEASES_OF_ONE_MAX: Final = 64
"""One agent has at most this many of them, so that one that only asks leaves room for the others."""


def is_asked_for(coming: LeaseOffer, ask: LeaseRequest) -> bool:
    """Tell whether what a shard is being filled with is what is asked for. A reader by a program may know no root."""
    if coming.version != ask.version:
        return False
    return coming.root == ask.root or (ask.units and None in (coming.root, ask.root))


def refuse_ready(offered: LeaseOffer, ask: LeaseRequest) -> str | None:
    """Tell why what stands ready is not what is asked for."""
    if ask.root is not None and ask.root != offered.root:
        return f"the shard holds other bytes than version {ask.version} has by the log"
    if offered.version is not None and offered.version != ask.version:
        return f"the shard holds version {offered.version}, not {ask.version}"
    if offered.version is None and (ask.root is None or ask.root == NO_ROOT):
        # Only a root of real digests says that these are the bytes of the version that the log has numbered meanwhile.
        return "the shard's publication has no number yet"
    return None


def refuse_filling(coming: LeaseOffer, ask: LeaseRequest, program: str | None) -> str | None:
    """Tell why the reader may not wait for what a shard is being filled with, by `program` if it goes by one."""
    assert coming.turn is not None
    if ask.promises and ask.program != program:
        return "the shard is not filled by the program by which the reader goes"
    if not ask.promises and not has_priority(coming.turn, ask.turn):
        return "the shard is being filled, and its turn is not earlier than the reader's"
    if coming.units is not None and not ask.units:
        return "the shard is filled by a program: what its pieces hash to is not known yet"
    return None


def refuse_for_room(offered: LeaseOffer, agent: str) -> str | None:
    """Tell why there is no room for another lease of this agent."""
    if len(offered.leases) >= READERS_MAX:
        return f"the shard has {READERS_MAX} readers already"
    if sum(lease.reader.startswith(f"{agent}/") for lease in offered.leases.values()) >= LEASES_OF_ONE_MAX:
        return f"agent {agent!r} has {LEASES_OF_ONE_MAX} leases on the shard already"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLimits:
    """How long a lease lasts without a word of its reader."""

    ticket_s: float = 5.0
    """A ticket that was not used within this time is void, and its lease over."""
    hold_s_max: float = 30.0
    """The same where the reader has many sources, and asks again before. A reader that is killed meanwhile keeps
    `unpublish` waiting for as long."""
    silence_s_max: float = 10.0
    """A reader that renewed nothing for this long has lost its lease. It renews each second on the data path."""


DEFAULT_LIMITS: Final = LeaseLimits()


class PromiseChange(msgspec.Struct, frozen=True):
    """What a shard promises from now on, and no more, and the leases whose readers are to hear of it."""

    leases: tuple[str, ...]
    fresh: tuple[Range, ...]
    broken: tuple[Range, ...]


class LeaseTable:
    """All leases of one agent in one job. Lease names and tickets come from outside, and must be unguessable."""

    def __init__(self, limits: LeaseLimits = DEFAULT_LIMITS) -> None:
        """Begin with nothing offered."""
        self._limits = limits
        self.offers: dict[ShardKey, LeaseOffer] = {}
        self.coming: dict[ShardKey, LeaseOffer] = {}
        """Shards that are being filled."""
        self._leases: dict[str, Lease] = {}
        self._tickets: dict[str, Lease] = {}
        self._deadlines: DeadlineHeap[str] = DeadlineHeap()
        """Of each lease under way, its deadline or an earlier one: renewing one costs nothing here."""

    def names(self) -> list[str]:
        """Return the leases that are under way, by name."""
        return list(self._leases)

    def offer(self, key: ShardKey, version: int | None, root: str, digests: bytes) -> None:
        """Grant leases on the shard from now on. Readers that are in it already, or in its filling, stay in it."""
        coming = self.coming.pop(key, None)
        count = len(coming.has) if coming is not None and coming.has is not None else 0
        offered = LeaseOffer(version, root, digests, count=count or len(digests) // PIECE_DIGEST_BYTES)
        for known in (self.offers.get(key), coming):
            for lease in known.leases.values() if known is not None else ():
                lease.offered = offered
                offered.leases[lease.name] = lease
        self.offers[key] = offered

    def stop_granting(self, key: ShardKey) -> None:
        """Grant no new lease on the shard."""
        offered = self.offers.get(key)
        if offered is not None:
            offered.granting = False

    def begin_fill(
        self,
        key: ShardKey,
        version: int,
        root: str | None,
        turn: ReadPriority,
        pieces: int,
        *,
        units: PieceCompletion | None = None,
    ) -> None:
        """The shard will be filled with a version: readers of later turns may have leases, once there are digests.

        With `units`, of a program, there will be none before the end, and who reads by a program may have them at once.
        """
        assert key not in self.coming
        numbers = pieces if units is None else units.units
        has_units = bytearray(0 if units is None else numbers)
        coming = LeaseOffer(version, root, b"", turn=turn, has=bytearray(pieces), units=units, has_units=has_units)
        coming.promised = bytearray(numbers)
        self.coming[key] = coming

    def set_digests(self, key: ShardKey, digests: bytes) -> None:
        """Grant leases on a shard that is being filled: the log vouches for these digests."""
        coming = self.coming.get(key)
        if coming is not None:
            coming.digests = digests

    def pieces_available(self, key: ShardKey, pieces: Sequence[Range]) -> list[str]:
        """These pieces stand in a shard that is being filled, verified; returns the open leases, whose readers wait."""
        coming = self.coming.get(key)
        if coming is None or coming.has is None:
            return []
        set_marks(coming.has, pieces)
        return [each.name for each in coming.leases.values() if each.units is None and each.state is LeaseState.OPEN]

    def prove_units(self, key: ShardKey, units: Sequence[Range]) -> list[str]:
        """These units stand in a shard that is filled by a program; returns the open leases of who is told of units."""
        coming = self.coming.get(key)
        if coming is None:
            return []
        set_marks(coming.has_units, units)
        return [
            each.name for each in coming.leases.values() if each.units is not None and each.state is LeaseState.OPEN
        ]

    def counts_on_promises(self, key: ShardKey) -> bool:
        """Tell whether anybody waits for what the shard promises."""
        coming = self.coming.get(key)
        return coming is not None and coming.is_counted_on

    def promise(self, key: ShardKey, firm: Sequence[Range], waits: Sequence[Range]) -> PromiseChange | None:
        """The shard has `firm` pieces under way, and waits for others to get those in `waits`; the rest stays as it is.

        Returns what is news to whom; None: nothing is.
        """
        coming = self.coming.get(key)
        if coming is None:
            return None
        fresh = split_by_marks(coming.promised, firm)[1]
        broken = split_by_marks(coming.promised, waits)[0]
        set_marks(coming.promised, fresh)
        clear_marks(coming.promised, broken)
        if not fresh and not broken:
            return None
        return PromiseChange(_counting(coming), tuple(fresh), tuple(broken))

    def cede(self, key: ShardKey, pieces: Sequence[Range]) -> tuple[str, ...]:
        """The shard does not bring these over itself: it promises them no more. Returns who is to hear whose they are.

        That is everybody who counts on it, whether these were promised by then or not.
        """
        coming = self.coming.get(key)
        if coming is None:
            return ()
        clear_marks(coming.promised, pieces)
        return _counting(coming)

    def cancel_fill(self, key: ShardKey) -> list[str]:
        """The shard will not hold the version: break its leases; returns their names."""
        coming = self.coming.get(key)
        names = self._break(coming)
        self.coming.pop(key, None)
        return names

    def awaiting(self, key: ShardKey) -> int:
        """Return how many leases there are on what a shard is being filled with."""
        coming = self.coming.get(key)
        return len(coming.leases) if coming is not None else 0

    def reading(self, key: ShardKey) -> int:
        """Return how many leases on the shard are under way."""
        offered = self.offers.get(key)
        return len(offered.leases) if offered is not None else 0

    def withdraw_offer(self, key: ShardKey) -> list[str]:
        """End the offer; returns the leases that were broken by it."""
        broken = self.break_all(key)
        self.offers.pop(key, None)
        return broken

    def break_all(self, key: ShardKey) -> list[str]:
        """Break every lease on the shard; returns their names."""
        return self._break(self.offers.get(key))

    def _break(self, offered: LeaseOffer | None) -> list[str]:
        names = list(offered.leases) if offered is not None else []
        for name in names:
            self._end(self._leases[name], LeaseTransition.BROKEN)
        return names

    def grant(
        self, ask: LeaseRequest, name: str, ticket: str, endpoint: str, now: float
    ) -> LeaseGrant | LeaseRefusal | None:
        """Grant a lease if exactly what is asked for stands here and stays, or comes.

        None: it will be known soon, so the question may wait.
        """
        if ask.again:
            return self._hold(ask, endpoint, now)
        key = ShardKey(ask.model, ask.source.replica, ask.source.shard)
        coming = self.coming.get(key)
        if coming is not None and is_asked_for(coming, ask):
            return self._grant_coming(coming, ask, name, ticket, endpoint, now)
        offered = self.offers.get(key)
        if offered is None or not offered.granting:
            return LeaseRefusal(reason="the shard is not published here, or it is draining")
        why = refuse_ready(offered, ask)
        if why is not None:
            return LeaseRefusal(reason=why)
        return self._granted(offered, key, ask, name, ticket, endpoint, now)

    def _hold(self, ask: LeaseRequest, endpoint: str, now: float) -> LeaseGrant | LeaseRefusal:
        """Hold a lease for longer whose ticket was not shown yet."""
        lease = self._leases.get(ask.again)
        if lease is None or not self.is_of(ask.again, ask.reader.agent):
            return LeaseRefusal(reason="its lease is over")
        hold_s = min(ask.hold_s, self._limits.hold_s_max)
        lease.deadline = max(lease.deadline, now + hold_s)
        answer = _grant_of(lease, endpoint, hold_s)
        program = lease.units.program if lease.units is not None else None
        return msgspec.structs.replace(answer, program=program, promises=lease.is_promised)

    def _grant_coming(
        self, coming: LeaseOffer, ask: LeaseRequest, name: str, ticket: str, endpoint: str, now: float
    ) -> LeaseGrant | LeaseRefusal | None:
        """Grant a lease on what is being filled, to whom it can't be waiting for itself."""
        program = None if coming.units is None else coming.units.program
        why = refuse_filling(coming, ask, program)
        if why is not None:
            return LeaseRefusal(reason=why)
        if not coming.digests and coming.units is None:
            return None
        key = ShardKey(ask.model, ask.source.replica, ask.source.shard)
        answer = self._granted(coming, key, ask, name, ticket, endpoint, now)
        if isinstance(answer, LeaseRefusal):
            return answer
        if program is not None and ask.program == program:
            self._leases[name].units = coming.units
            answer = msgspec.structs.replace(answer, program=program)
        if not ask.promises:
            return answer
        coming.is_counted_on = self._leases[name].is_promised = True
        return msgspec.structs.replace(answer, promises=True)

    def _granted(
        self, offered: LeaseOffer, key: ShardKey, ask: LeaseRequest, name: str, ticket: str, endpoint: str, now: float
    ) -> LeaseGrant | LeaseRefusal:
        why = refuse_for_room(offered, ask.reader.agent)
        if why is not None:
            return LeaseRefusal(reason=why)
        filling = offered.has is not None
        reader = f"{ask.reader.agent}/{ask.reader.replica}/{ask.reader.shard}"
        ticket_s = max(self._limits.ticket_s, min(ask.hold_s, self._limits.hold_s_max))
        lease = Lease(name, key, reader, ticket, now + ticket_s, offered, reader_of(ask), is_told=filling)
        lease.is_mapped, lease.transport = ask.mapped, ask.transport
        offered.leases[name] = self._leases[name] = self._tickets[ticket] = lease
        self._deadlines.note(name, lease.deadline)
        return _grant_of(lease, endpoint, ticket_s)

    def page(self, name: str, first: int) -> bytes:
        """Return a page of digests for a lease that is under way, else nothing."""
        lease = self._leases.get(name)
        if lease is None or first < 0:
            return b""
        digests = lease.offered.digests
        return digests[first * PIECE_DIGEST_BYTES : (first + DIGESTS_PAGE_PIECES) * PIECE_DIGEST_BYTES]

    def patch(self, name: str, patches: PatchOffer, base: str | None) -> bytes:
        """Let a lease's reader have patches instead of pieces; returns the first page of their sizes.

        With `base` more of them are being made from there, and will be offered again.
        """
        lease = self._leases.get(name)
        if lease is not None:
            lease.base = base
            if lease.patches is None:
                lease.patches = patches
            else:
                lease.patches.grow(patches)
        return self.patch_sizes(name, 0)

    def awaiting_patches(self, name: str) -> Lease | None:
        """Return a lease for whose reader patches are being made."""
        lease = self._leases.get(name)
        return lease if lease is not None and lease.base is not None else None

    def patch_sizes(self, name: str, first: int) -> bytes:
        """Return a page of the sizes of a lease's patches, if it has any."""
        lease = self._leases.get(name)
        if lease is None or lease.patches is None or first < 0:
            return b""
        return lease.patches.page(first, DIGESTS_PAGE_PIECES)

    def is_for(self, ticket: str, agent: str) -> bool:
        """Tell whether a ticket was given to this agent; one that is unknown was given to none."""
        lease = self._tickets.get(ticket)
        return lease is not None and lease.reader.partition("/")[0] == agent

    def is_of(self, name: str, agent: str) -> bool:
        """Tell whether a lease whose ticket was not shown yet is this agent's."""
        lease = self._leases.get(name)
        return lease is not None and lease.state is LeaseState.GRANTED and self.is_for(lease.ticket, agent)

    def redeem(self, ticket: str, now: float) -> Lease | None:
        """Take a ticket, once. Returns the lease that is open now, or None for a void ticket."""
        lease = self._tickets.get(ticket)
        if lease is None or now >= lease.deadline:
            # A late one ends, with its lease, when `expire` comes to it.
            return None
        del self._tickets[ticket]
        lease.state = LEASE_TRANSITIONS[lease.state, LeaseTransition.REDEEMED]
        lease.deadline = now + self._limits.silence_s_max
        self._deadlines.note(lease.name, lease.deadline)
        return lease

    def states(self) -> list[str]:
        """Return the state of each lease under way. It may be called from another thread."""
        return [str(lease.state) for lease in list(self._leases.values())]

    def readers(self) -> list[tuple[Transport, ReaderLoad]]:
        """Return the transport and reader of each lease that costs this agent. It may be called from another thread."""
        return [(lease.transport, lease.served) for lease in list(self._leases.values()) if not lease.is_mapped]

    def renew(self, name: str, now: float) -> bool:
        """Note that the reader is alive; False when the lease is over."""
        lease = self._leases.get(name)
        if lease is None:
            return False
        lease.deadline = now + self._limits.silence_s_max
        return True

    def waits(self, name: str) -> bool:
        """Tell whether a lease's reader may wait for pieces, and so wants to hear that this agent is alive."""
        lease = self._leases.get(name)
        return lease is not None and lease.offered.has is not None

    def is_missing(self, name: str, first: int, stop: int) -> bool:
        """Tell whether a lease may not ask for all of these pieces: some don't stand there yet, or it is over."""
        lease = self._leases.get(name)
        if lease is None:
            return True
        has = lease.offered.has
        return has is not None and has.find(0, first, stop) != -1

    def lacks_units(self, name: str, origin: int, nbytes: int) -> bool:
        """Tell the same of bytes, for a lease whose reader is told of units."""
        lease = self._leases.get(name)
        if lease is None or lease.units is None:
            return True
        return lease.offered.has is not None and lease.units.spans.lacks(lease.offered.has_units, origin, nbytes)

    def holds(self, name: str) -> bool:
        """Tell whether the memory has been kept for this lease up to now."""
        lease = self._leases.get(name)
        return lease is not None and lease.state is LeaseState.OPEN

    def finish(self, name: str, how: LeaseTransition) -> ShardKey | None:
        """End a lease that is done or whose reader went. Returns the shard if this was a lease under way."""
        lease = self._leases.get(name)
        if lease is None:
            return None
        self._end(lease, how if lease.state is LeaseState.OPEN else LeaseTransition.EXPIRED)
        return lease.key

    def expire(self, now: float) -> list[Lease]:
        """End the leases whose time is over; returns them."""
        late = []
        for name in self._deadlines.due(now):
            lease = self._leases[name]
            if now >= lease.deadline:
                self._end(lease, LeaseTransition.EXPIRED)
                late.append(lease)
            else:
                self._deadlines.note(name, lease.deadline)
        return late

    def deadline(self) -> float | None:
        """Say when `expire` is wanted; leases that were renewed since it was called may leave it nothing to do."""
        return self._deadlines.earliest()

    def check(self) -> None:
        """Raise AssertionError when the indexes disagree."""
        for name, lease in self._leases.items():
            assert lease.state in (LeaseState.GRANTED, LeaseState.OPEN), f"lease {name} is kept though {lease.state}"
            assert lease.offered in (self.offers.get(lease.key), self.coming.get(lease.key))
            assert lease.offered.leases[name] is lease
            assert (lease.ticket in self._tickets) == (lease.state is LeaseState.GRANTED)
            due = self._deadlines.of(name)
            assert due is not None, f"lease {name} never ends"
            assert due <= lease.deadline, f"lease {name} would outlive its deadline"

    def _end(self, lease: Lease, how: LeaseTransition) -> None:
        lease.state = LEASE_TRANSITIONS[lease.state, how]
        self._tickets.pop(lease.ticket, None)
        self._deadlines.forget(lease.name)
        del self._leases[lease.name]
        del lease.offered.leases[lease.name]


def _grant_of(lease: Lease, endpoint: str, ticket_s: float) -> LeaseGrant:
    digests = lease.offered.digests
    return LeaseGrant(
        lease=lease.name,
        ticket=lease.ticket,
        ticket_s=ticket_s,
        endpoint=endpoint,
        pieces=len(digests) // PIECE_DIGEST_BYTES,
        digests=digests[: DIGESTS_PAGE_PIECES * PIECE_DIGEST_BYTES],
        filling=lease.offered.has is not None,
        mapped=lease.is_mapped,
    )


def _counting(coming: LeaseOffer) -> tuple[str, ...]:
    """Return the open leases that count on what a shard promises."""
    leases = coming.leases.values()
    return tuple(each.name for each in leases if each.is_promised and each.state is LeaseState.OPEN)
