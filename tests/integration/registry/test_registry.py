"""A registry process over a real NATS: what it answers, and what no message can make it do."""

import asyncio

import msgspec
import pytest
from tests.bounds import WAIT_S
from tests.integration.registry.conftest import MakeRegistry, OpenJob, RunningRegistry, WatchedJob
from tests.kit.nats import RunningNats

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import LogFull
from tensorhub_common.bus.message import Message
from tensorhub_common.jetstream import api
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.log.commands import Join, Publish, Ready, Register, Sender
from tensorhub_common.protocol.log.events import (
    AgentJoined,
    AnyEvent,
    CommandRejected,
    RegistryLeads,
    VersionPublished,
)
from tensorhub_common.protocol.queries import Outcome, QueryError, Replicas, Status, Story, Versions

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
JOIN = Join(by=Sender("a", 1, 1), host="h", site="s")
REGISTER = Register(
    by=Sender("a", 1, 2), model="policy", replica="trainer", shard=0, shards=1, layout="b" * 64, nbytes=8
)
READY = Ready(by=Sender("a", 1, 3), model="policy", replica="trainer", shard=0, version=12, root="a" * 32)
WISH = Publish(model="policy", replica="trainer")


@pytest.fixture
async def registry(own_nats_server: RunningNats, own_bus: Bus, registry_on: MakeRegistry) -> RunningRegistry:
    registry = registry_on(own_nats_server.url, TENSORHUB_BEAT_S="0.1", TENSORHUB_LOST_AFTER_S="1")
    await registry.start()
    await registry.wait_ready(own_bus)
    return registry


@pytest.fixture
async def watched(registry: RunningRegistry, own_bus: Bus, job: str, open_job: OpenJob) -> WatchedJob:
    return await open_job(own_bus, job)


async def ask(watched: WatchedJob, what: str, body: bytes, kind: type) -> object:
    answer = await watched.bus.request(subjects.query_subject(watched.name, what), body, 5.0)
    return msgspec.json.decode(answer, type=kind)


async def test_a_publication_from_join_to_version(watched: WatchedJob) -> None:
    for command in (JOIN, REGISTER, READY):
        await watched.say(command)
    await watched.wait_settled()
    outcomes = [type(event) for event in watched.events if event.i == 1 and not isinstance(event, RegistryLeads)]
    assert outcomes[-1] is VersionPublished
    versions = await ask(watched, "versions", b'{"model":"policy"}', Versions)
    assert isinstance(versions, Versions)
    assert [(each.version, each.state, each.holders) for each in versions.versions] == [(12, "available", ("trainer",))]
    replicas = await ask(watched, "replicas", b'{"model":"policy"}', Replicas)
    assert isinstance(replicas, Replicas)
    assert [(each.replica, each.version) for each in replicas.replicas] == [("trainer", 12)]
    status = await ask(watched, "status", b"", Status)
    assert isinstance(status, Status)
    assert (status.job, status.registry, status.seq) == (watched.name, "registry-0", len(watched.entries))
    story = await ask(watched, "story", b'{"model":"policy","version":12}', Story)
    assert isinstance(story, Story)
    assert any("version.published" in line for line in story.lines)


@pytest.mark.long
async def test_the_outcome_comes_by_inbox_by_question_and_with_its_trace(watched: WatchedJob) -> None:
    inbox = watched.bus.new_inbox()
    replies: asyncio.Queue[Message] = asyncio.Queue()
    await watched.bus.subscribe(inbox, replies.put_nowait)
    seq = await watched.say(WISH, {"Tensorhub-Reply-To": inbox, "traceparent": TRACE})
    async with asyncio.timeout(WAIT_S):
        reply = await replies.get()
    events = msgspec.json.decode(reply.data, type=list[AnyEvent])
    assert events == await watched.outcome(seq)
    assert [type(event) for event in events] == [CommandRejected]
    assert reply.headers["traceparent"] == TRACE
    assert watched.entries[-1].headers["traceparent"] == TRACE
    assert await ask(watched, "outcome", b'{"seq":%d}' % seq, Outcome) == Outcome(seq=seq, events=tuple(events))
    assert await ask(watched, "outcome", b'{"seq":99999}', Outcome) == Outcome(seq=99999, events=())
    no_command = await ask(watched, "outcome", b'{"seq":%d}' % (seq + 1), QueryError)
    assert isinstance(no_command, QueryError)
    assert "no command" in no_command.message


