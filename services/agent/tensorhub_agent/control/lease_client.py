"""How a reader's agent gets its leases from sources' agents, and keeps those whose transport is opened later.

Invariant: nothing is waited for longer than its bound; a lease that is held is asked for again in time, and let go
when the read ends before it came to it.
"""

import asyncio
import contextlib
from typing import Final

import msgspec

from tensorhub_agent.core.effects import RequestLease
from tensorhub_agent.leases.delta_store import SIZE
from tensorhub_agent.primitives.digests import PIECE_DIGEST_BYTES
from tensorhub_agent.primitives.transport_traits import reads_memory
from tensorhub_agent.rates.encoding_choice import awaits_patches
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import NoAnswer
from tensorhub_common.errors import TensorHubError
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.leases import (
    DIGESTS_PAGE_PIECES,
    DigestsPage,
    DigestsRequest,
    LeaseAnswer,
    LeaseGrant,
    LeaseRequest,
)
from tensorhub_common.protocol.plans import SourceId
from tensorhub_common.protocol.subjects import agent_ask

LEASE_ASK_S: Final = 1.5
"""A source's agent that does not answer within this is left out."""

HOLD_S: Final = 30.0
"""A lease is to be held for so long. NATS may be away for what is left of that when it is asked for again."""

HOLD_TIMES: Final = 3
"""So often within the time for which it is held a lease is asked for again."""

_grants: Final[msgspec.msgpack.Decoder[LeaseAnswer]] = msgspec.msgpack.Decoder(LeaseAnswer)


class LeaseUnavailable(TensorHubError):
    """The source can't be read from, for the reason given."""


class NeverLent(LeaseUnavailable):
    """The source will never give this reader a lease."""


