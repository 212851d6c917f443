"""Registries and a deleted job: one is killed at any moment of it, and a name that begins anew is followed."""

import asyncio
import random

import msgspec
import pytest
from tests.integration.registry.conftest import MakeRegistry, OpenJob, WatchedJob, until
from tests.kit.nats import RunningNats

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import NoAnswer, NoBus, NoResponder, StreamFailure
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.job_log import open_job as open_log
from tensorhub_common.jetstream.snapshot_store import SnapshotStore
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.log.commands import DeleteJob, Publish
from tensorhub_common.protocol.log.events import CommandRejected, JobDeleted
from tensorhub_common.protocol.queries import JobForgotten, JobOpened, QueryError

WISH = Publish(model="policy", replica="nobody")
KILLED_WITHIN_S = 0.06
"""From the command to the last step of clearing up it takes about 30 ms."""


async def ask(bus: Bus, job: str, what: str) -> JobOpened | JobForgotten | QueryError:
    """Ask until a registry answers."""
    found: list[bytes] = []

    async def is_answered() -> bool:
        try:
            found.append(await bus.request(subjects.query_subject(job, what), b"", 5.0))
        except (NoResponder, NoAnswer, NoBus):
            return False
        return True

    await until(is_answered, f"{what!r} is answered")
    return msgspec.json.decode(found[0], type=JobOpened | JobForgotten | QueryError)


async def is_there(bus: Bus, stream: str) -> bool:
    try:
        await api.api(bus, f"STREAM.INFO.{stream}")
    except StreamFailure as failure:
        if failure.err_code == api.STREAM_NOT_FOUND:
            return False
        raise
    return True


async def wait_cleared(bus: Bus, watched: WatchedJob, deleted: int) -> None:
    """Wait until the log begins with the command, a snapshot sums it up, and the blobs are gone."""

    async def is_cleared() -> bool:
        extent = await watched.log.extent()
        index = await SnapshotStore(bus, watched.name).index(extent.created)
        summed = index is not None and index.newer.seq >= deleted
        return extent.first == deleted and summed and not await is_there(bus, subjects.blob_stream(watched.name))

    await until(is_cleared, f"job {watched.name} is cleared up")


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_the_next_registry_ends_what_one_began(
    seed: int, own_nats_server: RunningNats, own_bus: Bus, registry_on: MakeRegistry, open_job: OpenJob, job: str
) -> None:
    """Killed a moment after the command, again and again: at the end there is one event and a cleared-up job."""
    chance = random.Random(seed)
    for number in range(5):
        registry = registry_on(own_nats_server.url, TENSORHUB_LEADER_TTL_S="1")
        await registry.start()
        watched = await open_job(own_bus, f"{job}-{number}")
        await watched.outcome(await watched.say(WISH))
        deleted = await watched.say(DeleteJob())
        await asyncio.sleep(chance.random() * KILLED_WITHIN_S)
        await registry.kill()
        late = await watched.say(WISH)
        await registry.start()
        [event] = await watched.outcome(deleted)
        assert isinstance(event, JobDeleted)
        [refusal] = await watched.outcome(late)
        assert isinstance(refusal, CommandRejected)
        assert refusal.error == "JobGone"
        await wait_cleared(own_bus, watched, deleted)
        await registry.kill()


@pytest.mark.slow
async def test_a_standby_follows_into_the_new_job(
    own_nats_server: RunningNats, own_bus: Bus, registry_on: MakeRegistry, open_job: OpenJob, job: str
) -> None:
    """Deleted, forgotten, opened anew, and its leader killed: the one that has seen all of it goes on."""
    pair = [registry_on(own_nats_server.url, name, TENSORHUB_LEADER_TTL_S="1") for name in ("one", "two")]
    for registry in pair:
        await registry.start()
        await registry.wait_ready(own_bus)
    watched = await open_job(own_bus, job)
    await watched.outcome(await watched.say(WISH))
    await watched.outcome(await watched.say(DeleteJob()))
    await watched.close()
    answer = await ask(own_bus, job, "open")
    assert isinstance(answer, QueryError)
    assert answer.error == "JobGone"
    assert await ask(own_bus, job, "forget") == JobForgotten(job=job)
    for stream in (subjects.log_stream(job), subjects.snapshot_stream(job), subjects.blob_stream(job)):
        assert not await is_there(own_bus, stream)
    again = await open_job(own_bus, job)
    await again.outcome(await again.say(WISH))
    assert (await again.log.extent()).first == 1, "the log of the deleted job is trimmed, and begins later"
    await pair[0].kill()
    await again.outcome(await again.say(WISH))
    await again.wait_settled()
    assert "the job is set aside" not in pair[1].log.read_text()


@pytest.mark.long
async def test_what_is_left_of_a_deleted_job_is_small(
    own_nats_server: RunningNats, own_bus: Bus, registry_on: MakeRegistry, open_job: OpenJob, job: str
) -> None:
    """A long log becomes two entries; a registry that starts then refuses the job as the one before did."""
    registry = registry_on(own_nats_server.url)
    await registry.start()
    watched = await open_job(own_bus, job)
    for _ in range(100):
        await watched.say(WISH)
    await watched.wait_settled()
    deleted = await watched.say(DeleteJob())
    await watched.outcome(deleted)
    await wait_cleared(own_bus, watched, deleted)
    extent = await watched.log.extent()
    assert extent.last - extent.first + 1 == len(("delete_job", "job.deleted"))
    await registry.kill()
    await registry.start()
    await watched.outcome(await watched.say(WISH))
    answer = await ask(own_bus, job, "open")
    assert isinstance(answer, QueryError)
    assert answer.error == "JobGone"
    # A log that is not deleted is not forgotten.
    await open_job(own_bus, f"{job}-2")
    await open_log(own_bus, f"{job}-2")
    refused = await ask(own_bus, f"{job}-2", "forget")
    assert isinstance(refused, QueryError)
    assert refused.error == "BadCommand"
