"""A registry process over a real NATS: what it answers, what no message can make it do, and jobs that are deleted."""

import asyncio
import random

import msgspec
import pytest
from tests.bounds import WAIT_S
from tests.integration.registry.conftest import WISH, Stage, WatchedJob, say_all
from tests.kit.services import RunningService
from tests.kit.waiting import until

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import LogFull, StreamFailure
from tensorhub_common.bus.message import Message
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.payload_store import PayloadStore
from tensorhub_common.jetstream.rollout_log import RolloutLog
from tensorhub_common.jetstream.snapshot_store import SnapshotStore
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.log.commands import DeleteJob, Join, Ready, Register, Sender
from tensorhub_common.protocol.log.events import AnyEvent, CommandRejected, JobDeleted, RegistryLeads, VersionPublished
from tensorhub_common.protocol.queries import (
    JobForgotten,
    JobOpened,
    Outcome,
    QueryError,
    Replicas,
    Status,
    Story,
    Versions,
)
from tensorhub_common.protocol.rollout.entries import Lead

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

PUBLICATION = (
    Join(by=Sender("a", 1, 1), host="h", site="s"),
    Register(by=Sender("a", 1, 2), model="policy", replica="trainer", shard=0, shards=1, layout="b" * 64, nbytes=8),
    Ready(by=Sender("a", 1, 3), model="policy", replica="trainer", shard=0, version=12, root="a" * 32),
)


@pytest.fixture
async def registry(stage: Stage) -> RunningService:
    registry = await stage.started(TENSORHUB_BEAT_S="0.1", TENSORHUB_LOST_AFTER_S="1")
    await registry.wait_ready(stage.bus)
    return registry


@pytest.fixture
async def watched(registry: RunningService, stage: Stage) -> WatchedJob:
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


@pytest.mark.long
async def test_a_message_id_that_looks_like_an_events_takes_no_outcome_away(watched: WatchedJob) -> None:
    """JetStream knows repeats by their id in the whole stream, whoever used it first."""
    body = b'{"verb":"publish","model":"m","replica":"r"}'
    await watched.outcome(await watched.log.append(f"tensorhub.v1.{watched.name}.cmd.publish", body, "2.1"))
    await watched.say()
    await watched.wait_settled()


@pytest.mark.long
async def test_a_full_log_is_waited_for(watched: WatchedJob, registry: RunningService) -> None:
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
    watched: WatchedJob, registry: RunningService, stage: Stage
) -> None:
    """As long as the log is not the one that was read, the job is set aside; without a log it is forgotten."""
    await watched.answered()
    await watched.close()
    await api.api(watched.bus, f"STREAM.DELETE.{watched.log.stream}")
    await registry.wait_says("the job is set aside")
    again = await stage.open()
    await again.answered()
    await again.wait_settled()


@pytest.mark.long
async def test_the_streams_of_rollouts_come_and_go_with_the_job(watched: WatchedJob, stage: Stage) -> None:
    """An older release did not make them: they are made when its job is opened again, and nothing else is."""
    assert await stores_there(stage.bus, stage.job) == [stream(stage.job) for stream in STORES]
    last = await RolloutLog(stage.bus, stage.job).append(Lead(1, "rollout-0"), "m")
    await watched.answered()
    opened = JobOpened(job=stage.job)
    assert await watched.ask("open", JobOpened | QueryError) == opened
    assert await RolloutLog(stage.bus, stage.job).last_seq() == last
    await RolloutLog(stage.bus, stage.job).remove()
    await PayloadStore(stage.bus).remove(stage.job)
    assert await watched.ask("open", JobOpened | QueryError) == opened
    assert await stores_there(stage.bus, stage.job) == [stream(stage.job) for stream in STORES]
    assert await RolloutLog(stage.bus, stage.job).append(Lead(1, "rollout-0"), "m") == 1
    deleted = await watched.say(DeleteJob())
    await wait_cleared(stage.bus, watched, deleted)


