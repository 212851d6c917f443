"""What a ticket opens, for whom and how often, shown to a real agent over both transports."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
import pytest
import torch
from tests.integration.security.conftest import log_of
from tests.kit.hubs import RunningHub, new_job
from tests.unit.agent.lease_book import Book, Lost

from tensorhub.aio.shard import AsyncShard
from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.leases.table import TICKET_S
from tensorhub_agent.transports.base import TransportLost
from tensorhub_agent.transports.local.session import LocalSession
from tensorhub_agent.transports.local.transport import LocalTransport
from tensorhub_agent.transports.ucxx.protocol.frames import PieceRequest, encode
from tensorhub_agent.transports.ucxx.server import Book as ServingBook
from tensorhub_agent.transports.ucxx.transport import UcxxTransport
from tensorhub_common.bus.connection import connect
from tensorhub_common.errors import BadCommand
from tensorhub_common.protocol.leases import LeaseAnswer, LeaseGrant, LeaseRequest
from tensorhub_common.protocol.plans import SourceId, Transport
from tensorhub_common.protocol.subjects import agent_ask

pytestmark = pytest.mark.asyncio(loop_scope="session")

SOURCE: Final = "agent-0"
READER: Final = "agent-1"
BOUND_S: Final = 60.0
NBYTES: Final = 1 << 20
TRANSPORTS: Final[tuple[Transport, ...]] = ("local", "ucxx")


@pytest.fixture
def pool() -> Iterator[CopyPool]:
    pool = CopyPool(1)
    yield pool
    pool.close()


class Thief:
    """A process that has an agent's key for NATS and speaks the transports as it likes."""

    def __init__(
        self, hub: RunningHub, job: str, trainer: AsyncShard, incarnation: int, folder: Path, pool: CopyPool
    ) -> None:
        self.hub, self.job, self.trainer, self.incarnation = hub, job, trainer, incarnation
        book = Book()
        self.local = LocalTransport(
            socket=folder / "thief.peers",
            agent=READER,
            pool=pool,
            redeem=book.redeem,
            renew=book.renew,
            holds=book.holds,
            ended=book.ended,
        )
        serving = ServingBook(book.redeem, book.renew, book.holds, book.ended)
        self.faults: list[str] = []
        self.ucxx = UcxxTransport(address="127.0.0.1", agent=READER, pool=pool, book=serving, fault=self.faults.append)

    def of(self, transport: Transport) -> LocalTransport | UcxxTransport:
        return self.local if transport == "local" else self.ucxx

    async def granted(self, transport: Transport, reader: str = READER, asker: str = READER) -> LeaseGrant:
        """Ask for a lease on what the trainer has published."""
        ask = LeaseRequest(
            job=self.job,
            model="m",
            source=SourceId(SOURCE, self.incarnation, "trainer", 0),
            version=1,
            root=None,
            reader=SourceId(reader, 1, "thief", 0),
            transport=transport,
        )
        key = Path(self.hub.file.credentials).parent / "agents" / f"{asker}.nk"
        async with await connect(self.hub.file.nats, name="thief", credentials=key) as bus:
            answer = await bus.request(agent_ask(SOURCE, "lease", asker), msgspec.msgpack.encode(ask), BOUND_S)
        grant = msgspec.msgpack.decode(answer, type=LeaseAnswer)
        assert isinstance(grant, LeaseGrant), grant
        return grant


