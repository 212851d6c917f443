"""Registries and a deleted job: one is killed at any moment of it, and a name that begins anew is followed."""

import asyncio
import random

import pytest
from tests.integration.registry.conftest import Stage, WatchedJob
from tests.kit.waiting import until

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import StreamFailure
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.snapshot_store import SnapshotStore
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.log.commands import DeleteJob
from tensorhub_common.protocol.log.events import CommandRejected, JobDeleted
from tensorhub_common.protocol.queries import JobForgotten, JobOpened, QueryError

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


async def wait_cleared(bus: Bus, watched: WatchedJob, deleted: int) -> None:
    async def is_cleared() -> bool:
        extent = await watched.log.extent()
        index = await SnapshotStore(bus, watched.name).index(extent.created)
        summed = index is not None and index.newer.seq >= deleted
        return extent.first == deleted and summed and not await is_there(bus, subjects.blob_stream(watched.name))

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
    for stream in (subjects.log_stream(job), subjects.snapshot_stream(job), subjects.blob_stream(job)):
        assert not await is_there(stage.bus, stream)
    again = await stage.open()
    await again.answered()
    assert (await again.log.extent()).first == 1, "the log of the deleted job is trimmed, and begins later"
    await pair[0].kill()
    await again.answered()
    await again.wait_settled()
    assert "the job is set aside" not in pair[1].log.read_text()


@pytest.mark.long
async def test_what_is_left_of_a_deleted_job_is_small(stage: Stage) -> None:
    """A long log becomes two entries; a registry that starts then refuses the job as the one before did."""
    registry = await stage.started()
    watched = await stage.open()
    for _ in range(100):
        await watched.say()
    await watched.wait_settled()
    deleted = await watched.say(DeleteJob())
    await watched.outcome(deleted)
    await wait_cleared(stage.bus, watched, deleted)
    extent = await watched.log.extent()
    assert extent.last - extent.first + 1 == len(("delete_job", "job.deleted"))
    await registry.kill()
    await registry.start()
    await watched.answered()
    await assert_refused(watched, "open", "JobGone")
    # A log that is not deleted is not forgotten.
    await assert_refused(await stage.open(f"{stage.job}-2"), "forget", "BadCommand")
