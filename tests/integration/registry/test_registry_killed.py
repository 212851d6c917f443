"""Exactly one outcome per command, whatever happens to registries, NATS and the lease while commands come in."""

import asyncio
import contextlib
import logging
import random
import signal

import msgspec
import pytest
from tests.bounds import BUSY_S, WAIT_S
from tests.integration.registry.conftest import Stage, commands, leader_of, say_all
from tests.kit.waiting import retried, until, until_answer

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import NoBus, StreamFailure
from tensorhub_common.bus.message import Message
from tensorhub_common.introspection.ping import ping
from tensorhub_common.jetstream import api, leader_lease
from tensorhub_common.jetstream.leader_lease import LeaderLease
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.heartbeat import Heartbeat
from tensorhub_common.protocol.log.events import AgentLost, RegistryLeads
from tensorhub_common.protocol.queries import Status

KILLS_MIN = 3


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_killed_at_random_moments(seed: int, stage: Stage) -> None:
    chance = random.Random(seed)
    registry = await stage.started()
    watched = await stage.open()
    saying = asyncio.create_task(say_all(watched, commands(600), 0.002))
    kills = 0
    while not saying.done() or kills < KILLS_MIN:
        await asyncio.sleep(chance.uniform(0.0, 0.9))
        await registry.kill()
        kills += 1
        await registry.start()
    await saying
    await watched.wait_settled()


@pytest.mark.long
async def test_two_registries_take_turns(stage: Stage) -> None:
    """The leader is stopped or killed, the other goes on when the lease has run out, and what wakes up is refused."""
    pair = await stage.pair()
    watched = await stage.open()
    enough = asyncio.Event()
    saying = asyncio.create_task(say_all(watched, commands(10_000), 0.004, enough))
    await watched.wait_for(lambda: len(watched.events) > 20, "the first one speaks")
    pair[0].signal(signal.SIGSTOP)
    await asyncio.sleep(1.5)
    pair[0].signal(signal.SIGCONT)
    await asyncio.sleep(0.3)
    await pair[1].kill()
    await asyncio.sleep(0.3)
    await pair[1].start()
    await pair[1].wait_ready(stage.bus)
    enough.set()
    await saying
    assert len(watched.entries) > 200, "too little was said to show anything"
    await watched.wait_settled()


@pytest.mark.long
async def test_a_registry_that_ends_gives_its_place_away_at_once(stage: Stage) -> None:
    """SIGTERM: soon gone, and the other speaks long before the lease would have run out."""
    pair = await stage.pair(lease_s=int(2 * BUSY_S))
    watched = await stage.open()
    await watched.answered(commands(2)[0])
    assert await pair[0].stop() == 0
    # A standby looks at the lease so many times in its life-time.
    await until_answer(
        lambda: leader_of(stage.bus, stage.job), lambda leader: leader == pair[1].name, "the other one leads", BUSY_S
    )
    await watched.answered(commands(2)[1])
    await watched.wait_settled()


@pytest.mark.long
async def test_our_own_pause_costs_no_agent_its_place(stage: Stage) -> None:
    """Stopped for longer than the window and woken up: the beats of that time were not missing, only unread."""
    registry = await stage.started(TENSORHUB_LOST_AFTER_S="1", TENSORHUB_BEAT_S="0.1")
    watched = await stage.open()

    async def beat() -> None:
        while True:
            with contextlib.suppress(NoBus):
                await stage.bus.publish(subjects.beat("a"), msgspec.json.encode(Heartbeat(agent="a", incarnation=1)))
            await asyncio.sleep(0.1)

    beating = asyncio.create_task(beat())
    await watched.answered(commands(1)[0])
    for _ in range(2):
        registry.signal(signal.SIGSTOP)
        await asyncio.sleep(1.5)
        registry.signal(signal.SIGCONT)
        await watched.answered()
        await asyncio.sleep(0.5)
    assert not any(isinstance(event, AgentLost) for event in watched.events)
    beating.cancel()
    await watched.wait_for(lambda: isinstance(watched.events[-1], AgentLost), "the agent is lost once it is silent")
    await watched.wait_settled()


ASLEEP_S = 3.0
"""Longer than the lease of a second, and time enough for the other one to have it."""

TIMES_MIN, TIMES_MAX = 3, 20
"""So often the bucket is deleted: until a term has ended by it."""


@pytest.mark.long
async def test_the_bucket_of_leases_is_deleted_under_a_running_hub(stage: Stage) -> None:
    """A registry makes it anew by itself; terms, which begin low again there, go on above the log's."""
    pair = await stage.pair()
    watched = await stage.open()
    await watched.answered(commands(2)[0])
    for time, said in enumerate(commands(TIMES_MAX + 2)[1 : TIMES_MAX + 1], start=1):
        await api.api(stage.bus, f"STREAM.DELETE.KV_{leader_lease.BUCKET}")
        await retried(lambda: api.api(stage.bus, f"STREAM.INFO.KV_{leader_lease.BUCKET}"), StreamFailure)
        await watched.answered(said)
        await until_answer(lambda: leader_of(stage.bus, stage.job), bool, "a registry answers again")
        # Whoever leads may have its lease back before anybody has missed it, and then no term ends.
        if time >= TIMES_MIN and any(isinstance(event, RegistryLeads) for event in watched.events):
            break
    await watched.wait_settled()
    terms = [event.term for event in watched.events if isinstance(event, RegistryLeads)]
    assert terms, "nobody has said that it leads, so the test shows nothing"
    assert terms == sorted(set(terms))
    assert all(registry.process.returncode is None for registry in pair)


@pytest.mark.slow
async def test_who_slept_for_longer_than_its_lease_answers_nothing_of_what_it_was_asked_meanwhile(stage: Stage) -> None:
    """The questions lie in its socket when it wakes, and what it knows is old."""
    pair = await stage.pair()
    await stage.open()
    old = await leader_of(stage.bus, stage.job)
    sleeper = next(registry for registry in pair if registry.name == old)
    answers: list[str] = []
    inbox = stage.bus.new_inbox()

    def take(message: Message) -> None:
        answers.append(msgspec.json.decode(message.data, type=Status).registry)

    await stage.bus.subscribe(inbox, take)
    sleeper.signal(signal.SIGSTOP)
    try:
        # Not before its lease is over: until then it would be right to answer.
        await asyncio.sleep(ASLEEP_S)
        await until_answer(
            lambda: leader_of(stage.bus, stage.job), lambda found: found not in (None, old), "the other one leads"
        )
        for _ in range(20):
            await stage.bus.publish(subjects.query_subject(stage.job, "status"), b"", reply=inbox)
    finally:
        sleeper.signal(signal.SIGCONT)
    await until_answer(lambda: ping(stage.bus, sleeper.name), bool, "the sleeper is awake")
    await until(lambda: len(answers) >= 20, "all questions are answered")
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
    with caplog.at_level(logging.DEBUG, "tensorhub_common.jetstream.leader_lease"):
        async with LeaderLease(own_bus, "leader", "one", 1, bucket=job, replicas=3) as wanted:
            await until(lambda: len(caplog.records) >= 3, "it is tried three times")
            assert not wanted.held
    [told] = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert "set TENSORHUB_LOG_REPLICAS=1" in told