@asynccontextmanager
async def robbed(hub: RunningHub, folder: Path, pool: CopyPool) -> AsyncIterator[Thief]:
    """A trainer that has published, and somebody who would read more than is given."""
    job = new_job()
    async with hub.connected(job, agents=1) as (here,):
        trainer = await here.register("m", {"w": torch.ones(NBYTES // 4)}, replica="trainer")
        await trainer.publish(1)
        (incarnation,) = {each.incarnation for each in (await here.registry.status()).agents if each.agent == SOURCE}
        thief = Thief(hub, job, trainer, incarnation, folder, pool)
        await thief.ucxx.start()
        try:
            yield thief
        finally:
            await thief.ucxx.stop()
        assert thief.faults == []


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_ticket_that_was_used(hub: RunningHub, tmp_path: Path, pool: CopyPool, transport: Transport) -> None:
    async with robbed(hub, tmp_path, pool) as thief:
        grant = await thief.granted(transport)
        session = await thief.of(transport).open(grant, reader=READER, on_lost=Lost())
        with pytest.raises(TransportLost, match="used"):
            await thief.of(transport).open(grant, reader=READER, on_lost=Lost())
        await session.close()
        assert "refused: a ticket that 'agent-1' showed" in log_of(hub, SOURCE)
        assert grant.ticket not in log_of(hub, SOURCE)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_ticket_of_another(hub: RunningHub, tmp_path: Path, pool: CopyPool, transport: Transport) -> None:
    """Whoever comes upon a ticket must also know whose it is; then it is still good for that one."""
    async with robbed(hub, tmp_path, pool) as thief:
        grant = await thief.granted(transport)
        with pytest.raises(TransportLost, match="another reader's"):
            await thief.of(transport).open(grant, reader="agent-7", on_lost=Lost())
        session = await thief.of(transport).open(grant, reader=READER, on_lost=Lost())
        await session.close()


@pytest.mark.long
async def test_a_ticket_that_is_too_old(hub: RunningHub, tmp_path: Path, pool: CopyPool) -> None:
    """A ticket that nobody shows is void after its time, and holds the trainer up no longer than that."""
    async with robbed(hub, tmp_path, pool) as thief:
        grants = [(transport, await thief.granted(transport)) for transport in TRANSPORTS]
        assert [grant.ticket_s for _, grant in grants] == [TICKET_S, TICKET_S]
        # It waits for readers, and these two never come.
        await thief.trainer.unpublish(timeout_s=2 * BOUND_S)
        for transport, grant in grants:
            with pytest.raises(TransportLost, match="too old"):
                await thief.of(transport).open(grant, reader=READER, on_lost=Lost())


async def test_a_lease_in_the_name_of_another(hub: RunningHub, tmp_path: Path, pool: CopyPool) -> None:
    """NATS says who asks, so no agent is given a ticket that is another's."""
    async with robbed(hub, tmp_path, pool) as thief:
        with pytest.raises(BadCommand, match="in the name of 'agent-7'"):
            await thief.granted("local", reader="agent-7")


@pytest.mark.parametrize(
    ("origin", "nbytes"), [(0, 2 * NBYTES), (NBYTES, NBYTES), (-NBYTES, NBYTES), (1 << 40, 8)], ids=str
)
async def test_a_reader_that_asks_beyond_its_grant_over_ucxx(
    hub: RunningHub, tmp_path: Path, pool: CopyPool, origin: int, nbytes: int
) -> None:
    """The lease ends, not a byte comes, and the source says why."""
    async with robbed(hub, tmp_path, pool) as thief:
        lost = Lost()
        session = await thief.ucxx.open(await thief.granted("ucxx"), reader=READER, on_lost=lost)
        memory = memoryview(bytearray(2 * NBYTES))
        batch = session._link.receive([memory], 1)
        session._link.send(encode(PieceRequest(1, [origin], [nbytes])))
        await lost.wait()
        await session.close()
        await asyncio.wait_for(asyncio.shield(batch.ended), BOUND_S)
        assert memory == bytes(2 * NBYTES)
        assert "reach beyond the segment" in log_of(hub, SOURCE)


async def test_a_reader_that_writes_into_what_it_mapped(hub: RunningHub, tmp_path: Path, pool: CopyPool) -> None:
    """Locally a ticket opens the segment's memory, to read, and not one byte after its end."""
    async with robbed(hub, tmp_path, pool) as thief:
        session = await thief.local.open(await thief.granted("local"), reader=READER, on_lost=Lost())
        assert isinstance(session, LocalSession)
        view = session._mapping.view
        assert view.readonly
        assert len(view) == NBYTES
        await session.close()
