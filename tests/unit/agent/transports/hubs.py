"""A source and a reader in one process, over either transport: real sockets or real UCX, and real segments."""

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal

import numpy as np
import pytest
import xxhash
from tests.kit.fakes import GIVE_UP_S, FakeLeases, Lost

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.primitives.lease_messages import LeaseMessage
from tensorhub_agent.storage.segments import Segment, SegmentStore, segment_prefix
from tensorhub_agent.transports.base import OnAvailability, unheard
from tensorhub_agent.transports.local import transport as local
from tensorhub_agent.transports.local.framing import FRAME_BYTES_MAX
from tensorhub_agent.transports.local.transport import LocalTransport
from tensorhub_agent.transports.ucxx import server as ucxx_server
from tensorhub_agent.transports.ucxx import session as ucxx_session
from tensorhub_agent.transports.ucxx import transport as ucxx
from tensorhub_agent.transports.ucxx.link import UcxxLink
from tensorhub_agent.transports.ucxx.protocol.frames import encode
from tensorhub_agent.transports.ucxx.transport import UcxxTransport
from tensorhub_common.protocol.leases import LeaseGrant
from tensorhub_common.runtime.framed_socket import FramedSocket, PeerGone, connect

MIB: Final = 1024 * 1024
HAS_UCX: Final = importlib.util.find_spec("ucxx") is not None
Kind = Literal["local", "ucxx"]
BOUNDS: Final = (
    (local, "HELLO_S"),
    (local, "SILENCE_S"),
    (local, "OPEN_S"),
    (ucxx_server, "HELLO_S"),
    (ucxx_server, "SILENCE_S"),
    (ucxx, "OPEN_S"),
    (ucxx_session, "DONE_S"),
)
"""How long each side waits for the other one."""


class Stranger:
    """A connection to a source that says what the test has it say."""

    def __init__(self, connection: FramedSocket | UcxxLink) -> None:
        self.connection = connection
        self.answers: list[bytes] = []
        self._down = Lost()
        if isinstance(connection, UcxxLink):
            connection.on_frame, connection.on_down = self.answers.append, self._down

    async def say(self, message: LeaseMessage | bytes) -> None:
        data = message if isinstance(message, bytes) else encode(message)
        if isinstance(self.connection, UcxxLink):
            self.connection.send(data)
        else:
            with contextlib.suppress(PeerGone):  # It is cut off while it speaks.
                await self.connection.send(data)

    async def until_cut_off(self) -> None:
        if isinstance(self.connection, UcxxLink):
            await self._down.wait()
            await self.connection.close()
            return
        async with asyncio.timeout(GIVE_UP_S):
            with contextlib.suppress(PeerGone):
                while True:
                    self.answers.append(await self.connection.receive())
        self.connection.close()


class Hub:
    """A source and a reader of one transport."""

    def __init__(self, kind: Kind, folder: Path, pool: CopyPool) -> None:
        self.kind, self.pool, self._folder = kind, pool, folder
        self.store = SegmentStore(folder, segment_prefix("hub1", "source"), 1 << 30)
        self.leases = FakeLeases()
        self.faults: list[str] = []
        # Their own type is of no matter to the contract; tests of one transport look inside.
        self.source: Any = self.transport("source")
        self.reader: Any = self.transport("reader")

    def transport(self, agent: str) -> LocalTransport | UcxxTransport:
        if self.kind == "ucxx":
            return UcxxTransport(
                address="127.0.0.1", agent=agent, pool=self.pool, leases=self.leases, fault=self.faults.append
            )
        path = self._folder / f"{agent}.peers"
        return LocalTransport(socket=path, agent=agent, pool=self.pool, leases=self.leases, mappings_max=2)

    @property
    def serving(self) -> ModuleType:
        """The module with the bounds of the serving side."""
        return local if self.kind == "local" else ucxx_server

    @property
    def nowhere(self) -> str:
        """An endpoint at which no agent listens."""
        return "/nowhere/a.peers" if self.kind == "local" else "127.0.0.1:9"

    def segment(self, nbytes: int, seed: int = 1) -> Segment:
        segment = self.store.create(nbytes)
        segment.view[:] = np.random.default_rng(seed).bytes(segment.nbytes)
        return segment

    def grant(self, lease: str = "lease", endpoint: str | None = None) -> LeaseGrant:
        endpoint = endpoint or self.source.endpoint
        return LeaseGrant(lease=lease, ticket=f"ticket-{lease}", ticket_s=5.0, endpoint=endpoint, pieces=0, digests=b"")

    async def open(
        self,
        segment: Segment,
        lost: Lost | None = None,
        lease: str = "lease",
        patches: Sequence[tuple[bytes, ...] | None] = (),
    ) -> Any:
        self.leases.offer(lease, segment, patches)
        return await self.show_ticket(lost, lease)

    async def show_ticket(
        self,
        lost: Lost | None = None,
        lease: str = "lease",
        endpoint: str | None = None,
        have: OnAvailability = unheard,
    ) -> Any:
        return await self.reader.open(
            self.grant(lease, endpoint), reader="reader", on_lost=lost or Lost(), on_have=have
        )

    async def stranger(self) -> Stranger:
        if self.kind == "local":
            return Stranger(await connect(Path(self.source.endpoint), FRAME_BYTES_MAX, GIVE_UP_S))
        address, _, port = self.source.endpoint.rpartition(":")
        return Stranger(self.reader._engine.connect(address, int(port)))

    async def source_says(self, frame: LeaseMessage | bytes) -> None:
        """Have the source say something to its one reader, whatever the lease allows."""
        data = frame if isinstance(frame, bytes) else encode(frame)
        if self.kind == "local":
            (connection,) = self.source._readers.values()
            await connection.framed.send(data)
        else:
            (connection,) = self.source._readers
            connection._link.send(data)

    async def until_links(self, source: int, reader: int) -> None:
        """Wait until each side has this many connections. Locally only the source counts them."""
        expected = (source, 0 if self.kind == "local" else reader)
        async with asyncio.timeout(GIVE_UP_S):
            while (self.source.links, self.reader.links) != expected:  # noqa: ASYNC110 (no event tells)
                await asyncio.sleep(0.005)


@asynccontextmanager
async def running_hub(kind: Kind, folder: Path) -> AsyncIterator[Hub]:
    """Start both; at the end nothing of them is left, and no thread of theirs has failed.

    Neither takes the other for silent when the machine is busy; a test of that sets the bound itself.
    """
    if kind == "ucxx" and not HAS_UCX:
        pytest.skip("the extra 'agent' brings ucxx, on Linux")
    pool = CopyPool(2)
    hub = Hub(kind, folder, pool)
    with pytest.MonkeyPatch.context() as patient:
        for module, bound in BOUNDS:
            patient.setattr(module, bound, GIVE_UP_S)
        await hub.source.start()
        await hub.reader.start()
        yield hub
        await hub.reader.stop()
        await hub.source.stop()
    pool.close()
    hub.store.close()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert hub.faults == []


def cut(nbytes: int, each: int) -> Spans:
    """Return spans of one length that stand at the same place at both ends."""
    at = list(range(0, nbytes, each))
    return Spans(at, at, [min(each, nbytes - start) for start in at])


def digests_of(view: memoryview, spans: Spans) -> bytes:
    pairs = zip(spans.to, spans.nbytes, strict=True)
    return b"".join(xxhash.xxh3_128_digest(view[at : at + nbytes]) for at, nbytes in pairs)
