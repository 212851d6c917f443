"""A real NATS refuses what the table does not allow, at once and in words; what it allows goes through."""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import pytest
from tests.bounds import BUSY_S
from tests.integration.security.conftest import MINE, THEIRS, Guarded, LogIn
from tests.kit.nats import running_nats

from tensorhub.local.keyring import OF_EVERY_HUB, Keyring
from tensorhub_common.auth.keys import make_key
from tensorhub_common.auth.permissions import Role, User
from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.bus.errors import NoResponder, NotPermitted, StreamFailure
from tensorhub_common.bus.message import Message
from tensorhub_common.errors import RegistryUnavailable
from tensorhub_common.jetstream import api as jetstream_api
from tensorhub_common.jetstream.blob_store import BlobStore
from tensorhub_common.jetstream.job_log import JobLog, open_job
from tensorhub_common.jetstream.leader_lease import LeaderLease
from tensorhub_common.protocol import subjects

AT_ONCE_S: Final = 1.5
"""Far below every time-out of the bus: the server itself refuses."""
BOUND_S: Final = 60.0
AGENT, OTHER_AGENT = User(Role.AGENT, "a"), User(Role.AGENT, "b")
CLIENT, OTHER_CLIENT = User(Role.CLIENT, MINE), User(Role.CLIENT, THEIRS)
REGISTRY, PLANNER = User(Role.REGISTRY), User(Role.PLANNER)
Act = Callable[[Bus], Coroutine[Any, Any, object]]


def says(subject: str) -> Act:
    return lambda bus: bus.request(subject, b"{}", BOUND_S)


def api(verb: str) -> Act:
    return lambda bus: jetstream_api.api(bus, verb, {}, BOUND_S)


def hears(subject: str) -> Act:
    return lambda bus: bus.subscribe(subject, _ignore)


def _ignore(_: Message) -> None:
    pass


def follows(job: str) -> Act:
    async def follow(bus: Bus) -> None:
        # An agent follows events alone.
        async for _ in JobLog(bus, job).follow(1, subjects.events_of(job)):
            return

    return follow


