"""A job's log that takes nothing from its registry is reported once, whoever writes: outcomes, claim, expiries."""

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import pytest
from tests.unit.registry.modelled_log import JOB, ModelledLog

from tensorhub_common.bus.errors import LogFull, NoBus, StreamFailure
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.protocol.log.commands import Join, Sender
from tensorhub_common.protocol.log.levels import NEWEST_LEVEL
from tensorhub_registry.core.liveness import ExpireAgent
from tensorhub_registry.jobs import job, term_claim
from tensorhub_registry.jobs.job import Job
from tensorhub_registry.jobs.snapshot_maker import SnapshotMaker

TRIES = 20
LOST = 5
BOUND_S = 60.0


class Bus:
    is_connected = True


class Log:
    """Fails as it is told to, until that is taken back."""

    def __init__(self, why: Exception) -> None:
        self.why: Exception | None = why
        self.failed = 0
        self.tried = asyncio.Event()
        self.took = asyncio.Event()

    async def append(self, *_: object, **__: object) -> int:
        await asyncio.sleep(0)
        if self.why is None:
            self.took.set()
            return 2
        self.failed += 1
        if self.failed == TRIES:
            self.tried.set()
        raise self.why


@pytest.fixture
async def bus(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(term_claim, "CLAIM_AGAIN_S", 0.0)
    monkeypatch.setattr(job, "RETRY_S", 0.0)
    monkeypatch.setattr(job, "FULL_RETRY_S", 0.0)
    monkeypatch.setattr("tensorhub_common.jetstream.api.is_clustered", lambda _: True)
    monkeypatch.setattr(SnapshotMaker, "make_room", lambda *_: None)
    return Bus()


@pytest.fixture
async def leading(bus: Any) -> AsyncIterator[Job]:
    """A job that is led, in whose log one command stands without its outcome."""

    async def level() -> int:
        return 0

    led = Job(bus, JOB, "registry-0", lambda _: None, lambda _: None, level, count(1))
    led.claim.begin(1)
    led.fold.handle(ModelledLog().say(Join(by=Sender("a", 1, 1), host="h", site="s")), 0.0)
    yield led
    await led.close()


async def say_all(led: Job, log: Log) -> None:
    """Say everything that a registry has to say, while the log takes none of it and then once it does."""
    for n in range(LOST):
        led._expiring.expire(ExpireAgent(JOB, f"agent-{n}", 1, 1))
    led.claim.raise_to(NEWEST_LEVEL)
    async with asyncio.timeout(BOUND_S):
        await log.tried.wait()
        for _ in range(TRIES):
            publication = led.fold.to_publish(1)
            assert publication is not None
            await led._publish(publication)
        log.why = None
        await log.took.wait()
        # The claim is tried at once, so it is not the outcome that ends the episode alone.
        await asyncio.sleep(0)
        led.claim.drop()
        publication = led.fold.to_publish(1)
        assert publication is not None
        await led._publish(publication)


@pytest.mark.parametrize("why", [LogFull("maximum bytes exceeded"), StreamFailure("refused"), NoBus("no connection")])
async def test_whatever_is_tried_and_however_often_it_is_two_lines(
    bus: Any, leading: Job, why: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While NATS is away it is none: the bus has said it."""
    bus.is_connected = not isinstance(why, NoBus)
    log = Log(why)
    monkeypatch.setattr(JobLog, "append", log.append)
    await say_all(leading, log)
    assert log.failed >= TRIES + LOST
    if not bus.is_connected:
        assert caplog.records == []
        return
    lost, back = (record.getMessage() for record in caplog.records)
    assert lost == f"the log of job {JOB} takes nothing from this registry, so it waits and is tried again: {why}"
    assert back.startswith(f"the log of job {JOB} takes what this registry says again after ")
    assert back.endswith(f" s; {log.failed} attempts failed")
