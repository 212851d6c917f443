"""What a ticket opens, for which reader and how often, shown to a real agent over both transports.

That a ticket is void after its time, and that a reader gets nothing beyond its grant, is shown without processes
(tests of the lease table and of the transports).
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
import pytest
from tests.kit.fakes import FakeLeases, Lost
from tests.kit.hubs import RunningHub, new_job
from tests.kit.tensors import full

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.transports.base import TransportLost
from tensorhub_agent.transports.local.transport import LocalTransport
from tensorhub_agent.transports.ucxx.transport import UcxxTransport
from tensorhub_common.errors import BadCommand
from tensorhub_common.protocol.leases import LeaseAnswer, LeaseGrant, LeaseRequest
from tensorhub_common.protocol.plans import SourceId, Transport
from tensorhub_common.protocol.subjects import agent_ask

pytestmark = pytest.mark.asyncio(loop_scope="session")

SOURCE: Final = "agent-0"
READER: Final = "agent-1"
BOUND_S: Final = 60.0


async def granted(hub: RunningHub, job: str, transport: Transport, reader: str = READER) -> LeaseGrant:
    """Ask for a lease on what the trainer has published, with the key of `READER`."""
    incarnation = (await hub.agent_info(job, SOURCE)).incarnation
    ask = LeaseRequest(
        job=job,
        model="m",
        source=SourceId(SOURCE, incarnation, "trainer", 0),
        version=1,
        root=None,
        reader=SourceId(reader, 1, "engine", 0),
        transport=transport,
    )
    async with await hub.bus(Path(hub.file.credentials).parent / "agents" / f"{READER}.nk") as bus:
        answer = await bus.request(agent_ask(SOURCE, "lease", READER), msgspec.msgpack.encode(ask), BOUND_S)
    grant = msgspec.msgpack.decode(answer, type=LeaseAnswer)
    assert isinstance(grant, LeaseGrant), grant
    return grant


@pytest.fixture
def pool() -> Iterator[CopyPool]:
    pool = CopyPool(1)
    yield pool
    pool.close()


@asynccontextmanager
async def reading_by(
    transport: Transport, folder: Path, pool: CopyPool
) -> AsyncIterator[LocalTransport | UcxxTransport]:
    """A process that has an agent's key for NATS, and speaks a transport as it likes."""
    leases, faults = FakeLeases(), list[str]()
    if transport == "local":
        yield LocalTransport(socket=folder / "own.peers", agent=READER, pool=pool, leases=leases)
        return
    ucxx = UcxxTransport(
        address="127.0.0.1",
        agent=READER,
        pool=pool,
        leases=leases,
        fault=faults.append,
    )
    await ucxx.start()
    try:
        yield ucxx
    finally:
        await ucxx.stop()
    assert faults == []


@pytest.mark.parametrize("transport", ["local", "ucxx"])
async def test_a_ticket_opens_once_and_for_its_reader_alone(
    hub: RunningHub, tmp_path: Path, pool: CopyPool, transport: Transport
) -> None:
    """A process that comes upon a ticket must also know whose it is; then it is still good for that reader."""
    job = new_job()
    async with hub.connected(job, agents=1) as (here,), reading_by(transport, tmp_path, pool) as reading:
        trainer = await here.register("m", full(1), replica="trainer")
        await trainer.publish(1)
        grant = await granted(hub, job, transport)
        with pytest.raises(TransportLost, match="another reader's"):
            await reading.open(grant, reader="agent-7", on_lost=Lost())
        session = await reading.open(grant, reader=READER, on_lost=Lost())
        with pytest.raises(TransportLost, match="used"):
            await reading.open(grant, reader=READER, on_lost=Lost())
        await session.close()
        assert "refused: a ticket that 'agent-7' showed" in hub.log(SOURCE)
        assert grant.ticket not in hub.log(SOURCE)


async def test_a_lease_in_the_name_of_another(hub: RunningHub) -> None:
    """NATS says who asks, so no agent is given a ticket that is another's."""
    async with hub.pair(full(1)) as it:
        await it.trainer.publish(1)
        with pytest.raises(BadCommand, match="in the name of 'agent-7'"):
            await granted(hub, it.job, "local", reader="agent-7")
