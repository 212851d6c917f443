"""A NATS whose users may do what the table says, and connections of them; hubs of real processes."""

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from typing import Any, Final

import pytest
import pytest_asyncio
from tests.kit.hubs import RunningHub, running_hub
from tests.kit.nats import RunningNats, running_nats

from tensorhub.local.keyring import OF_EVERY_HUB, Keyring
from tensorhub_common.auth.permissions import Role, User
from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.jetstream.blob_store import BlobStore
from tensorhub_common.jetstream.job_log import open_job
from tensorhub_common.jetstream.payload_store import PayloadStore
from tensorhub_common.jetstream.rollout_log import open_rollout_log

MINE: Final = "mine"
THEIRS: Final = "theirs"
USERS: Final = (
    *OF_EVERY_HUB,
    User(Role.AGENT, "a"),
    User(Role.AGENT, "b"),
    User(Role.RUNNER, "r"),
    User(Role.RUNNER, "s"),
    User(Role.CLIENT, MINE),
    User(Role.CLIENT, THEIRS),
)

LogIn = Callable[[User], Coroutine[Any, Any, Bus]]


class Guarded:
    def __init__(self, server: RunningNats, keys: Keyring) -> None:
        self.server, self.keys = server, keys

    async def log_in(self, user: User) -> Bus:
        return await connect(self.server.url, name=str(user), credentials=self.keys.path_of(user))


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """One server for all tests here, on which two jobs are open."""
    folder = tmp_path_factory.mktemp("guarded")
    keys = Keyring(folder / "credentials")
    keys.make(USERS)
    with running_nats(folder / "nats", keys.conf) as server:
        yield Guarded(server, keys)


@pytest.fixture
async def log_in(guarded: Guarded) -> AsyncIterator[LogIn]:
    """Log in as one of the users; both jobs are open."""
    async with AsyncExitStack() as stack:

        async def enter(user: User) -> Bus:
            return await stack.enter_async_context(await guarded.log_in(user))

        registry = await enter(User(Role.REGISTRY))
        for job in (MINE, THEIRS):
            await open_job(registry, job)
            await BlobStore(registry).open(job)
            await PayloadStore(registry).open(job)
            await open_rollout_log(registry, job)
        yield enter


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def hub(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningHub]:
    """Two agents that pretend two hosts, so that both transports are there."""
    async with running_hub(tmp_path_factory.mktemp("hub"), agents=2, hosts=2) as running:
        yield running
