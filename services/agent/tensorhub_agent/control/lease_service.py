"""The service for one job's readers: it answers lease requests, opens memory for tickets, and records ended leases.

The core decides which reader gets a lease. `PendingLeaseRequests` holds the requests whose answer is known soon. Each
is asked again when something has happened, until its time limit.

Invariants:
- A ticket opens memory once, and only to the agent that it was given to.
- A request whose answer is known soon waits for the answer, at most `LEASE_HOLD_S`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from tensorhub_agent.control.tracer import NO_HEADERS, Tracer
from tensorhub_agent.core.agent import AgentCore
from tensorhub_agent.core.effects import AnyEffect
from tensorhub_agent.deltas.job_deltas import JobDeltas
from tensorhub_agent.leases.lease import Lease, LeaseTransition
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.primitives.transport_traits import reads_memory
from tensorhub_agent.runtime.timer import CoalescingTimer
from tensorhub_agent.storage.shard_store import JobShardStore, StoredShard
from tensorhub_agent.transports.base import LeaseOpened
from tensorhub_agent.transports.registry import TransportRegistry
from tensorhub_common.protocol.leases import LeaseAnswer, LeaseGrant, LeaseRefusal, LeaseRequest
from tensorhub_common.runtime.supervision import Supervisor


class PendingLeaseRequests:
    """The questions that wait. Nothing is done for them while there are none."""

    def __init__(self) -> None:
        """Begin with none."""
        self._waiting: list[asyncio.Event] = []

    def happened(self) -> None:
        """Let all that wait be asked again."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                each.set()

    async def answer(self, question: Callable[[], LeaseAnswer | None], bound_s: float) -> LeaseAnswer | None:
        """Return the first answer that is not None; None after the bound."""
        answer = question()
        until = asyncio.get_running_loop().time() + bound_s
        while answer is None:
            something = asyncio.Event()
            self._waiting.append(something)
            try:
                async with asyncio.timeout_at(until):
                    await something.wait()
            except TimeoutError:
                return None
            finally:
                if something in self._waiting:
                    self._waiting.remove(something)
            answer = question()
        return answer


LEASE_HOLD_S: Final = 1.0
"""A question for a lease on what is about to be filled waits for so long: less than `lease_client.LEASE_ASK_S`."""

PATCHES_HOLD_S: Final = 0.8
"""A question waits so long for a delta that is being made: a second's worth of it is some GB. Less than the above."""

_log: Final = logging.getLogger(__name__)


