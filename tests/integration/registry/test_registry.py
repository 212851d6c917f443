"""A registry process over a real NATS: what it answers, and what no message can make it do."""

import asyncio

import msgspec
import pytest
from tests.bounds import WAIT_S
from tests.integration.registry.conftest import WISH, RunningRegistry, Stage, WatchedJob, say_all

from tensorhub_common.bus.errors import LogFull
from tensorhub_common.bus.message import Message
from tensorhub_common.jetstream import api
from tensorhub_common.protocol.log.commands import Join, Ready, Register, Sender
from tensorhub_common.protocol.log.events import AnyEvent, CommandRejected, RegistryLeads, VersionPublished
from tensorhub_common.protocol.queries import Outcome, QueryError, Replicas, Status, Story, Versions

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PUBLICATION = (
    Join(by=Sender("a", 1, 1), host="h", site="s"),
    Register(by=Sender("a", 1, 2), model="policy", replica="trainer", shard=0, shards=1, layout="b" * 64, nbytes=8),
    Ready(by=Sender("a", 1, 3), model="policy", replica="trainer", shard=0, version=12, root="a" * 32),
)


@pytest.fixture
async def registry(stage: Stage) -> RunningRegistry:
    registry = await stage.started(TENSORHUB_BEAT_S="0.1", TENSORHUB_LOST_AFTER_S="1")
    await registry.wait_ready(stage.bus)
    return registry


@pytest.fixture
async def watched(registry: RunningRegistry, stage: Stage) -> WatchedJob:
    return await stage.open()


async def test_a_publication_from_join_to_version(watched: WatchedJob) -> None:
    for command in PUBLICATION:
        await watched.say(command)
    await watched.wait_settled()
    outcomes = [type(event) for event in watched.events if event.i == 1 and not isinstance(event, RegistryLeads)]
    assert outcomes[-1] is VersionPublished
    versions = await watched.ask("versions", Versions, b'{"model":"policy"}')
    assert [(each.version, each.state, each.holders) for each in versions.versions] == [(12, "available", ("trainer",))]
    replicas = await watched.ask("replicas", Replicas, b'{"model":"policy"}')
    assert [(each.replica, each.version) for each in replicas.replicas] == [("trainer", 12)]
    status = await watched.ask("status", Status)
    assert (status.job, status.registry, status.seq) == (watched.name, "registry-0", len(watched.entries))
    story = await watched.ask("story", Story, b'{"model":"policy","version":12}')
    assert any("version.published" in line for line in story.lines)


@pytest.mark.long
async def test_the_outcome_comes_by_inbox_by_question_and_with_its_trace(watched: WatchedJob) -> None:
    inbox = watched.bus.new_inbox()
    replies: asyncio.Queue[Message] = asyncio.Queue()
    await watched.bus.subscribe(inbox, replies.put_nowait)
    seq = await watched.say(headers={"Tensorhub-Reply-To": inbox, "traceparent": TRACE})
    async with asyncio.timeout(WAIT_S):
        reply = await replies.get()
    events = msgspec.json.decode(reply.data, type=list[AnyEvent])
    assert events == await watched.outcome(seq)
    assert [type(event) for event in events] == [CommandRejected]
    assert reply.headers["traceparent"] == watched.entries[-1].headers["traceparent"] == TRACE
    assert await watched.ask("outcome", Outcome, b'{"seq":%d}' % seq) == Outcome(seq=seq, events=tuple(events))
    assert await watched.ask("outcome", Outcome, b'{"seq":99999}') == Outcome(seq=99999, events=())
    assert "no command" in (await watched.ask("outcome", QueryError, b'{"seq":%d}' % (seq + 1))).message


async def test_a_message_id_that_looks_like_an_events_takes_no_outcome_away(watched: WatchedJob) -> None:
    """JetStream knows repeats by their id in the whole stream, whoever used it first."""
    body = b'{"verb":"publish","model":"m","replica":"r"}'
    await watched.outcome(await watched.log.append(f"tensorhub.v1.{watched.name}.cmd.publish", body, "2.1"))
    await watched.say()
    await watched.wait_settled()


async def test_a_full_log_is_waited_for(watched: WatchedJob, registry: RunningRegistry) -> None:
    """An odd number of entries leaves no room for the last outcome; the registry says so, and goes on once there is."""
    stream = watched.log.stream
    config = (await api.api(watched.bus, f"STREAM.INFO.{stream}"))["config"]
    await watched.answered()
    await api.api(watched.bus, f"STREAM.UPDATE.{stream}", {**config, "max_msgs": 31})
    with pytest.raises(LogFull):
        await say_all(watched, [WISH] * 40, 0.0)
    await registry.wait_says(f"the log of job {watched.name} takes nothing from this registry")
    await api.api(watched.bus, f"STREAM.UPDATE.{stream}", config)
    await watched.say()
    await watched.wait_settled()
    await registry.wait_says(f"the log of job {watched.name} takes what this registry says again after ")


async def test_a_job_whose_log_was_deleted_can_be_opened_anew(
    watched: WatchedJob, registry: RunningRegistry, stage: Stage
) -> None:
    """As long as the log is not the one that was read, the job is set aside; without a log it is forgotten."""
    await watched.answered()
    await watched.close()
    await api.api(watched.bus, f"STREAM.DELETE.{watched.log.stream}")
    await registry.wait_says("the job is set aside")
    again = await stage.open()
    await again.answered()
    await again.wait_settled()


async def test_of_commands_one_at_a_time_each_has_its_outcome_right_behind_it(watched: WatchedJob) -> None:
    """Nobody's next word is needed for it: the outcome comes while nothing else is said."""
    for _ in range(50):
        await watched.answered()
    await watched.wait_settled()