REFUSED: dict[str, tuple[User, Act]] = {
    "an agent commands as another": (AGENT, says(subjects.command_subject(MINE, "ready", "b"))),
    "an agent beats for another": (AGENT, says(subjects.beat("b"))),
    "an agent answers for another": (AGENT, hears(subjects.agent_asks("b", "lease"))),
    "an agent writes events": (AGENT, says(subjects.event(MINE, "m", "version", "published"))),
    "an agent deletes a log": (AGENT, api(f"STREAM.DELETE.{subjects.log_stream(MINE)}")),
    "an agent takes the lease": (AGENT, says("$KV.tensorhub.registry")),
    "an agent hears all answers": (AGENT, hears("_INBOX.>")),
    "a client commands in another job": (CLIENT, says(subjects.command_subject(THEIRS, "publish"))),
    "a client opens another job": (CLIENT, says(subjects.query_subject("new", "open"))),
    "a client reads another job's log": (CLIENT, follows(THEIRS)),
    "a client looks up another job's entry": (
        CLIENT,
        lambda bus: jetstream_api.number(bus, subjects.log_stream(THEIRS), 1, BOUND_S),
    ),
    "a client lists the jobs": (CLIENT, api("STREAM.NAMES")),
    "a client writes events of its job": (CLIENT, says(subjects.event(MINE, "m", "version", "published"))),
    "a client hears the commands": (CLIENT, hears(subjects.commands_of(MINE))),
    "a planner commands": (PLANNER, says(subjects.command_subject(MINE, "publish"))),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_is_refused_at_once(what: str, log_in: LogIn, caplog: pytest.LogCaptureFixture) -> None:
    """One error at once and one line in the log; tests/unit/common/auth has all that each may do."""
    user, act = REFUSED[what]
    bus = await log_in(user)
    extents = [await JobLog(await log_in(REGISTRY), job).extent() for job in (MINE, THEIRS)]
    for _ in range(3):
        with pytest.raises(NotPermitted, match=f"does not permit {user} to .* Give it its own"):
            async with asyncio.timeout(AT_ONCE_S):
                await act(bus)
    assert [record.levelno for record in caplog.records if "does not permit" in record.message] == [logging.ERROR]
    assert [await JobLog(await log_in(REGISTRY), job).extent() for job in (MINE, THEIRS)] == extents


async def test_what_is_allowed_goes_through(log_in: LogIn) -> None:
    """Each does what its work needs, on a real server; a whole hub does all of it in `test_hub`."""
    registry, agent, client, planner = [await log_in(user) for user in (REGISTRY, AGENT, CLIENT, PLANNER)]
    await open_job(registry, MINE)
    wrote = await JobLog(registry, MINE).append(subjects.event(MINE, "m", "version", "published"), b"e", "allowed-e")
    async with LeaderLease(registry, "test", "registry-0", 1) as lease:
        assert await lease.wait(held=True, timeout_s=BOUND_S)
    assert await JobLog(agent, MINE).append(subjects.command_subject(MINE, "ready", "a"), b"a", "allowed-a")
    last = await JobLog(client, MINE).append(subjects.command_subject(MINE, "publish"), b"c", "allowed-c")
    digest = await BlobStore(agent).put(MINE, b"a layout")
    for bus in (registry, agent, client, planner):
        assert await BlobStore(bus).get(MINE, digest) == b"a layout"
        assert await JobLog(bus, MINE).last_seq() == last
        async with asyncio.timeout(BOUND_S):
            filters, end = ((subjects.events_of(MINE),), wrote) if bus is agent else ((), last)
            async for entry in JobLog(bus, MINE).follow(1, *filters):
                if entry.seq == end:
                    break
    with pytest.raises(NoResponder):
        await client.request(subjects.query_subject(MINE, "status"))
    with pytest.raises(StreamFailure, match="not found"):
        await jetstream_api.api(registry, "STREAM.PURGE.TENSORHUB_nobodys")


async def test_no_client_reads_anothers_answers(log_in: LogIn) -> None:
    """The inbox of one client can't be listened on by another, also where its name is known."""
    one, other, registry = await log_in(CLIENT), await log_in(OTHER_CLIENT), await log_in(REGISTRY)
    asked: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    async def answer(question: Message) -> bytes:
        asked.set_result(question)
        return b"for one alone"

    service = await registry.serve(subjects.asks_of_all_jobs("story"), answer)
    assert await one.request(subjects.query_subject(MINE, "story")) == b"for one alone"
    inbox = (await asked).reply
    for subject in (inbox, f"{inbox.rpartition('.')[0]}.*", f"{inbox.rpartition('.')[0]}.>"):
        with pytest.raises(NotPermitted):
            await other.subscribe(subject, _ignore)
        with pytest.raises(NotPermitted):
            await other.request(inbox, b"a forged answer", BOUND_S)
    await service.close()


@pytest.mark.parametrize("credentials", ["none", "another hub's", "damaged", "a password"])
async def test_wrong_credentials(guarded: Guarded, tmp_path: Path, credentials: str) -> None:
    """No client gets in without a key that the server knows, and no error holds a secret."""
    file = tmp_path / "key.nk"
    if credentials == "another hub's":
        make_key(file)
    elif credentials == "damaged":
        seed = guarded.keys.path_of(CLIENT).read_text()
        file.write_text(seed[:20] + ("A" if seed[20] != "A" else "B") + seed[21:])
    else:
        file.write_text("tensorhub:let-me-in")
    began = asyncio.get_running_loop().time()
    with pytest.raises(RegistryUnavailable, match=r"refuses the credentials|is damaged") as refused:
        await connect(
            guarded.server.url, name="x", credentials=None if credentials == "none" else file, timeout_s=BOUND_S
        )
    assert asyncio.get_running_loop().time() - began < BUSY_S
    assert file.read_text() not in str(refused.value)


async def test_a_key_is_renewed(tmp_path: Path) -> None:
    """The old one ends with the server's next look at its file, also where it is connected; the others go on."""
    keys = Keyring(tmp_path / "credentials")
    keys.make([*OF_EVERY_HUB, CLIENT])
    old = tmp_path / "old.nk"
    old.write_bytes(keys.path_of(CLIENT).read_bytes())
    with running_nats(tmp_path / "nats", keys.conf) as server:
        async with (
            await connect(server.url, name="other", credentials=keys.path_of(PLANNER)) as other,
            await connect(server.url, name="old", credentials=old) as stolen,
        ):
            cut = asyncio.Event()
            stolen.watch(lambda connected: None if connected else cut.set())
            since = other.connected_since
            keys.make([*OF_EVERY_HUB, CLIENT], renewed=[CLIENT])
            server.signal(signal.SIGHUP)
            await asyncio.wait_for(cut.wait(), BOUND_S)
            with pytest.raises(RegistryUnavailable, match="refuses the credentials"):
                await connect(server.url, name="old", credentials=old)
            async with await connect(server.url, name="new", credentials=keys.path_of(CLIENT)):
                assert other.connected_since == since
