"""The planner as a process: how it begins, and how it ends."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.integration.planner.conftest import Job, begun
from tests.kit.nats import RunningNats
from tests.kit.waiting import until

from tensorhub_common.bus.connection import Bus
from tensorhub_common.introspection.ping import ping
from tensorhub_common.jetstream import api

END_S_MAX = 20.0
START_S_MAX = 60.0
Start = Callable[[str | None], "Process"]


class Process:
    """`python -m tensorhub_planner`, with what it wrote on stderr."""

    def __init__(self, nats: str | None, stderr: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TENSORHUB_")}
        told = {} if nats is None else {"TENSORHUB_NATS": nats}
        self._stderr = stderr
        with stderr.open("wb") as file:
            self._process = subprocess.Popen(
                (sys.executable, "-m", "tensorhub_planner"),
                env={**kept, **told, "TENSORHUB_PLANNER_ID": "planner-7", "TENSORHUB_LOG_FORMAT": "json"},
                stderr=file,
            )

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    async def says(self, words: str) -> None:
        await until(lambda: words in self.stderr or self._process.poll() is not None, f"it says {words}", START_S_MAX)
        assert words in self.stderr

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def ended(self, timeout_s: float) -> int:
        return await asyncio.to_thread(self._process.wait, timeout_s)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start planners; whatever still runs at the end is killed."""
    started: list[Process] = []

    def begin(nats: str | None) -> Process:
        started.append(Process(nats, tmp_path / f"stderr-{len(started)}"))
        return started[-1]

    yield begin
    for each in started:
        each.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it(start: Start, nats_server: RunningNats, world: Job, number: int) -> None:
    process = start(nats_server.url)
    await process.says('"ready"')
    pong = await ping(world.bus, "planner-7")
    assert pong is not None
    assert pong.role == "planner"
    assert (await world.plan("rollout")).shares
    process.signal(number)
    assert await process.ended(END_S_MAX) == 0, process.stderr
    assert "Traceback" not in process.stderr


async def test_a_signal_ends_it_while_nats_hangs(start: Start, own_nats_server: RunningNats) -> None:
    """A server that takes everything and answers nothing is the worst of its kinds."""
    process = start(own_nats_server.url)
    await process.says('"ready"')
    own_nats_server.signal(signal.SIGSTOP)
    process.signal(signal.SIGTERM)
    assert await process.ended(END_S_MAX) == 0, process.stderr
    own_nats_server.signal(signal.SIGCONT)


@pytest.mark.long
async def test_it_waits_for_nats(start: Start, own_nats_server: RunningNats) -> None:
    """It may be up before NATS, and ends in good order then too."""
    own_nats_server.kill()
    process, other = start(own_nats_server.url), start(own_nats_server.url)
    await process.says("waiting for NATS")
    await other.says("waiting for NATS")
    other.signal(signal.SIGTERM)
    assert await other.ended(END_S_MAX) == 0, other.stderr
    own_nats_server.start()
    await process.says('"ready"')


async def test_a_log_that_was_deleted_stops_that_job_alone(
    start: Start, own_nats_server: RunningNats, own_bus: Bus
) -> None:
    """It is said in the planner's log; questions about other jobs are answered as before."""
    world, other = await begun(own_bus, "run-7"), await begun(own_bus, "run-8")
    process = start(own_nats_server.url)
    await process.says('"ready"')
    await world.ask(world.demand("trainer"))
    await api.api(own_bus, f"STREAM.DELETE.{world.log.stream}")
    await process.says("log was deleted")
    await other.ask(other.demand("trainer"))
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize("nats", [None, "http://nowhere"])
async def test_wrong_usage(start: Start, nats: str | None) -> None:
    process = start(nats)
    assert await process.ended(START_S_MAX) == 2
    assert process.stderr.startswith("tensorhub-planner: TENSORHUB_NATS")
    assert len(process.stderr.splitlines()) == 1


def test_it_is_light() -> None:
    """A host that only plans needs neither torch nor numpy nor anything of CUDA."""
    code = "import sys, tensorhub_planner.app.main; print(sorted({'torch','numpy','cupy','ucxx'} & sys.modules.keys()))"
    assert subprocess.run((sys.executable, "-c", code), capture_output=True, check=True, text=True).stdout == "[]\n"
