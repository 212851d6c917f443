"""How long a planner that was just started waits for agents' reports."""

import asyncio

import msgspec
import pytest
from tests.bounds import WAIT_S

from tensorhub_common.bus.client import MessageHandler
from tensorhub_common.bus.errors import NotPermitted
from tensorhub_common.bus.message import Message
from tensorhub_common.protocol.heartbeat import Heartbeat
from tensorhub_common.protocol.subjects import beat, beats
from tensorhub_planner.context import load_subscriber as module
from tensorhub_planner.context.load_subscriber import LoadSubscriber
from tensorhub_planner.load.ledger import LoadLedger
from tensorhub_planner.primitives.limits import PlanLimits

TURNS = 5


class FakeBus:
    """Takes one subscription; `says` is what an agent publishes."""

    def __init__(self, *, forbids: bool = False) -> None:
        self.forbids = forbids
        self.hear: MessageHandler | None = None

    async def subscribe(self, subject: str, on_message: MessageHandler) -> None:
        assert subject == beats()
        if self.forbids:
            raise NotPermitted("not for you")
        self.hear = on_message

    def says(self, agent: str, *, on: str | None = None) -> None:
        assert self.hear is not None
        self.hear(Message(beat(on or agent), "", {}, msgspec.json.encode(Heartbeat(agent=agent, incarnation=1))))


async def listening(bus: FakeBus) -> LoadSubscriber:
    made = LoadSubscriber(bus, LoadLedger(PlanLimits()))  # type: ignore[arg-type]
    await made.start()
    return made


async def some_turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only beats end a wait."""
    monkeypatch.setattr(module, "LISTEN_S", 1000.0)
    monkeypatch.setattr(module, "WAIT_S_MAX", 1000.0)


@pytest.mark.usefixtures("endless")
async def test_a_question_waits_until_each_source_has_spoken() -> None:
    bus = FakeBus()
    heard = await listening(bus)
    asked = [asyncio.create_task(heard.wait_for({"a", "b"})), asyncio.create_task(heard.wait_for({"a"}))]
    await some_turns()
    assert not any(task.done() for task in asked)
    bus.says("a")
    await some_turns()
    assert [task.done() for task in asked] == [False, True]
    bus.says("b", on="a")
    bus.says("c")
    await some_turns()
    assert not asked[0].done(), "nobody speaks for another"
    bus.says("b")
    async with asyncio.timeout(WAIT_S):
        await asked[0]
    await heard.wait_for({"a", "b"})


@pytest.mark.parametrize("bound", ["LISTEN_S", "WAIT_S_MAX", None])
@pytest.mark.usefixtures("endless")
async def test_nobody_waits_for_ever_nor_where_it_may_not_hear(
    monkeypatch: pytest.MonkeyPatch, bound: str | None
) -> None:
    """Of older hubs the users may not hear; there the planner goes by its own plans."""
    if bound is not None:
        monkeypatch.setattr(module, bound, 0.01)
    heard = await listening(FakeBus(forbids=bound is None))
    async with asyncio.timeout(WAIT_S):
        await heard.wait_for({"silent"})
