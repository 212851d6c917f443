"""The thread of UCX looks at the connections on which something happens, and hears of all the others."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.agent.lease_book import GIVE_UP_S, Lost
from tests.unit.agent.ucxx_hub import MIB, Hub, cut, ucxx_hub

from tensorhub_agent.transports.ucxx import library
from tensorhub_agent.transports.ucxx.transport import UcxxTransport

pytest.importorskip("ucxx", reason="the extra 'agent' brings ucxx, on Linux")


@pytest.fixture
async def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hub]:
    # Fewer than the connections below, so that UCX has to be asked more than once.
    monkeypatch.setattr(library, "READY_MAX", 2)
    async with ucxx_hub(tmp_path) as hub:
        yield hub


async def until_none_is_looked_at(transport: UcxxTransport) -> None:
    async with asyncio.timeout(GIVE_UP_S):
        while transport._engine._busy:  # noqa: ASYNC110 (the thread tells nobody)
            await asyncio.sleep(0.005)


async def test_nobody_looks_at_connections_that_wait(hub: Hub) -> None:
    segment = hub.segment(MIB)
    sessions = [await hub.open(segment, Lost(), f"lease-{number}") for number in range(5)]
    await until_none_is_looked_at(hub.reader)
    await until_none_is_looked_at(hub.source)
    assert await asyncio.gather(*(session.still_holds() for session in sessions)) == [True] * 5
    memory = memoryview(bytearray(segment.nbytes))
    await sessions[3].read(memory, cut(segment.nbytes, MIB), digests=True)
    assert memory == segment.view
    for session in sessions:
        await session.close()
    await until_none_is_looked_at(hub.reader)
    await until_none_is_looked_at(hub.source)
    await hub.until_links(5, 5)


async def test_the_end_of_connections_that_wait_is_heard(hub: Hub) -> None:
    losses = [Lost() for _ in range(5)]
    sessions = [await hub.open(hub.segment(MIB), lost, f"lease-{number}") for number, lost in enumerate(losses)]
    await until_none_is_looked_at(hub.reader)
    await hub.source.stop()
    for lost in losses:
        assert "connection" in await lost.wait()
    for session in sessions:
        await session.close()
    await until_none_is_looked_at(hub.reader)
