"""A hub of real processes with a client or an agent that breaks rules: others go on, and no process lies for it."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec
import pytest
import pytest_asyncio
import torch
from tests.kit.hubs import RunningHub, new_job
from tests.kit.tensors import full, shown
from tests.kit.waiting import retried

import tensorhub
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import Busy, NoAnswer
from tensorhub_common.bus.message import Message
from tensorhub_common.errors import BadCommand
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.leases import LeaseAnswer, LeaseGrant, LeaseRequest
from tensorhub_common.protocol.log.codec import read_event
from tensorhub_common.protocol.log.commands import PROTOCOL
from tensorhub_common.protocol.plans import SourceId
from tensorhub_common.protocol.worker import FRAME_BYTES_MAX, Attach, ReleaseCall
from tensorhub_common.runtime.framed_socket import FramedSocket, PeerGone
from tensorhub_common.runtime.framed_socket import connect as connect_socket

pytestmark = pytest.mark.asyncio(loop_scope="session")
BOUND_S: Final = 60.0
COMMANDS: Final = 3_000


@pytest_asyncio.fixture(loop_scope="session")
async def client(hub: RunningHub) -> AsyncIterator[Bus]:
    async with await hub.bus() as bus:
        yield bus


async def use(hub: RunningHub) -> None:
    async with hub.pair(full(9)) as it:
        assert await it.trainer.publish() == 1
        assert await it.engine.replicate() == 1
        assert shown(it.engine) == {9.0}
        assert await it.versions() == {1: "available"}


@pytest.mark.long
async def test_all_of_it_works_under_permissions(hub: RunningHub) -> None:
    """No process of a hub asks for what it may not; the registry's and the agents' logs would say so."""
    await use(hub)
    for process in ("registry-0", "planner-0", "agent-0", "agent-1"):
        assert "does not permit" not in hub.log(process)
    assert "Permissions Violation" not in hub.log("nats")


async def outcome_of(bus: Bus, job: str, seq: int) -> str:
    async with asyncio.timeout(BOUND_S):
        events: list[dict[str, str]] = []
        while not events:
            answer = await bus.request(subjects.query_subject(job, "outcome"), json.dumps({"seq": seq}).encode())
            events = json.loads(answer)["events"]
        return events[0]["kind"]


async def test_a_reply_to_a_foreign_subject(hub: RunningHub, client: Bus) -> None:
    """Neither a command's header nor a question's reply subject makes the registry speak where its asker may not."""
    job, victim = new_job(), new_job()
    async with hub.registry(job) as registry:
        await registry.open_job()
    async with await hub.bus(hub.admin_key) as admin:
        async with hub.registry(victim, hub.admin_key) as registry:
            await registry.open_job()
        foreign = subjects.event(victim, "m", "version", "published")
        # The first entry says who leads, and the registry answers that in its own time.
        await outcome_of(admin, victim, 1)
        before = (await JobLog(admin, victim).extent()).last
        heard: list[Message] = []

        await admin.subscribe(f"{subjects.PREFIX}.{victim}.>", heard.append)
        log = JobLog(client, job)
        for number, wanted in enumerate(
            (foreign, subjects.command_subject(victim, "publish"), "$JS.API.STREAM.DELETE.TENSORHUB_x")
        ):
            seq = await log.append(
                subjects.command_subject(job, "publish"), b"{}", f"foreign-{number}", {"Tensorhub-Reply-To": wanted}
            )
        await client.publish(subjects.query_subject(job, "status"), reply=foreign)
        # The registry goes through its questions and the log in order: by now it would have spoken.
        assert await outcome_of(client, job, seq) == "command.rejected"
        await admin.publish(subjects.query_subject(victim, "nobody"))
        await admin.request("$JS.API.INFO")
        assert [message.subject for message in heard] == [subjects.query_subject(victim, "nobody")]
        assert (await JobLog(admin, victim).extent()).last == before
    log_text = hub.log("registry-0")
    assert log_text.count("an outcome was wanted on a subject that is no inbox") == 1
    assert "which is no inbox, and gets none" in log_text


async def test_what_jetstream_relays_is_no_agents_command(hub: RunningHub, client: Bus) -> None:
    """An agent has JetStream answer on another's command subject: the log takes it, and no fold does."""
    job = new_job()
    key = Path(hub.file.credentials).parent / "agents/agent-1.nk"
    async with hub.connected(job) as (here, _), await hub.bus(key) as other:
        trainer = await here.register("m", {"w": torch.ones(9)}, replica="trainer")
        assert await trainer.publish() == 1
        incarnation = (await hub.agent_info(job, "agent-0")).incarnation
        by = {"lane": "agent-0/m/trainer/0", "incarnation": incarnation, "n": 1_000_000}
        release = {"verb": "release", "model": "m", "replica": "trainer", "shard": 0, "by": by}
        chunk = subjects.blob(job, "0" * 64, 0)
        await api.store(other, chunk, json.dumps(release).encode())
        last = await JobLog(other, job).last_seq()
        question = json.dumps({"last_by_subj": chunk}).encode()
        lookup = f"$JS.API.DIRECT.GET.{subjects.blob_stream(job)}"
        await other.publish(lookup, question, reply=subjects.command_subject(job, "release", "agent-0"))
        async with asyncio.timeout(BOUND_S):
            async for entry in JobLog(client, job).follow(last + 1):
                if ".cmd." in entry.subject:
                    assert (entry.subject, entry.data) == (subjects.command_subject(job, "release", "agent-0"), b"")
                    assert not entry.headers
                else:
                    assert "command.rejected" in entry.subject
                    break
        # The shard stands, published as it was.
        assert [each.holders for each in await here.versions("m")] == [("trainer",)]
        await trainer.unpublish()


