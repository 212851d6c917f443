"""The SDK's questions and watches, on a log whose entries the test itself wrote and with answers of its own."""

import asyncio
from collections.abc import Collection
from contextlib import aclosing

import msgspec
import pytest
from tests.bounds import WAIT_S

from tensorhub._control import registry_client
from tensorhub._control.registry_client import NatsAddress, RegistryClient
from tensorhub._control.watch import Watched, watch
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import LogMissing, LogShorter
from tensorhub_common.bus.message import Message
from tensorhub_common.jetstream.job_log import JobLog, open_job
from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.events import ReplicaReady, VersionGone, VersionPublished
from tensorhub_common.protocol.queries import Versions
from tensorhub_common.protocol.subjects import event as subject_of
from tensorhub_common.protocol.subjects import query_subject


async def written(bus: Bus, job: str) -> JobLog:
    log = await open_job(bus, job)
    for number, event in enumerate(
        (
            VersionPublished(model="policy", version=1, replica="trainer", roots=("-",), time=7.0),
            ReplicaReady(model="policy", replica="trainer", version=1),
            VersionPublished(model="other", version=5, replica="trainer", roots=("-",)),
            VersionGone(model="policy", version=1, reason="unpublished"),
        )
    ):
        noun, _, what = str(event.__struct_config__.tag).partition(".")
        await log.append(subject_of(job, event.model, noun, what), encode(event), f"{job}-{number}")
    return log


async def first(
    bus: Bus, job: str, count: int, after: int | None = None, kinds: Collection[str] | None = None
) -> list[Watched]:
    async def the_bus() -> Bus:
        return bus

    async with asyncio.timeout(WAIT_S), aclosing(watch(the_bus, job, "policy", after, kinds)) as events:
        return [await anext(events) for _ in range(count)]


async def test_a_models_events_in_order_and_on_after_what_was_seen(bus: Bus, job: str) -> None:
    with pytest.raises(LogMissing, match="there is no job"):
        await first(bus, job, 1)
    await written(bus, job)
    assert await first(bus, job, 2) == [
        Watched(seq=1, time=7.0, kind="version.published", model="policy", version=1, replica="trainer"),
        Watched(seq=4, time=0.0, kind="version.unavailable", model="policy", version=1, reason="unpublished"),
    ]
    assert [each.seq for each in await first(bus, job, 3, kinds=())] == [1, 2, 4]
    assert [each.kind for each in await first(bus, job, 1, kinds=("replica.ready",))] == ["replica.ready"]
    assert [each.seq for each in await first(bus, job, 1, after=1)] == [4]
    with pytest.raises(LogShorter):
        await first(bus, job, 1, after=99)


async def test_a_question_that_nobody_answers_is_asked_again_within_its_bound(
    bus: Bus, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registry that ended after it was asked, or that leads no more, says nothing; the next one does."""
    monkeypatch.setattr(registry_client, "ATTEMPT_S", 0.2)
    asked = 0

    answers: list[asyncio.Task[None]] = []

    def silent_at_first(question: Message) -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            answer = bus.publish(question.reply, msgspec.json.encode(Versions(versions=())))
            answers.append(asyncio.ensure_future(answer))

    await bus.subscribe(query_subject(job, "versions"), silent_at_first)
    async with RegistryClient(job, NatsAddress(bus.url)) as registry:
        assert await registry.versions("m", timeout_s=10.0) == []
    assert asked == 2