@pytest.mark.long
@pytest.mark.parametrize(
    ("subject", "body", "error"),
    [
        ("tensorhub.v1._x.ask.open", b"", "InvalidName"),
        ("tensorhub.v1.BLOBS_x.ask.open", b"", "InvalidName"),
        ("tensorhub.v1._hub.ask.open", b"", "BadCommand"),
        ("tensorhub.v1.nobody-opened-this.ask.status", b"", "VersionUnavailable"),
    ],
)
async def test_questions_that_have_no_answer(watched: WatchedJob, subject: str, body: bytes, error: str) -> None:
    answer = msgspec.json.decode(await watched.bus.request(subject, body, 5.0), type=QueryError)
    assert answer.error == error
    assert len(answer.message) > 20


async def test_poison_is_rejected_and_nothing_else_happens(watched: WatchedJob) -> None:
    prefix = f"tensorhub.v1.{watched.name}.cmd"
    lane = b"a/" + b"0" * 5_000
    poison = [
        (f"{prefix}.publish", b"\xff" * 900_000),
        (f"{prefix}.publish", b"[" * 900_000),
        (f"{prefix}.publish", b'{"verb":"publish","model":"' + b"x" * 200_000 + b'","replica":"r"}'),
        (f"{prefix}.publish", b'{"verb":"publish","model":"_hidden","replica":"r"}'),
        (f"{prefix}.publish", b'{"verb":"publish","model":"m","replica":"r","version":' + b"9" * 5_000 + b"}"),
        (f"{prefix}.publish", b'{"verb":"publish","model":"\\ud800","replica":"\\u0000"}'),
        (f"{prefix}.a.b.c.d", b"{}"),
        (f"{prefix}.{'v' * 500}", b"{}"),
        (f"{prefix}.join.a", b'{"verb":"join","host":"h","site":"s","by":{"lane":"%s","incarnation":1,"n":1}}' % lane),
        (f"{prefix}.expire._registry", b'{"verb":"expire","agent":"a","incarnation":1,"term":9}'),
        (f"{prefix}.snowman-☃", b""),
    ]
    for number, (subject, body) in enumerate(poison):
        await watched.log.append(subject, body, f"poison-{number}")
    await watched.say(JOIN)
    await watched.wait_settled()
    # The registry's own word of who leads stands there too where the first poison was faster than the log's opening.
    *rejected, joined = [event for event in watched.events if not isinstance(event, RegistryLeads)]
    assert len(rejected) == len(poison)
    assert isinstance(joined, AgentJoined)


async def test_a_message_id_that_looks_like_an_events_takes_no_outcome_away(watched: WatchedJob) -> None:
    """JetStream knows repeats by their id in the whole stream, whoever used it first."""
    seq = await watched.log.append(
        f"tensorhub.v1.{watched.name}.cmd.publish", b'{"verb":"publish","model":"m","replica":"r"}', "2.1"
    )
    await watched.outcome(seq)
    await watched.say(WISH)
    await watched.wait_settled()


async def test_a_full_log_is_waited_for(watched: WatchedJob, registry: RunningRegistry) -> None:
    """An odd number of entries leaves no room for the last outcome; the registry says so, and goes on once there is."""
    stream = subjects.log_stream(watched.name)
    config = (await api.api(watched.bus, f"STREAM.INFO.{stream}"))["config"]
    await watched.outcome(await watched.say(WISH))
    await api.api(watched.bus, f"STREAM.UPDATE.{stream}", {**config, "max_msgs": 31})
    with pytest.raises(LogFull):
        await say_many(watched, 40)
    await registry.wait_says(f"the log of job {watched.name} takes nothing from this registry")
    await api.api(watched.bus, f"STREAM.UPDATE.{stream}", config)
    await watched.say(WISH)
    await watched.wait_settled()
    await registry.wait_says(f"the log of job {watched.name} takes what this registry says again after ")


async def say_many(watched: WatchedJob, count: int) -> None:
    for _ in range(count):
        await watched.say(WISH)


async def test_a_job_whose_log_was_deleted_can_be_opened_anew(
    watched: WatchedJob, registry: RunningRegistry, open_job: OpenJob
) -> None:
    """As long as the log is not the one that was read, the job is set aside; without a log it is forgotten."""
    await watched.outcome(await watched.say(WISH))
    await watched.close()
    await api.api(watched.bus, f"STREAM.DELETE.{subjects.log_stream(watched.name)}")
    await registry.wait_says("the job is set aside")
    again = await open_job(watched.bus, watched.name)
    await again.outcome(await again.say(WISH))
    await again.wait_settled()


async def test_of_commands_one_at_a_time_each_has_its_outcome_right_behind_it(watched: WatchedJob) -> None:
    """Nobody's next word is needed for it: the outcome comes while nothing else is said."""
    for _ in range(50):
        await watched.outcome(await watched.say(WISH))
    await watched.wait_settled()
