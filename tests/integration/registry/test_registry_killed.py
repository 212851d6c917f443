"""Exactly one outcome per command, whatever happens to registries and NATS while commands come in."""

import asyncio
import contextlib
import random
import signal

import msgspec
import pytest
from tests.bounds import BUSY_S
from tests.integration.registry.conftest import Stage, commands, leader_of, say_all
from tests.kit.waiting import until_answer

from tensorhub_common.bus.errors import NoBus
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.heartbeat import Heartbeat
from tensorhub_common.protocol.log.events import AgentLost

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
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_nats_is_restarted(number: int, stage: Stage) -> None:
    registry = await stage.started()
    watched = await stage.open()
    saying = asyncio.create_task(say_all(watched, commands(300), 0.002))
    await watched.wait_for(lambda: len(watched.events) > 50, "the registry speaks")
    stage.nats.signal(number)
    stage.nats.kill()
    stage.nats.start()
    before = len(watched.events)
    await watched.wait_for(lambda: len(watched.events) > before, "the registry speaks again")
    await saying
    await watched.wait_settled()
    assert registry.process.returncode is None


@pytest.mark.long
async def test_a_backlog_is_published_in_batches(stage: Stage) -> None:
    registry = await stage.started()
    watched = await stage.open()
    await registry.kill()
    said = commands(2_000)
    for at in range(0, len(said), 200):
        await asyncio.gather(*(watched.say(command) for command in said[at : at + 200]))
    await registry.start()
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


@pytest.mark.slow
async def test_without_nats_it_waits_and_still_ends_in_time(stage: Stage) -> None:
    stage.nats.kill()
    registry = await stage.started()
    await registry.wait_says("waiting for NATS")
    stage.nats.start()
    watched = await stage.open()
    await watched.answered(commands(1)[0])
    await watched.wait_settled()
    stage.nats.kill()
    assert await registry.stop() == 0
    other = await stage.started("registry-1")
    await other.wait_says("waiting for NATS")
    assert await other.stop() == 0
