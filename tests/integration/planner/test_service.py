"""The planner on a real log: it answers by what stands there and by who reads from whom, at once or with a bound."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from tests.bounds import WAIT_S
from tests.integration.planner.conftest import MODEL, Job, begun, source
from tests.kit.nats import RunningNats
from tests.kit.waiting import retried, until, until_answer

from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.errors import TensorHubError
from tensorhub_common.introspection.ping import ping
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.heartbeat import Heartbeat, ServingLoad
from tensorhub_common.protocol.log.commands import Unpublish
from tensorhub_common.protocol.log.events import Event
from tensorhub_common.protocol.plans import Plan, PlanAnswer, PlanRequest, Refusal
from tensorhub_common.protocol.queries import Health
from tensorhub_common.protocol.subjects import hub_ask, query_subject
from tensorhub_planner.app.service import PlannerService
from tensorhub_planner.primitives.limits import PlanLimits


@asynccontextmanager
async def planning(url: str, name: str = "planner-0") -> AsyncIterator[PlannerService]:
    """Run a planner until the end of the block; it must not have ended by itself."""
    async with await connect(url, name=name) as bus:
        planner = PlannerService(bus, PlanLimits(), name)
        running = asyncio.create_task(planner.run())
        await until(lambda: running.done() or ping(bus, name, 0.5), f"{name} answers")
        assert not running.done(), running.result()
        yield planner
        assert not running.done(), running.exception()
        running.cancel()
        await planner.close()


@pytest.fixture
async def planner(nats_server: RunningNats) -> AsyncIterator[PlannerService]:
    async with planning(nats_server.url) as made:
        yield made


async def test_a_plan_from_the_log(planner: PlannerService, world: Job) -> None:
    """Asked right after the last command: the planner folds up to it first."""
    found = await world.plan("rollout")
    (share,) = found.shares
    assert found.version == 1
    assert share.source == source("trainer")
    assert share.transport == "ucxx"
    assert share.pieces == ((0, 16),)
    assert share.nbytes == 64 * 1024 * 1024
    assert "1 of 1 source on the same site" in found.why


MakePlan = Callable[[str, PlanRequest], Awaitable[PlanAnswer]]


def counted(make_plan: MakePlan, answered: Counter[int], which: int) -> MakePlan:
    async def counting(job: str, demand: PlanRequest) -> PlanAnswer:
        answer = await make_plan(job, demand)
        # One that is behind in the log is asked again.
        answered[which] += isinstance(answer, Plan)
        return answer

    return counting


async def test_several_planners_share_the_questions(
    planner: PlannerService, nats_server: RunningNats, world: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question has one answer, and both planners give some."""
    async with planning(nats_server.url, "planner-1") as other:
        answered = Counter[int]()
        for each in (planner, other):
            monkeypatch.setattr(each, "_answer", counted(each._answer, answered, id(each)))
        plans = await asyncio.gather(*(world.plan("rollout") for _ in range(40)))
        assert len(plans) == 40
        assert answered.total() == 40
        assert len(answered) == 2


async def test_nats_restarts(own_nats_server: RunningNats, own_bus: Bus, job: str) -> None:
    """The planner goes on where it was, and sees what was said since."""
    world = await begun(own_bus, job)
    async with planning(own_nats_server.url):
        assert (await world.plan("rollout")).shares
        own_nats_server.restart()
        await own_bus.wait_connected(WAIT_S)
        await world.say("trainer", Unpublish(model=MODEL, replica="trainer", shard=0))
        # Its subscription comes back by itself a moment after the server, and its follower after that.
        answer = await until_answer(
            lambda: retried(lambda: world.ask(world.demand("rollout")), TensorHubError),
            lambda found: getattr(found, "error", "") == "VersionUnavailable",
        )
        assert isinstance(answer, Refusal)
        assert "is draining" in answer.reason


async def test_a_job_whose_fold_fails_is_set_aside_and_the_others_are_planned(
    own_nats_server: RunningNats, own_bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner says so to whoever reads in that job, and to whoever asks how it gets on."""

    def apply_or_fail(catalog: Catalog, seq: int, *rest: Any) -> tuple[Event, ...]:
        if catalog.job == "broken":
            raise KeyError("a fault of ours")
        return apply(catalog, seq, *rest)

    monkeypatch.setattr("tensorhub_planner.catalog_view.catalog_replica.apply", apply_or_fail)
    well, broken = await begun(own_bus, "well"), await begun(own_bus, "broken")

    async def health(subject: str) -> Health:
        return msgspec.json.decode(await own_bus.request(subject), type=Health)

    async with planning(own_nats_server.url):
        reason = await broken.refused(broken.demand("rollout"), "RegistryUnavailable")
        assert "can't be folded: KeyError('a fault of ours')" in reason
        assert (await well.plan("rollout")).version == 1
        of_hub = await health(hub_ask("health.planner"))
        assert (of_hub.id, of_hub.role, of_hub.ailing) == ("planner-0", "planner", 1)
        assert [each.job for each in of_hub.jobs] == [broken.name]
        (of_broken,) = (await health(query_subject(broken.name, "health.planner"))).jobs
        (of_well,) = (await health(query_subject(well.name, "health.planner"))).jobs
        assert (of_broken.state, of_well.state) == ("set-aside", "well")
        assert of_broken.again_at > of_broken.since > 0


HOLDERS = ("trainer", "second")


async def beats(bus: Bus, agent: str, readers: int, *, on: str | None = None) -> None:
    said = Heartbeat(agent=agent, incarnation=1, serving=(ServingLoad("ucxx", readers, 0),) if readers else ())
    await bus.publish(subjects.beat(on or agent), msgspec.json.encode(said))


async def most_from(job: Job, replica: str) -> str:
    plan = await job.plan(replica)
    return max(plan.shares, key=lambda share: share.nbytes).source.agent


@pytest.fixture
async def two(world: Job) -> Job:
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
    def is_heard() -> bool:
        ledger = planner.ledger
        return (
            not ledger.reports.unheard((agent,), time.monotonic())
            and ledger.busy((agent, "ucxx"), time.monotonic()).readers == readers
        )

    await until(is_heard)
