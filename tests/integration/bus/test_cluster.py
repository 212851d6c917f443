"""A cluster of three real servers: who is connected goes on at another node, and what was acknowledged outlives one."""

import asyncio
import contextlib
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.bounds import WAIT_S
from tests.integration.security.test_tls import certificate
from tests.kit.nats import USERS, RunningNats
from tests.kit.waiting import retried, until

from tensorhub.local.nats_server import Cluster
from tensorhub_common.auth.tls import TlsFiles
from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.bus.errors import NoAnswer, NoBus, NoResponder
from tensorhub_common.bus.message import Message
from tensorhub_common.errors import TensorHubError
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.job_log import JobLog, open_job
from tensorhub_common.jetstream.payload_store import PayloadStore
from tensorhub_common.jetstream.rollout_log import decoded, open_rollout_log
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.rollout.entries import Lead

NODES = 3
MOVED_S_MAX = 6.0
"""A client has left a node that stopped, and is at another, within this."""

ELECTED_S_MAX = 60.0


class RunningCluster:
    def __init__(self, directory: Path, users: Path | None = None) -> None:
        self.plan = Cluster.of(NODES)
        self.nodes = [RunningNats(directory / str(index), users, self.plan, index) for index in range(NODES)]

    @property
    def urls(self) -> str:
        return ",".join(node.url for node in self.nodes)

    def start(self) -> None:
        for node in self.nodes:
            node.start()

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def node_of(self, bus: Bus) -> RunningNats:
        return self.nodes[index_of(bus.server_info["server_name"])]


def index_of(server_name: str) -> int:
    return int(server_name.rpartition("-")[2])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    made = RunningCluster(tmp_path_factory.mktemp("cluster"))
    made.start()
    yield made
    made.kill()


@pytest.fixture
async def whole(running: RunningCluster) -> AsyncIterator[RunningCluster]:
    yield running
    for node in running.nodes:
        with contextlib.suppress(AssertionError, ProcessLookupError):
            node.signal(signal.SIGCONT)
        if not node.is_running:
            node.start()


@pytest.fixture
async def spread(whole: RunningCluster) -> AsyncIterator[Bus]:
    async with await connect(whole.urls, name="test", timeout_s=ELECTED_S_MAX) as bus:
        yield bus


async def opened(bus: Bus, job: str) -> JobLog:
    log = await retried(lambda: open_job(bus, job, NODES), TensorHubError)
    await opened_on(NODES, bus, job)
    return log


async def opened_on(count: int, bus: Bus, job: str, stream_of: Callable[[str], str] = subjects.log_stream) -> None:
    async def are_current() -> bool:
        with contextlib.suppress(TensorHubError):
            info = await cluster_of(bus, job, stream_of)
            return bool(info.get("leader")) and 1 + sum(peer["current"] for peer in info["replicas"]) >= count
        return False

    await until(are_current)


async def cluster_of(bus: Bus, job: str, stream_of: Callable[[str], str] = subjects.log_stream) -> dict[str, Any]:
    info: dict[str, Any] = (await api.api(bus, f"STREAM.INFO.{stream_of(job)}", None, 1.0))["cluster"]
    return info


async def moved(cluster: RunningCluster, bus: Bus, left: RunningNats) -> None:
    await until(lambda: not (not bus.is_connected or cluster.node_of(bus) is left))


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
async def test_who_is_connected_goes_on_at_another_node(whole: RunningCluster, spread: Bus, number: int) -> None:
    async def answer(message: Message) -> bytes:
        return message.data

    async with await connect(whole.urls, name="asker") as asker:
        await spread.serve("question", answer)
        left = whole.node_of(spread)
        left.signal(number)
        await moved(whole, spread, left)
        await asker.wait_connected(MOVED_S_MAX)
        ask = partial(asker.request, "question", b"?", 0.5)
        assert await retried(ask, NoBus, NoAnswer, NoResponder, timeout_s=MOVED_S_MAX) == b"?"
    left.signal(signal.SIGCONT) if number == signal.SIGSTOP else left.kill()


@pytest.mark.slow
async def test_a_node_that_is_away_at_the_beginning_is_passed_over(whole: RunningCluster) -> None:
    whole.nodes[1].kill()
    for _ in range(4):
        async with await connect(whole.urls, name="test", timeout_s=ELECTED_S_MAX) as bus:
            assert whole.node_of(bus) is not whole.nodes[1]


