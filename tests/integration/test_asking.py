"""Questions of the SDK to whoever leads: asked again where the one who took them has fallen silent."""

import asyncio

import msgspec
import pytest

from tensorhub._control import registry_client as asking
from tensorhub._control.registry_client import NatsAddress, RegistryClient
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.message import Message
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.queries import Versions


async def test_a_question_that_nobody_answers_is_asked_again_within_its_bound(
    bus: Bus, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registry that ended after it was asked, or that leads no more, says nothing; the next one does."""
    monkeypatch.setattr(asking, "ATTEMPT_S", 0.2)
    asked = 0

    answers: list[asyncio.Task[None]] = []

    def silent_at_first(question: Message) -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            answer = bus.publish(question.reply, msgspec.json.encode(Versions(versions=())))
            answers.append(asyncio.ensure_future(answer))

    await bus.subscribe(subjects.query_subject(job, "versions"), silent_at_first)
    async with RegistryClient(job, NatsAddress(bus.url)) as registry:
        assert await registry.versions("m", timeout_s=10.0) == []
    assert asked == 2