class LeaseService:
    """One job's readers, and the memory that they read."""

    def __init__(
        self,
        core: AgentCore,
        store: JobShardStore,
        transports: TransportRegistry,
        tracing: Tracer,
        alarm: CoalescingTimer,
        postponed: PendingLeaseRequests,
        carry_out: Callable[[list[AnyEffect]], None],
        *,
        deltas: JobDeltas,
        work: Supervisor,
        accused: Callable[[ShardKey, int, str], None],
    ) -> None:
        """`carry_out` does what the core wants, and then has the `postponed` asked again.

        `accused` takes a shard, a version and a root of which a reader got wrong bytes.
        """
        self._accused, self._work = accused, work
        self._deltas = deltas
        self._held: dict[str, float] = {}
        """Until when questions wait for a delta that is being made."""
        self._core, self._store, self._transports = core, store, transports
        self._tracing, self._alarm, self._postponed, self._carry_out = tracing, alarm, postponed, carry_out
        self._loop = asyncio.get_running_loop()

    async def asked(
        self, question: LeaseRequest, name: str, ticket: str, headers: Mapping[str, str] = NO_HEADERS
    ) -> LeaseAnswer:
        """Answer a reader's agent."""
        if question.wrong:
            if question.root is not None:
                key = ShardKey(question.model, question.source.replica, question.source.shard)
                self._accused(key, question.version, question.root)
            return LeaseRefusal(reason="its memory is looked at")
        began_ns = time.time_ns()
        held = LeaseRefusal(reason="the shard is not being filled with this version yet", is_early=True)
        try:
            answer = await self._postponed.answer(lambda: self._grant(question, name, ticket), LEASE_HOLD_S) or held
        finally:
            self._held.pop(name, None)
        self._tracing.lease_asked(question, answer, headers, began_ns)
        self._alarm.set(self._core.deadline())
        return answer

    def _grant(self, question: LeaseRequest, name: str, ticket: str) -> LeaseAnswer | None:
        if question.again and not question.hold_s:
            if self._core.leases.is_of(question.again, question.reader.agent):
                self.ended(question.again, LeaseTransition.READER_GONE)
            return LeaseRefusal(reason="its reader has let it go")
        endpoint = self._transports.endpoint(question.transport)
        if endpoint is None:
            return LeaseRefusal(reason=self._transports.lack(question.transport))
        if question.mapped and not reads_memory(question.transport):
            # Nothing over another transport would ever give the memory back.
            return LeaseRefusal(reason="memory is mapped over the transport local alone")
        if question.mapped and (why := self._why_not_lent(question)):
            return LeaseRefusal(reason=why, is_final=True)
        if self._waits_for_patches(question, name):
            return None
        answer = self._core.lease_asked(question, name, ticket, endpoint, self._loop.time())
        return self._with_patches(question, answer) if isinstance(answer, LeaseGrant) else answer

    def _waits_for_patches(self, question: LeaseRequest, name: str) -> bool:
        """Tell whether a delta for the reader is being made just now; it is waited for, but not for long."""
        if question.base is None or question.root is None or not question.awaits_patches:
            return False
        key = ShardKey(question.model, question.source.replica, question.source.shard)
        if not self._deltas.is_coming(key, question.base, question.root):
            return False
        now = self._loop.time()
        if name not in self._held:
            self._held[name] = now + PATCHES_HOLD_S
            self._work.call_at(self._held[name], self._postponed.happened, what="asking again for a delta")
        return now < self._held[name]

    def _with_patches(self, question: LeaseRequest, grant: LeaseGrant) -> LeaseGrant:
        """Offer patches with a lease on a whole shard, if there are any that lead there from what the reader holds."""
        key = ShardKey(question.model, question.source.replica, question.source.shard)
        stored = self._store.shards.get(key)
        if question.base is None or question.root is None or grant.filling or stored is None:
            return grant
        offer = self._deltas.offer(key, question.base, question.root, stored)
        if offer is None:
            return grant
        is_coming = self._deltas.is_coming(key, question.base, question.root)
        sizes = self._core.leases.patch(grant.lease, offer, question.base if is_coming else None)
        return msgspec.structs.replace(grant, patch_sizes=sizes, patches_coming=is_coming)

    def look_for_patches(self, lease: str) -> bool:
        """Offer a lease's reader what has been made since; tells whether more is coming."""
        awaiting = self._core.leases.awaiting_patches(lease)
        root = awaiting.offered.root if awaiting is not None else None
        if awaiting is None or awaiting.base is None or root is None:
            return False
        stored = self._store.shards.get(awaiting.key)
        is_coming = self._deltas.is_coming(awaiting.key, awaiting.base, root)
        offer = None if stored is None else self._deltas.offer(awaiting.key, awaiting.base, root, stored)
        if offer is not None:
            self._core.leases.patch(lease, offer, awaiting.base if is_coming else None)
        return is_coming

    def _why_not_lent(self, question: LeaseRequest) -> str:
        """Return why the reader's worker can't map the shard, and what it can do; empty where it can."""
        stored = self._store.shards.get(ShardKey(question.model, question.source.replica, question.source.shard))
        if stored is None:
            return ""
        if stored.segment.origin:
            return "it is a copy in a file on disk, which is not mapped by workers"
        here = stored.segment.device
        if here == question.device:
            return ""
        return (
            f"it is in the memory of {here or 'the host'}, and the reader maps that of {question.device or 'the host'} "
            f"alone: register the reader with memory={here or 'host'!r}, or with install='in-place', which copies"
        )

    def redeem(self, ticket: str, reader: str) -> LeaseOpened | None:
        """Take a ticket from the transport, once, of the agent that it was given to."""
        if not self._core.leases.is_for(ticket, reader):
            return None
        lease = self._core.redeemed(ticket, self._loop.time())
        self._alarm.set(self._core.deadline())
        if lease is None:
            return None
        stored, pieces, table = self._store.shards[lease.key], lease.pieces(), self._core.leases
        promised = lease.promised()
        if pieces is None:
            patches = lease.patches.patches if lease.patches is not None else ()
            opened = LeaseOpened(lease.name, stored.segment, patches=patches)
            return self._lent(lease, stored) if lease.is_mapped else opened

        def lacks(origin: int, nbytes: int) -> bool:
            if lease.units is not None:
                return table.lacks_units(lease.name, origin, nbytes)
            at = stored.table.piece_at
            return table.is_missing(lease.name, at(origin), at(origin + nbytes - 1) + 1)

        return LeaseOpened(lease.name, stored.segment, pieces, lacks, promised=promised)

    def _lent(self, lease: Lease, stored: StoredShard) -> LeaseOpened | None:
        """Open the segment for a reader that maps it; its lock begins within the lease, so nothing comes between."""
        try:
            return LeaseOpened(lease.name, stored.segment, fds=stored.segment.open_lent())
        except OSError as why:
            _log.warning("%s can't be lent: %s", stored.segment.name, why)
            self.ended(lease.name, LeaseTransition.READER_GONE)
            return None

    def ended(self, lease: str, how: LeaseTransition) -> None:
        """Note that a reader is done, or gone."""
        self._carry_out(self._core.lease_ended(lease, how, self._loop.time()))
