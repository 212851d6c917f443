"""What the tests share: a nats-server for all that only need a bus, and a hub for all that only need one.

A test that would leave either changed for others, or needs it set up differently, has one of its own.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.kit import fork_server, hubs
from tests.kit.hubs import RunningHub, running_hub
from tests.kit.nats import RunningNats, running_nats

from tensorhub_common.bus.connection import Bus, connect


@pytest.fixture(scope="session", autouse=True)
def programs_end() -> Iterator[None]:
    yield
    fork_server.close()


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNats]:
    """One server for the whole session; take a `job` of your own on it, and leave it running."""
    with running_nats(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
def own_nats_server(tmp_path: Path) -> Iterator[RunningNats]:
    """A server of the test's own, which may be killed and started again."""
    with running_nats(tmp_path / "nats") as server:
        yield server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def hub_on_one_host(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningHub]:
    """A hub of two agents for the whole session, for tests in its loop; take a job of your own on it."""
    async with running_hub(tmp_path_factory.mktemp("hub"), TENSORHUB_METRICS="0") as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def hub_on_two_hosts(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningHub]:
    """The same, whose agents exchange bytes over ucxx."""
    async with running_hub(tmp_path_factory.mktemp("hub"), hosts=2, TENSORHUB_METRICS="0") as running:
        yield running


@pytest.fixture
def hub(hub_on_one_host: RunningHub) -> RunningHub:
    """The session's hub, for tests that don't care about transports."""
    return hub_on_one_host


@pytest.fixture
def job() -> str:
    return hubs.new_job()


@pytest.fixture
async def bus(nats_server: RunningNats) -> AsyncIterator[Bus]:
    async with await connect(nats_server.url, name="test") as connected:
        yield connected


@pytest.fixture
async def own_bus(own_nats_server: RunningNats) -> AsyncIterator[Bus]:
    async with await connect(own_nats_server.url, name="test") as connected:
        yield connected
