"""The planner as a process: how it begins, and how it ends."""

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from tests.integration.planner.conftest import Job, begun
from tests.kit.nats import RunningNats
from tests.kit.services import RunningService

from tensorhub_common.bus.connection import Bus
from tensorhub_common.introspection.ping import ping
from tensorhub_common.jetstream import api

START_S_MAX = 60.0
Start = Callable[[str | None], Awaitable[RunningService]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start planners; whatever still runs at the end is killed."""
    started: list[RunningService] = []

    async def begin(nats: str | None) -> RunningService:
        log, more = tmp_path / f"stderr-{len(started)}", {"TENSORHUB_LOG_FORMAT": "json"}
        started.append(RunningService(nats, "planner-7", log, module="tensorhub_planner", **more))
        await started[-1].start()
        return started[-1]

    yield begin
    for each in started:
        await each.kill()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it(start: Start, nats_server: RunningNats, world: Job, number: int) -> None:
    process = await start(nats_server.url)
    await process.wait_says('"ready"')
    pong = await ping(world.bus, "planner-7")
    assert pong is not None
    assert pong.role == "planner"
    assert (await world.plan("rollout")).shares
    assert await process.stop(number) == 0, process.log.read_text()
    assert "Traceback" not in process.log.read_text()


@pytest.mark.long
async def test_a_signal_ends_it_while_nats_hangs(start: Start, own_nats_server: RunningNats) -> None:
    """A server that takes everything and answers nothing is the worst of its kinds."""
    process = await start(own_nats_server.url)
    await process.wait_says('"ready"')
    own_nats_server.signal(signal.SIGSTOP)
    assert await process.stop() == 0, process.log.read_text()
    own_nats_server.signal(signal.SIGCONT)


@pytest.mark.long
async def test_it_waits_for_nats(start: Start, own_nats_server: RunningNats) -> None:
    """It may be up before NATS, and ends in good order then too."""
    own_nats_server.kill()
    process, other = await start(own_nats_server.url), await start(own_nats_server.url)
    await process.wait_says("waiting for NATS")
    await other.wait_says("waiting for NATS")
    assert await other.stop() == 0, other.log.read_text()
    own_nats_server.start()
    await process.wait_says('"ready"')


@pytest.mark.long
async def test_a_log_that_was_deleted_stops_that_job_alone(
    start: Start, own_nats_server: RunningNats, own_bus: Bus
) -> None:
    """It is said in the planner's log; questions about other jobs are answered as before."""
    world, other = await begun(own_bus, "run-7"), await begun(own_bus, "run-8")
    process = await start(own_nats_server.url)
    await process.wait_says('"ready"')
    await world.ask(world.demand("trainer"))
    await api.api(own_bus, f"STREAM.DELETE.{world.log.stream}")
    await process.wait_says("log was deleted")
    await other.ask(other.demand("trainer"))
    assert "Traceback" not in process.log.read_text()


@pytest.mark.long
@pytest.mark.parametrize("nats", [None, "http://nowhere"])
async def test_wrong_usage(start: Start, nats: str | None) -> None:
    process = await start(nats)
    assert await process.ended(START_S_MAX) == 2
    assert process.log.read_text().startswith("tensorhub-planner: TENSORHUB_NATS")
    assert len(process.log.read_text().splitlines()) == 1


def test_it_is_light() -> None:
    """A host that only plans needs neither torch nor numpy nor anything of CUDA."""
    code = "import sys, tensorhub_planner.app.main; print(sorted({'torch','numpy','cupy','ucxx'} & sys.modules.keys()))"
    assert subprocess.run((sys.executable, "-c", code), capture_output=True, check=True, text=True).stdout == "[]\n"