@pytest.mark.slow
async def test_a_node_with_an_empty_disk_has_all_of_the_log_again(whole: RunningCluster, spread: Bus, job: str) -> None:
    """It comes back under its own name, and may be the leader's heir from then on."""
    log = await opened(spread, job)
    said = [await log.append(subjects.command_subject(job, "publish"), b"", f"m{number}") for number in range(50)]
    node = whole.nodes[index_of((await cluster_of(spread, job))["leader"])]
    node.kill()
    shutil.rmtree(node.directory / "store")
    node.start()
    await opened(spread, job)
    for other in whole.nodes:
        if other is not node:
            other.kill()
    whole.nodes[(whole.nodes.index(node) + 1) % NODES].start()
    await opened_on(2, spread, job)
    assert await log.last_seq() == said[-1]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [subjects.payload_stream, subjects.rollout_stream])
async def test_rollouts_go_on_where_a_streams_leader_is_lost(
    whole: RunningCluster, spread: Bus, job: str, lost: Callable[[str], str]
) -> None:
    """Entries and payloads are read from the leader alone, so another one must be elected before they are."""
    payloads = PayloadStore(spread, cache_bytes_max=0)
    await retried(lambda: payloads.open(job, NODES), TensorHubError)
    log = await retried(lambda: open_rollout_log(spread, job, NODES), TensorHubError)
    for stream_of in (subjects.payload_stream, subjects.rollout_stream):
        await opened_on(NODES, spread, job, stream_of)
    digest = await payloads.put(job, b"prompts")
    assert await log.append(Lead(1, "rollout-0"), "m1") == 1
    whole.nodes[index_of((await cluster_of(spread, job, lost))["leader"])].kill()
    assert await retried(lambda: payloads.get(job, digest), TensorHubError) == b"prompts"
    assert await retried(lambda: log.append(Lead(2, "rollout-1"), "m2"), TensorHubError) == 2
    stored = await retried(lambda: log.entry(1), TensorHubError)
    assert stored is not None
    assert decoded(stored) == Lead(1, "rollout-0")
    later = await retried(lambda: payloads.put(job, b"responses"), TensorHubError)
    [first, second] = await retried(lambda: payloads.listed(job), TensorHubError)
    assert (first.digest, second.digest) == (digest, later)
    await retried(lambda: payloads.drop(job, digest, first.seq), TensorHubError)
    assert [each.digest for each in await retried(lambda: payloads.listed(job), TensorHubError)] == [later]


async def test_no_stranger_becomes_a_node(whole: RunningCluster) -> None:
    """The port for the other nodes is open to every user of the machine, and asks for the cluster's password."""
    assert whole.plan.password not in repr(whole.plan)
    reader, writer = await asyncio.open_connection("127.0.0.1", whole.plan.ports[0])
    try:
        async with asyncio.timeout(WAIT_S):
            assert (await reader.readline()).startswith(b"INFO ")
            writer.write(b'CONNECT {"user":"node","pass":"guessed","name":"x","server_id":"x"}\r\nPING\r\n')
            assert b"Authorization Violation" in await reader.read()
    finally:
        writer.close()


@pytest.mark.slow
async def test_over_tls_a_node_that_stopped_is_left_as_soon(tmp_path: Path) -> None:
    """TLS ends a connection with a word of the other side, and who has stopped says none."""
    key, pem = certificate(tmp_path, "nats", "IP:127.0.0.1")
    users = tmp_path / "users.conf"
    users.write_text(f'{USERS}\ntls {{ cert_file: "{pem}", key_file: "{key}" }}\n')
    credentials = tmp_path / "credentials"
    credentials.write_text("tensorhub:let-me-in")
    cluster = RunningCluster(tmp_path / "nodes", users)
    cluster.start()
    try:
        async with await connect(
            cluster.urls, name="test", credentials=credentials, tls=TlsFiles(pem), timeout_s=ELECTED_S_MAX
        ) as bus:
            left = cluster.node_of(bus)
            left.signal(signal.SIGSTOP)
            await moved(cluster, bus, left)
    finally:
        cluster.kill()
