"""Garbage on the command subjects is answered with command.rejected, and does nothing else."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
import pytest_asyncio
import torch
from tests.bounds import WAIT_S
from tests.kit.hubs import RunningHub, new_job

from tensorhub._control.registry_client import RegistryClient
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.request_server import answer_or_raise
from tensorhub_common.errors import TensorHubError
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.protocol.log.codec import decode_event
from tensorhub_common.protocol.log.events import AnyEvent, CommandRejected
from tensorhub_common.protocol.subjects import HUB, PREFIX, agent_ask, query_subject

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def bus(hub: RunningHub) -> AsyncIterator[Bus]:
    async with await hub.bus(hub.admin_key) as connected:
        yield connected


def by(lane: str, n: int = 1_000) -> str:
    return f'"by":{{"lane":"{lane}","incarnation":1,"n":{n}}}'


DEEP = b'{"a":' * 20_000
"""Nested so deeply that a decoder gives up in a way of its own."""

SHARD = '"model":"m","replica":"trainer","shard":0'
ROOT = "0" * 32
MESSAGE_MAX = 2_000
LANE = b'"by":{"lane":"a/%s","incarnation":1,"n":1}' % (b"0" * 5_000)
GARBAGE = [
    ("publish", b""),
    ("publish", b"\xff" * 900_000),
    ("publish", b"[" * 900_000),
    ("publish", b'{"verb":"publish","model":"\\ud800","replica":"\\u0000"}'),
    ("a.b.c.d", b"{}"),
    ("v" * 500, b"{}"),
    ("snowman-☃", b""),
    ("join.a", b'{"verb":"join","host":"h","site":"s",%s}' % LANE),
    ("publish", b"null"),
    ("publish", b'{"verb":"publish"}'),
    ("publish", b'{"verb":"publish","model":"m","replica":"trainer","version":6,"force":true}'),
    ("publish", b'{"verb":"publish","model":"m","replica":"trainer","version":-1}'),
    ("publish", b'{"verb":"publish","model":"*","replica":">","version":6}'),
    ("publish", b'{"verb":"publish","model":"_hub","replica":"trainer","version":6}'),
    ("publish", f'{{"verb":"publish",{by("agent-0")},"model":"m","replica":"trainer"}}'.encode()),
    ("explode", b'{"verb":"explode"}'),
    ("release", f'{{"verb":"release",{SHARD}}}'.encode()),
    ("expire", b'{"verb":"expire","agent":"agent-0","incarnation":1,"term":1}'),
    ("expire._registry", f'{{"verb":"expire",{by("_registry")},"agent":"agent-0","incarnation":9,"term":0}}'.encode()),
    ("unpublish.agent-0", f'{{"verb":"unpublish",{by("agent-1/1")},{SHARD}}}'.encode()),
    ("unpublish.agent-0", f'{{"verb":"unpublish",{by("agent-0/1")},{SHARD}}}'.encode()),
    ("ready.nobody", f'{{"verb":"ready",{by("nobody/1")},{SHARD},"version":9,"root":"{ROOT}"}}'.encode()),
    ("release.agent-0.and.more", f'{{"verb":"release",{by("agent-0")},{SHARD}}}'.encode()),
]

QUESTIONS = [
    ("plan", b"[]", "BadCommand"),
    ("plan", b'{"model": 3}', "BadCommand"),
    ("spans", b'{"trace":"../../etc/passwd"}', "BadCommand"),
    ("transfers", b'{"limit":0}', "BadCommand"),
    ("transfers", b'{"limit":1000000000}', "BadCommand"),
]
ELSEWHERE = [
    ("_x.ask.open", "InvalidName"),
    ("BLOBS_x.ask.open", "InvalidName"),
    (f"{HUB}.ask.open", "BadCommand"),
    ("nobody-opened-this.ask.status", "VersionUnavailable"),
]
"""Questions about what is no job, or none that is there."""


async def outcome_of(log: JobLog, command: int) -> list[AnyEvent]:
    found = []
    async with asyncio.timeout(WAIT_S), aclosing(log.follow(command + 1)) as entries:
        async for entry in entries:
            if ".event." in entry.subject:
                event = decode_event(entry.data)
                if event.cmd == command:
                    found.append(event)
                if event.cmd >= command and event.i == event.k:
                    return found
    raise AssertionError


async def test_garbage_on_the_command_subjects(hub: RunningHub, bus: Bus) -> None:
    """Each has one outcome, a rejection of one line; the catalog stays, and the next publication goes its way."""
    job = new_job()
    log = JobLog(bus, job)
    async with hub.connected(job) as (here, there):
        trainer = await here.register("m", {"w": torch.ones(9)}, replica="trainer")
        reader = await there.register("m", {"w": torch.zeros(9)}, replica="reader")
        await trainer.publish(5)
        before = await hub.catalog(job)
        for number, (subject, body) in enumerate(GARBAGE):
            seq = await log.append(f"{PREFIX}.{job}.cmd.{subject}", body, f"garbage-{number}")
            events = await outcome_of(log, seq)
            assert len(events) == 1, (subject, body[:80], events)
            outcome = events[0]
            assert isinstance(outcome, CommandRejected), (subject, body[:80], outcome)
            assert 0 < len(outcome.message) <= MESSAGE_MAX
            assert "\n" not in outcome.message
            assert await hub.catalog(job) == before, (subject, body[:80])
        last = await log.last_seq()
        assert await reader.replicate() == 5
        await trainer.unpublish()
        assert await trainer.publish() == 6
        assert await reader.update() == 6
        assert await log.last_seq() > last


async def test_garbage_on_the_questions(hub: RunningHub, bus: Bus) -> None:
    job = new_job()
    async with hub.connected(job) as (here, _):
        trainer = await here.register("m", {"w": torch.ones(9)}, replica="trainer")
        await trainer.publish()
        before = await hub.catalog(job)
        for subject in [
            *(query_subject(job, what) for what in ("versions", "replicas", "outcome", "story", "plan", "spans")),
            *(agent_ask("agent-0", what, "agent-1") for what in ("lease", "digests")),
        ]:
            for body in (b"", b"nonsense", b"\xff\xff", b'{"model":{}}', b"[" * 100_000, DEEP, bytes(900 * 1024)):
                await assert_refused(bus, subject, body)
        for what, sent, error in QUESTIONS:
            assert (await assert_refused(bus, query_subject(job, what), sent)) == error
        for asked, error in ELSEWHERE:
            assert (await assert_refused(bus, f"{PREFIX}.{asked}", b"")) == error
        assert await hub.catalog(job) == before
        assert [each.version for each in await here.versions("m")] == [1]


async def assert_refused(bus: Bus, subject: str, body: bytes) -> str:
    message = await bus.request_message(subject, body, 5)
    try:
        answer = answer_or_raise(message)
    except TensorHubError as why:
        code, said = why.code, str(why)
    else:
        decoded = json.loads(answer)
        assert decoded["type" if "type" in decoded else "kind"] in ("error", "refusal"), (subject, body[:40], decoded)
        code, said = decoded["error"], str(decoded.get("message") or decoded.get("reason"))
    assert 10 < len(said) < 1000, (subject, body[:40])
    assert "\n" not in said
    return str(code)


async def test_garbage_on_the_beat(hub: RunningHub, bus: Bus) -> None:
    job = new_job()
    async with hub.connected(job) as (here, there):
        await here.register("m", {"w": torch.ones(9)}, replica="here")
        await there.register("m", {"w": torch.ones(9)}, replica="there")
        before = await hub.catalog(job)
        for token in ("agent-0", "nobody"):
            for body in (b"", b"beat", b'{"agent":"agent-1","incarnation":1}', b'{"agent":7}', DEEP, bytes(900 * 1024)):
                await bus.publish(f"{PREFIX}.{HUB}.beat.{token}", body)
        assert await hub.catalog(job) == before
        await here.register("m", {"w": torch.ones(9)}, replica="trainer")
    for process in ("registry-0", "planner-0"):
        assert "handling a message" not in (hub.directory / "logs" / f"{process}.log").read_text()


async def test_events_from_outside_are_found_out(hub: RunningHub, bus: Bus) -> None:
    """Where NATS lets a client write events, a forged one stops that job, which is better than to lie; others go on."""
    job = new_job()
    async with hub.registry(job, hub.admin_key) as registry:
        await bus.request(query_subject(job, "open"))
        assert await registry.versions("m") == []
        forged = b'{"kind":"version.published","cmd":1,"i":1,"k":1,"model":"m","version":9,"replica":"x","roots":[]}'
        await JobLog(bus, job).append(f"{PREFIX}.{job}.event.m.version.published", forged, "forged")
        with pytest.raises(TensorHubError, match="another user may write events"):
            await asked_until_refused(registry)
    async with hub.connected() as (fine, _):
        assert await (await fine.register("m", {"w": torch.ones(9)}, replica="trainer")).publish() == 1


async def asked_until_refused(registry: RegistryClient) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            assert await registry.versions("m") == []