async def test_a_job_goes_on_without_rollouts_where_nats_refuses_their_streams(
    registry: RunningService, stage: Stage
) -> None:
    """A stream of that name which is another's is left alone, and told once; without it the job has rollouts."""
    other = {"name": subjects.payload_stream(stage.job), "subjects": ["elsewhere"]}
    await api.api(stage.bus, f"STREAM.CREATE.{other['name']}", other)
    watched = await stage.open()
    for _ in range(3):
        assert await watched.ask("open", JobOpened | QueryError) == JobOpened(job=stage.job)
    await watched.answered()
    await registry.wait_says("the job goes on without rollouts")
    assert registry.log.read_text().count("the job goes on without rollouts") == 1
    await api.api(stage.bus, f"STREAM.DELETE.{other['name']}")
    assert await watched.ask("open", JobOpened | QueryError) == JobOpened(job=stage.job)
    assert await stores_there(stage.bus, stage.job) == [stream(stage.job) for stream in STORES]


ANSWER = JobOpened | JobForgotten | QueryError

KILLED_WITHIN_S = 0.06
"""From the command to the last step of clearing up it takes about 30 ms."""


async def assert_refused(watched: WatchedJob, what: str, error: str) -> None:
    answer = await watched.ask(what, ANSWER)
    assert isinstance(answer, QueryError)
    assert answer.error == error


async def is_there(bus: Bus, stream: str) -> bool:
    try:
        await api.api(bus, f"STREAM.INFO.{stream}")
    except StreamFailure as failure:
        if failure.err_code == api.STREAM_NOT_FOUND:
            return False
        raise
    return True


STORES = (subjects.blob_stream, subjects.rollout_stream, subjects.payload_stream)


async def stores_there(bus: Bus, job: str) -> list[str]:
    """Return which of the streams beside the job's log there are."""
    return [name for stream in STORES if await is_there(bus, name := stream(job))]


async def wait_cleared(bus: Bus, watched: WatchedJob, deleted: int) -> None:
    async def is_cleared() -> bool:
        extent = await watched.log.extent()
        index = await SnapshotStore(bus, watched.name).index(extent.created)
        summed = index is not None and index.newer.seq >= deleted
        return extent.first == deleted and summed and await stores_there(bus, watched.name) == []

    await until(is_cleared, f"job {watched.name} is cleared up")


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_the_next_registry_ends_what_one_began(seed: int, stage: Stage) -> None:
    """Killed a moment after the command, again and again: at the end there is one event and a cleared-up job."""
    chance = random.Random(seed)
    for number in range(5):
        registry = await stage.started(TENSORHUB_LEADER_TTL_S="1")
        watched = await stage.open(f"{stage.job}-{number}")
        await watched.answered()
        deleted = await watched.say(DeleteJob())
        await asyncio.sleep(chance.random() * KILLED_WITHIN_S)
        await registry.kill()
        late = await watched.say()
        await registry.start()
        [event] = await watched.outcome(deleted)
        assert isinstance(event, JobDeleted)
        [refusal] = await watched.outcome(late)
        assert isinstance(refusal, CommandRejected)
        assert refusal.error == "JobGone"
        await wait_cleared(stage.bus, watched, deleted)
        await registry.kill()


@pytest.mark.slow
async def test_a_standby_follows_into_the_new_job(stage: Stage) -> None:
    """Deleted, forgotten, opened anew, and its leader killed: the one that has seen all of it goes on."""
    pair, job = await stage.pair(), stage.job
    watched = await stage.open()
    await watched.answered()
    await watched.answered(DeleteJob())
    await watched.close()
    await assert_refused(watched, "open", "JobGone")
    assert await watched.ask("forget", ANSWER) == JobForgotten(job=job)
    for stream in (subjects.log_stream, subjects.snapshot_stream, *STORES):
        assert not await is_there(stage.bus, stream(job))
    again = await stage.open()
    await again.answered()
    assert (await again.log.extent()).first == 1, "the log of the deleted job is trimmed, and begins later"
    await pair[0].kill()
    await again.answered()
    await again.wait_settled()
    assert "the job is set aside" not in pair[1].log.read_text()
