"""What the tests share: a nats-server for all that only need a bus, and a hub for all that only need one.

A test that would leave either changed for others, or needs it set up differently, has one of its own.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio
from tests.integration import programs
from tests.integration.hubs import RunningHub, running_hub
from tests.stopping import stop

from tensorhub.local import tether
from tensorhub.local.nats_server import Cluster, NatsServer
from tensorhub_common.bus.connection import Bus, connect

READY_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 60.0

_jobs: Final = count()


USERS: Final = 'authorization { user: tensorhub, password: "let-me-in" }'


class RunningNats:
    """An embedded server as `tensorhub up` configures it, alone or as a node of a cluster.

    It may be killed, and started again on its port and store.

    Whoever has its address may do everything; `users` says otherwise (tests/integration/security).
    """

    def __init__(
        self, directory: Path, users: Path | None = None, cluster: Cluster | None = None, index: int = 0
    ) -> None:
        self.directory = directory
        self._login = "tensorhub:let-me-in@" if users is None else ""
        if users is None:
            directory.mkdir(parents=True, exist_ok=True)
            users = directory / "users.conf"
            users.write_text(USERS)
        self._server = NatsServer(directory, users, cluster, index)
        self._server.prepare()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self._server.url.replace("//", f"//{self._login}")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        tethered = (sys.executable, "-I", "-S", str(tether.__file__), str(os.getpid()), *self._server.command)
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(tethered, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self._server.is_ready(self.pid):
            assert self._process.poll() is None, (self.directory / "server.log").read_text()
            assert time.monotonic() < deadline, "nats-server does not come up"
            time.sleep(0.005)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal; once this returns, a server that was to stop has stopped with all its threads."""
        stop(self.pid) if number == signal.SIGSTOP else os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
            self._process = None


@pytest.fixture(scope="session", autouse=True)
def programs_end() -> Iterator[None]:
    """End what programs were forked from with the tests."""
    yield
    programs.close_nursery()


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNats]:
    """One server for the whole session; take a `job` of your own on it, and leave it running."""
    server = RunningNats(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def own_nats_server(tmp_path: Path) -> Iterator[RunningNats]:
    """A server of the test's own, which may be killed and started again."""
    server = RunningNats(tmp_path / "nats")
    server.start()
    yield server
    server.kill()


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
    """A job name that no other test uses."""
    return f"job-{os.getpid()}-{next(_jobs)}"


@pytest.fixture
async def bus(nats_server: RunningNats) -> AsyncIterator[Bus]:
    """A connection to the session's server."""
    async with await connect(nats_server.url, name="test") as connected:
        yield connected


@pytest.fixture
async def own_bus(own_nats_server: RunningNats) -> AsyncIterator[Bus]:
    """A connection to the test's own server."""
    async with await connect(own_nats_server.url, name="test") as connected:
        yield connected
