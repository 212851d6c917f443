"""A planner hears over a real NATS who reads from whom, and plans by it."""

import asyncio
import time

import msgspec
import pytest
from tests.integration.planner.conftest import Job, source
from tests.integration.planner.test_service import planning
from tests.kit.nats import RunningNats
from tests.kit.waiting import until

from tensorhub_common.bus.connection import Bus
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.heartbeat import Heartbeat, ServingLoad
from tensorhub_planner.app.service import PlannerService

HOLDERS = ("trainer", "second")


async def beats(bus: Bus, agent: str, readers: int, *, on: str | None = None) -> None:
    said = Heartbeat(agent=agent, incarnation=1, serving=(ServingLoad("ucxx", readers, 0),) if readers else ())
    await bus.publish(subjects.beat(on or agent), msgspec.json.encode(said))


async def most_from(job: Job, replica: str) -> str:
    plan = await job.plan(replica)
    return max(plan.shares, key=lambda share: share.nbytes).source.agent


@pytest.fixture
async def two(world: Job) -> Job:
    """Both hold version 1, and three readers want it."""
    await world.register("second")
    await world.fetch("second", 1)
    for replica in ("reader", "next"):
        await world.register(replica)
    return world


@pytest.mark.parametrize("busy", HOLDERS)
async def test_a_planner_that_has_just_begun_goes_by_what_the_sources_say(
    nats_server: RunningNats, two: Job, busy: str
) -> None:
    """The waiting itself is shown in tests/unit/planner/context/test_load_subscriber.py."""
    async with planning(nats_server.url):
        asked = asyncio.create_task(most_from(two, "rollout"))
        for agent in HOLDERS:
            await beats(two.bus, agent, 6 if agent == busy else 0)
        assert await asked != busy


async def test_what_each_says_later_counts(nats_server: RunningNats, two: Job) -> None:
    """Several planners see each other's plans in this way."""
    async with planning(nats_server.url) as planner:
        for readers, replica in ((6, "rollout"), (0, "reader")):
            await beats(two.bus, "trainer", readers)
            await beats(two.bus, "second", 6 - readers)
            await told(planner, "second", 6 - readers)
            assert await most_from(two, replica) == ("second" if readers else "trainer")


async def test_nobody_speaks_for_another(nats_server: RunningNats, two: Job) -> None:
    """NATS lets an agent beat on its own subject alone, and what it says there of another one is no word."""
    async with planning(nats_server.url) as planner:
        await beats(two.bus, "trainer", 6, on="second")
        await two.bus.publish(subjects.beat("trainer"), b"no beat")
        await beats(two.bus, "second", 1)
        await told(planner, "second", 1)
        assert planner.ledger.reports.unheard(("trainer",), time.monotonic())
        assert {share.source for share in (await two.plan("rollout")).shares} <= {source(agent) for agent in HOLDERS}


async def told(planner: PlannerService, agent: str, readers: int) -> None:
    """Wait until the planner has heard this."""

    def is_heard() -> bool:
        ledger = planner.ledger
        return (
            not ledger.reports.unheard((agent,), time.monotonic())
            and ledger.busy((agent, "ucxx"), time.monotonic()).readers == readers
        )

    await until(is_heard)
