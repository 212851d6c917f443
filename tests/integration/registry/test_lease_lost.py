"""The lease of the registries: its store is deleted, or whoever held it sleeps for longer than it lasts."""

import asyncio
import logging
import signal

import msgspec
import pytest
from tests.bounds import WAIT_S
from tests.integration.registry.conftest import MakeRegistry, OpenJob, commands, leader_of, pair_on, until
from tests.kit.nats import RunningNats

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import StreamFailure
from tensorhub_common.bus.message import Message
from tensorhub_common.introspection.ping import ping
from tensorhub_common.jetstream import api
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.log.events import RegistryLeads
from tensorhub_common.protocol.queries import Status
from tensorhub_registry.app import leader_lease
from tensorhub_registry.app.leader_lease import LeaderLease

ASLEEP_S = 3.0
"""Longer than the lease of a second, and time enough for the other one to have it."""

TIMES_MIN, TIMES_MAX = 3, 20
"""So often the bucket is deleted: until a term has ended by it."""


@pytest.mark.long
async def test_the_bucket_of_leases_is_deleted_under_a_running_hub(
    own_nats_server: RunningNats, own_bus: Bus, registry_on: MakeRegistry, open_job: OpenJob, job: str
) -> None:
    """A registry makes it anew by itself; terms, which begin low again there, go on above the log's."""
    pair = await pair_on(registry_on, own_nats_server.url, own_bus, lease_s=1)
    watched = await open_job(own_bus, job)
    await watched.outcome(await watched.say(commands(2)[0]))
    for time, said in enumerate(commands(TIMES_MAX + 2)[1 : TIMES_MAX + 1], start=1):
        await api.api(own_bus, f"STREAM.DELETE.KV_{leader_lease.BUCKET}")

        async def is_back() -> bool:
            try:
                await api.api(own_bus, f"STREAM.INFO.KV_{leader_lease.BUCKET}")
            except StreamFailure:
                return False
            return True

        await until(is_back, "the bucket is made anew")
        await watched.outcome(await watched.say(said))

        async def leads() -> bool:
            return await leader_of(own_bus, job) is not None

        await until(leads, "a registry answers again")
        # Whoever leads may have its lease back before anybody has missed it, and then no term ends.
        if time >= TIMES_MIN and any(isinstance(event, RegistryLeads) for event in watched.events):
            break
    await watched.wait_settled()
    terms = [event.term for event in watched.events if isinstance(event, RegistryLeads)]
    assert terms, "nobody has said that it leads, so the test shows nothing"
    assert terms == sorted(set(terms))
    assert all(registry.process.returncode is None for registry in pair)


@pytest.mark.slow
async def test_who_slept_for_longer_than_its_lease_answers_nothing_of_what_it_was_asked_meanwhile(
    own_nats_server: RunningNats, own_bus: Bus, registry_on: MakeRegistry, open_job: OpenJob, job: str
) -> None:
    """The questions lie in its socket when it wakes, and what it knows is old."""
    pair = await pair_on(registry_on, own_nats_server.url, own_bus, lease_s=1)
    await open_job(own_bus, job)
    old = await leader_of(own_bus, job)
    sleeper = next(registry for registry in pair if registry.name == old)
    answers: list[str] = []
    inbox = own_bus.new_inbox()

    def take(message: Message) -> None:
        answers.append(msgspec.json.decode(message.data, type=Status).registry)

    await own_bus.subscribe(inbox, take)
    sleeper.signal(signal.SIGSTOP)
    try:
        # Not before its lease is over: until then it would be right to answer.
        await asyncio.sleep(ASLEEP_S)

        async def other_leads() -> bool:
            return await leader_of(own_bus, job) not in (None, old)

        await until(other_leads, "the other one leads")
        for _ in range(20):
            await own_bus.publish(subjects.query_subject(job, "status"), b"", reply=inbox)
    finally:
        sleeper.signal(signal.SIGCONT)

    async def is_awake() -> bool:
        return await ping(own_bus, sleeper.name) is not None

    await until(is_awake, "the sleeper is awake")
    await until(lambda: asyncio.sleep(0, len(answers) >= 20), "all questions are answered")
    assert old not in answers


async def test_a_lease_that_runs_out_during_a_long_wait_is_told_at_once(
    own_bus: Bus, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket is gone and can't be made anew: JetStream doesn't answer. Whoever held it must stop all the same."""

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    changes: asyncio.Queue[bool] = asyncio.Queue()
    async with LeaderLease(own_bus, "leader", "one", 1, bucket=job, on_change=changes.put_nowait):
        async with asyncio.timeout(WAIT_S):
            assert await changes.get()
        monkeypatch.setattr(api, "ensure_stream", never)
        await api.api(own_bus, f"STREAM.DELETE.KV_{job}")
        async with asyncio.timeout(WAIT_S):
            assert not await changes.get()


async def test_a_lease_that_nobody_can_have_here_is_told_once_with_what_to_do(
    own_bus: Bus, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Three replicas are asked of one server: that doesn't pass by itself, and without a leader nobody would say it."""

    def told() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]

    with caplog.at_level(logging.DEBUG, "tensorhub_registry.app.leader_lease"):
        async with LeaderLease(own_bus, "leader", "one", 1, bucket=job, replicas=3) as wanted:
            await until(lambda: asyncio.sleep(0, len(caplog.records) >= 3), "it is tried three times")
            assert not wanted.held
    assert len(told()) == 1
    assert "set TENSORHUB_LOG_REPLICAS=1" in told()[0]
