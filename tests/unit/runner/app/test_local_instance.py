"""The trainer's own engine leaves once a leader has all of its tokens, and not before; a scripted leader answers it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import torch
from tests.bounds import WAIT_S
from tests.kit.fake_engine import WEIGHT, FakeEngine
from tests.kit.waiting import until

from tensorhub_common.bus.message import Message
from tensorhub_common.protocol.rollout.entries import Attempt, RequestId
from tensorhub_common.protocol.rollout.messages import (
    AbortRequest,
    Assign,
    AssignRequest,
    Frame,
    FrameResult,
    HeartbeatResult,
    PublishedVersions,
    Report,
    ReportResult,
    RunnerHeartbeat,
    Sampling,
    VersionRule,
)
from tensorhub_runner.app import local_instance
from tensorhub_runner.app.local_instance import LocalInstance

ATTEMPT = Attempt(1, 1)
VERSIONS = PublishedVersions(1, (1,))
Handler = Callable[[Message], Awaitable[bytes]]
encode = msgspec.msgpack.encode


class Service:
    async def close(self) -> None:
        """Nothing is held."""


class ScriptedLeader:
    """A bus with a leader on it: it assigns one attempt, stops it once the runner leaves, and may keep frames."""

    def __init__(self, *, stops: bool = True) -> None:
        self._stops = stops
        self.handlers: dict[str, Handler] = {}
        self.tokens = 0
        self.has_token, self.is_leaving, self.may_answer = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.incarnation, self.is_known = 0, False

    async def serve(self, subject: str, handler: Handler, **_: object) -> Service:
        self.handlers[subject.split(".")[-2]] = handler
        return Service()

    async def request(self, subject: str, body: bytes, _: float) -> bytes:
        match subject.split(".")[-2]:
            case "beat":
                return await self._beat(msgspec.msgpack.decode(body, type=RunnerHeartbeat))
            case "report":
                msgspec.msgpack.decode(body, type=Report)
                return encode(ReportResult("log", 1, ()))
            case _:
                frame = msgspec.msgpack.decode(body, type=Frame)
                self.has_token.set()
                await self.may_answer.wait()
                self.tokens += len(frame.tokens) // 4
                return encode(FrameResult("log", 1, frame.number))

    async def _beat(self, beat: RunnerHeartbeat) -> bytes:
        assert beat.is_local
        self.incarnation, self.is_known = beat.incarnation, beat.log == "log"
        if beat.is_leaving and not self.is_leaving.is_set():
            if self._stops:
                await self.ask("abort", AbortRequest("log", 1, beat.incarnation, stop=(ATTEMPT,)))
            self.is_leaving.set()
        return encode(HeartbeatResult("log", 1, VERSIONS))

    async def ask(self, what: str, said: msgspec.Struct) -> None:
        await self.handlers[what](Message(what, "", {}, encode(said)))

    async def assign(self) -> None:
        assign = Assign(RequestId(3, 0), ATTEMPT, b"\1\0\0\0", Sampling(1 << 20, 7), VersionRule())
        await self.ask("assign", AssignRequest("log", 1, self.incarnation, VERSIONS, (assign,)))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    monkeypatch.setenv("FAKE_STEP_S", "0.001")
    module = torch.nn.Module()
    module.register_parameter(WEIGHT, torch.nn.Parameter(torch.ones(16), requires_grad=False))
    return FakeEngine(4, module, "trainer")


async def begun(leader: ScriptedLeader, engine: FakeEngine) -> LocalInstance:
    """Return an instance whose engine makes tokens of one attempt."""
    bus: Any = leader
    instance = LocalInstance(bus, "job", "policy", engine)
    await instance.start(1, "root")
    await until(lambda: leader.is_known, "it has heard of the log")
    await leader.assign()
    async with asyncio.timeout(WAIT_S):
        await leader.has_token.wait()
    return instance


async def test_it_stays_until_a_leader_has_all_of_its_tokens(engine: FakeEngine) -> None:
    leader = ScriptedLeader()
    instance = await begun(leader, engine)
    leaving = asyncio.create_task(instance.leave())
    async with asyncio.timeout(WAIT_S):
        await leader.is_leaving.wait()
    done, _ = await asyncio.wait({leaving}, timeout=0.1)
    assert not done, "its tokens are under way"
    leader.may_answer.set()
    async with asyncio.timeout(WAIT_S):
        await leaving
    assert leader.tokens == instance.tokens > 0
    assert not engine.has_work


async def test_a_leader_that_takes_nothing_over_does_not_keep_it(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_instance, "LEAVE_S_MAX", 0.1)
    instance = await begun(ScriptedLeader(stops=False), engine)
    async with asyncio.timeout(WAIT_S):
        await instance.leave()
    assert not engine.has_work
    assert not engine.step(), "the engine has nothing of it"