@pytest.mark.long
async def test_a_lease_in_the_name_of_another(hub: RunningHub) -> None:
    """NATS says who asks, so no agent is given a ticket that is another's; and no ticket stands in a log."""
    async with hub.pair(full(1)) as it, await hub.bus(Path(hub.file.credentials).parent / "agents/agent-1.nk") as bus:
        await it.trainer.publish(1)
        source = SourceId("agent-0", (await hub.agent_info(it.job, "agent-0")).incarnation, "trainer", 0)

        async def answer(reader: str) -> LeaseAnswer:
            me = SourceId(reader, 1, "engine", 0)
            ask = LeaseRequest(job=it.job, model="m", source=source, version=1, root=None, reader=me, transport="local")
            said = await bus.request(subjects.agent_ask("agent-0", "lease", "agent-1"), msgspec.msgpack.encode(ask))
            found: LeaseAnswer = msgspec.msgpack.decode(said, type=LeaseAnswer)
            return found

        with pytest.raises(BadCommand, match="in the name of 'agent-7'"):
            await answer("agent-7")
        grant = await answer("agent-1")
        assert isinstance(grant, LeaseGrant), grant
        assert grant.ticket not in hub.log("agent-0")


@pytest.mark.long
async def test_what_jetstream_answers_on_an_events_subject_stops_nothing(hub: RunningHub, client: Bus) -> None:
    """A job's client has each kind of answer stored there, and over the lease: all goes on, and it is logged once."""
    job = new_job()
    stream = subjects.log_stream(job)
    async with hub.connected(job) as (here, there):
        trainer = await here.register("m", {"w": torch.ones(9)}, replica="trainer")
        reader = await there.register("m", {"w": torch.zeros(9)}, replica="reader")
        watching = asyncio.create_task(_versions_seen(here, 20))
        consumer = {"name": "strange", "ack_policy": "none", "mem_storage": True, "num_replicas": 1}
        create = f"CONSUMER.CREATE.{stream}.strange"
        await api.api(client, create, {"stream_name": stream, "config": consumer})
        questions = (
            (subjects.command_subject(job, "publish"), b"{}"),
            ("$JS.API.INFO", b""),
            (f"$JS.API.STREAM.INFO.{stream}", b""),
            (f"$JS.API.DIRECT.GET.{stream}", b'{"seq":1}'),
            (f"$JS.API.DIRECT.GET.{stream}", b'{"seq":1000000}'),
            (f"$JS.API.CONSUMER.MSG.NEXT.{stream}.strange", b'{"batch":9,"no_wait":true}'),
        )
        foreign = subjects.event(job, "m", "version", "published")
        for version in range(1, 21):
            for question, body in questions:
                await client.publish(question, body, reply=foreign)
            if version == 10:
                await client.publish("$JS.API.INFO", b"", reply="$KV.tensorhub.registry")
            assert await trainer.publish(version) == version
            assert await reader.replicate("latest") == version
            await trainer.unpublish()
        assert await asyncio.wait_for(watching, BOUND_S) == list(range(1, 21))
        log = JobLog(client, job)
        last, foreign_entries = await log.last_seq(), 0
        async with asyncio.timeout(BOUND_S):
            async for entry in log.follow():
                foreign_entries += ".event." in entry.subject and read_event(entry.data) is None
                if entry.seq >= last:
                    break
        assert foreign_entries >= 20 * 2
        # A registry that begins later reads the same.
        hub.kill("registry-0")
        assert await trainer.publish(21, timeout_s=3 * BOUND_S) == 21
    log_text = hub.log("registry-0")
    assert "the job is set aside" not in log_text
    assert f"job={job}" in next(line for line in log_text.splitlines() if "is no event" in line)


async def _versions_seen(hub: tensorhub.AsyncHub, count: int) -> list[int | None]:
    seen: list[int | None] = []
    async for event in hub.watch("m", kinds=("version.published",)):
        seen.append(event.version)
        if len(seen) == count:
            break
    return seen


async def test_a_flood_of_commands(hub: RunningHub, client: Bus) -> None:
    """A job whose log is filled with nonsense holds up no other, and answers sense when it has read it."""
    job = new_job()
    async with hub.registry(job) as registry:
        await registry.open_job()
        for _ in range(COMMANDS):
            await client.publish(subjects.command_subject(job, "publish"), b'{"verb":"publish"')
        await use(hub)
        status = await retried(registry.status, Busy, NoAnswer, timeout_s=2 * BOUND_S)
        assert status.models == ()


@pytest.mark.long
async def test_a_flood_of_frames(hub: RunningHub) -> None:
    """A worker that sends and does not read keeps the agent from no other worker, and is cut off."""
    framed: FramedSocket = await connect_socket(Path(hub.file.agents[0].socket), FRAME_BYTES_MAX, BOUND_S)
    await framed.send(msgspec.msgpack.encode(Attach(protocol=PROTOCOL, job=new_job())))
    frame = msgspec.msgpack.encode(ReleaseCall(call=1, timeout_s=1.0, handle=7))

    async def flood() -> None:
        while True:
            await framed.send(frame)

    flooding = asyncio.create_task(flood())
    async with asyncio.timeout(BOUND_S):
        await use(hub)
        with pytest.raises(PeerGone):
            await flooding
    framed.close()
