"""A source and a reader of the ucxx transport in one process: real UCX over loopback, real segments."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import xxhash
from tests.unit.agent.lease_book import GIVE_UP_S, Book, Lost

from tensorhub_agent.compute.pool import CopyPool, Spans
from tensorhub_agent.storage.segments import Segment, SegmentStore, segment_prefix
from tensorhub_agent.transports.ucxx import server, transport
from tensorhub_agent.transports.ucxx.session import UcxxSession
from tensorhub_agent.transports.ucxx.transport import UcxxTransport
from tensorhub_common.protocol.leases import LeaseGrant

MIB = 1024 * 1024


class Hub:
    """A source and a reader, each with a UCX of its own."""

    def __init__(self, folder: Path, pool: CopyPool) -> None:
        self.store = SegmentStore(folder, segment_prefix("hub1", "source"), 1 << 30)
        self.book, self.pool = Book(), pool
        self.faults: list[str] = []
        self.source, self.reader = self.transport("source"), self.transport("reader")

    def transport(self, agent: str) -> UcxxTransport:
        return UcxxTransport(
            address="127.0.0.1", agent=agent, pool=self.pool, leases=self.book, fault=self.faults.append
        )

    def segment(self, nbytes: int, seed: int = 1) -> Segment:
        segment = self.store.create(nbytes)
        segment.view[:] = np.random.default_rng(seed).bytes(segment.nbytes)
        return segment

    def grant(self, lease: str, segment: Segment, patches: Sequence[tuple[bytes, ...] | None] = ()) -> LeaseGrant:
        self.book.offer(lease, segment, patches)
        return LeaseGrant(
            lease=lease, ticket=f"ticket-{lease}", ticket_s=5.0, endpoint=self.source.endpoint, pieces=0, digests=b""
        )

    async def open(
        self,
        segment: Segment,
        lost: Lost,
        lease: str = "lease",
        patches: Sequence[tuple[bytes, ...] | None] = (),
    ) -> UcxxSession:
        return await self.reader.open(self.grant(lease, segment, patches), reader="reader", on_lost=lost)

    async def until_links(self, source: int, reader: int) -> None:
        async with asyncio.timeout(GIVE_UP_S):
            while (self.source.links, self.reader.links) != (source, reader):  # noqa: ASYNC110 (the threads tell nobody)
                await asyncio.sleep(0.005)


@asynccontextmanager
async def ucxx_hub(folder: Path) -> AsyncIterator[Hub]:
    """Start both; nothing may have broken off in their threads until the end.

    Neither takes the other for silent when the machine is busy; a test of that says how long they are to wait.
    """
    pool = CopyPool(2)
    hub = Hub(folder, pool)
    with pytest.MonkeyPatch.context() as patient:
        patient.setattr(server, "HELLO_S", GIVE_UP_S)
        patient.setattr(transport, "OPEN_S", GIVE_UP_S)
        await hub.source.start()
        await hub.reader.start()
        yield hub
        await hub.reader.stop()
        await hub.source.stop()
    pool.close()
    hub.store.close()
    assert hub.faults == []


def cut(nbytes: int, each: int) -> Spans:
    at = list(range(0, nbytes, each))
    return Spans(at, at, [min(each, nbytes - start) for start in at])


def digests_of(view: memoryview, spans: Spans) -> bytes:
    pairs = zip(spans.to, spans.nbytes, strict=True)
    return b"".join(xxhash.xxh3_128_digest(view[at : at + nbytes]) for at, nbytes in pairs)