class LeaseClient:
    """Asks for the leases of one job's reads."""

    def __init__(self, job: str, bus: Bus) -> None:
        """Begin without a request."""
        self._job, self._bus = job, bus

    async def ask(
        self, effect: RequestLease, reader: SourceId, headers: dict[str, str], *, hold_s: float = 0.0, again: str = ""
    ) -> LeaseGrant:
        """Get a lease, or hold the one named `again`. Raises `LeaseUnavailable`, or `NoAnswer`."""
        ask = self._question(effect, reader, hold_s=hold_s, again=again)
        while True:
            body = await self._bus.request(_subject(effect, reader), msgspec.msgpack.encode(ask), LEASE_ASK_S, headers)
            try:
                answer = _grants.decode(body)
            except MALFORMED as why:
                raise LeaseUnavailable(f"its agent's answer could not be read: {why}") from None
            if isinstance(answer, LeaseGrant):
                return answer
            # Who crosses for the site may begin later than the reader. The core says how long that is worth waiting,
            # and the source has held the question before it answered so.
            if not (effect.share.crosses and answer.is_early):
                raise (NeverLent if answer.is_final else LeaseUnavailable)(answer.reason)

    def _question(self, effect: RequestLease, reader: SourceId, *, hold_s: float, again: str) -> LeaseRequest:
        return LeaseRequest(
            job=self._job,
            model=effect.key.model,
            source=effect.share.source,
            version=effect.version,
            root=effect.root,
            reader=reader,
            transport=effect.share.transport,
            turn=effect.turn,
            mapped=effect.mapped,
            device=effect.device,
            units=effect.program is not None,
            nbytes=effect.share.nbytes,
            # A copy of memory is sooner made than a patch.
            base=None if effect.base is None or reads_memory(effect.share.transport) else effect.base.root,
            awaits_patches=awaits_patches(effect.rate, far=effect.share.far),
            promises=effect.share.crosses,
            program=effect.program.digest if effect.program is not None else None,
            hold_s=hold_s,
            again=again,
        )

    async def digests(self, agent: str, reader: str, grant: LeaseGrant, headers: dict[str, str]) -> tuple[bytes, bytes]:
        """Return the digests of all pieces, and the sizes of their patches, page by page."""
        digests, sizes = bytearray(grant.digests), bytearray(grant.patch_sizes)
        while len(digests) < grant.pieces * PIECE_DIGEST_BYTES:
            ask = DigestsRequest(lease=grant.lease, first=len(digests) // PIECE_DIGEST_BYTES)
            body = await self._bus.request(
                agent_ask(agent, "digests", reader), msgspec.msgpack.encode(ask), LEASE_ASK_S, headers
            )
            try:
                page = msgspec.msgpack.decode(body, type=DigestsPage)
            except MALFORMED as why:
                raise LeaseUnavailable(f"a page of its digests could not be read: {why}") from None
            if not page.digests or len(page.digests) > DIGESTS_PAGE_PIECES * PIECE_DIGEST_BYTES:
                raise LeaseUnavailable("its digests did not come whole")
            digests += page.digests
            sizes += page.patch_sizes
        # Sizes of other pieces than these would be believed of these.
        return bytes(digests), bytes(sizes) if len(sizes) == grant.pieces * SIZE.size else b""

    async def more_sizes(self, agent: str, reader: str, grant: LeaseGrant, first: int) -> tuple[bytes, bool]:
        """Ask for a page of sizes once more; returns it, and whether more patches are being made."""
        ask = DigestsRequest(lease=grant.lease, first=first)
        try:
            body = await self._bus.request(
                agent_ask(agent, "digests", reader), msgspec.msgpack.encode(ask), LEASE_ASK_S
            )
            page = msgspec.msgpack.decode(body, type=DigestsPage)
        except (TensorHubError, *MALFORMED):
            return b"", False
        return page.patch_sizes, page.patches_coming

    async def accuse(self, effect: RequestLease, reader: SourceId) -> None:
        """Tell a source that its bytes were wrong. Where that is lost the reader alone knows."""
        ask = msgspec.structs.replace(self._question(effect, reader, hold_s=0.0, again=""), wrong=True)
        with contextlib.suppress(TensorHubError):
            await self._bus.request(_subject(effect, reader), msgspec.msgpack.encode(ask), LEASE_ASK_S)

    async def let_go(self, effect: RequestLease, reader: SourceId, lease: str) -> None:
        """Tell a source that its lease is not needed. Where that is lost its time ends it."""
        ask = self._question(effect, reader, hold_s=0.0, again=lease)
        with contextlib.suppress(TensorHubError):
            await self._bus.request(_subject(effect, reader), msgspec.msgpack.encode(ask), LEASE_ASK_S)


class HeldLease:
    """One lease that waits for its transport."""

    def __init__(
        self, leasing: LeaseClient, effect: RequestLease, reader: SourceId, grant: LeaseGrant, headers: dict[str, str]
    ) -> None:
        """Begin with the grant."""
        self._leasing, self._effect, self._reader, self._headers = leasing, effect, reader, headers
        self._grant = grant

    async def until(self, entered: asyncio.Event) -> LeaseGrant:
        """Keep the lease until then. Raises `LeaseUnavailable` when it ends, or no renewal is confirmed in time."""
        loop = asyncio.get_running_loop()
        over = loop.time() + self._grant.ticket_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._grant.ticket_s / HOLD_TIMES):
                    await entered.wait()
                return self._grant
            try:
                self._grant = await self._leasing.ask(
                    self._effect, self._reader, self._headers, hold_s=HOLD_S, again=self._grant.lease
                )
            except NoAnswer:
                if loop.time() >= over:
                    raise LeaseUnavailable("its agent did not say that it still holds the lease") from None
            else:
                over = loop.time() + self._grant.ticket_s

    async def let_go(self) -> None:
        """End it: the read does."""
        await self._leasing.let_go(self._effect, self._reader, self._grant.lease)


def _subject(effect: RequestLease, reader: SourceId) -> str:
    return agent_ask(effect.share.source.agent, "lease", reader.agent)
