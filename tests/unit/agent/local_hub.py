"""A source and a reader of the local transport in one process: real sockets, real segments."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import xxhash
from tests.unit.agent.lease_book import GIVE_UP_S, Book

from tensorhub_agent.compute.pool import CopyPool, Spans
from tensorhub_agent.primitives.lease_messages import Hello, LeaseMessage, Welcome
from tensorhub_agent.storage.segments import Segment, SegmentStore, segment_prefix
from tensorhub_agent.transports.local import transport
from tensorhub_agent.transports.local.framing import FRAME_BYTES_MAX, from_reader, send
from tensorhub_agent.transports.local.session import LocalSession, MappedSession
from tensorhub_agent.transports.local.transport import LocalTransport
from tensorhub_common.protocol.leases import LeaseGrant
from tensorhub_common.runtime.framed_socket import FramedSocket, PeerGone, connect

MIB = 1024 * 1024


class Hub:
    """A source and a reader."""

    def __init__(self, folder: Path, pool: CopyPool) -> None:
        self.store = SegmentStore(folder, segment_prefix("hub1", "source"), 1 << 30)
        self.book = Book()
        self.pool = pool
        self.source = self.transport(folder / "source.peers", "source")
        self.reader = self.transport(folder / "reader.peers", "reader")

    def transport(self, path: Path, agent: str) -> LocalTransport:
        book = self.book
        return LocalTransport(
            socket=path,
            agent=agent,
            pool=self.pool,
            leases=book,
            mappings_max=2,
        )

    def published(self, nbytes: int, seed: int = 1) -> Segment:
        segment = self.store.create(nbytes)
        segment.view[:] = np.random.default_rng(seed).bytes(segment.nbytes)
        return segment

    def grant(self, lease: str, endpoint: str | None = None) -> LeaseGrant:
        return LeaseGrant(
            lease=lease,
            ticket=f"ticket-{lease}",
            ticket_s=5,
            endpoint=endpoint or self.source.endpoint,
            pieces=0,
            digests=b"",
        )

    async def open(
        self, lease: str, segment: Segment, lost: Callable[[str], None] = lambda _: None
    ) -> LocalSession | MappedSession:
        self.book.offer(lease, segment)
        return await self.reader.open(self.grant(lease), reader="reader", on_lost=lost)

    async def raw(self, hello: LeaseMessage | None = None) -> FramedSocket:
        framed = await connect(Path(self.source.endpoint), FRAME_BYTES_MAX, GIVE_UP_S)
        if hello is not None:
            await send(framed, hello)
        return framed


@asynccontextmanager
async def local_hub(folder: Path) -> AsyncIterator[Hub]:
    """Start both; at the end nothing of them is left.

    Neither takes the other for silent when the machine is busy; a test of that says how long they are to wait.
    """
    pool = CopyPool(2)
    hub = Hub(folder, pool)
    with pytest.MonkeyPatch.context() as patient:
        patient.setattr(transport, "HELLO_S", GIVE_UP_S)
        patient.setattr(transport, "OPEN_S", GIVE_UP_S)
        await hub.source.start()
        await hub.reader.start()
        yield hub
        await hub.reader.stop()
        await hub.source.stop()
    pool.close()
    hub.store.close()
    await asyncio.get_running_loop().shutdown_default_executor()


class FakeSource:
    """A source that does what the test says, at a socket of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._socket.setblocking(False)  # noqa: FBT003

    async def accept(self) -> FramedSocket:
        connection, _ = await asyncio.get_running_loop().sock_accept(self._socket)
        return FramedSocket(connection, FRAME_BYTES_MAX)

    async def welcome(self, segment: Segment) -> FramedSocket:
        framed = await self.accept()
        assert isinstance(await from_reader(framed), Hello)
        await send(framed, Welcome(segment.name, segment.nbytes), segment.fd)
        return framed

    def close(self) -> None:
        self._socket.close()


def whole(segment: Segment) -> Spans:
    sizes = [min(MIB, segment.nbytes - at) for at in range(0, segment.nbytes, MIB)]
    at = [MIB * number for number in range(len(sizes))]
    return Spans(at, at, sizes)


def digests_of(view: memoryview, spans: Spans) -> bytes:
    return b"".join(
        xxhash.xxh3_128_digest(view[at : at + nbytes]) for at, nbytes in zip(spans.origin, spans.nbytes, strict=True)
    )


async def end_of(framed: FramedSocket) -> None:
    async with asyncio.timeout(GIVE_UP_S):
        with contextlib.suppress(PeerGone):
            while True:
                await framed.receive()
