"""A runner's core on the bus: what the leader asks and answers, and what the engine in its thread makes. I/O.

Invariant: what the core wants done is carried out in its order. What is said to the leader may be lost, since the core
says again what was not answered.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

import msgspec

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.message import Message
from tensorhub_common.bus.request_server import RequestService
from tensorhub_common.errors import TensorHubError
from tensorhub_common.machine import Tick
from tensorhub_common.observability.logs import logger
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.rollout.messages import (
    AbortAnswer,
    AbortRequest,
    AssignAnswer,
    AssignRequest,
    Frame,
    FrameResult,
    HeartbeatResult,
    Report,
    ReportResult,
    RunnerHeartbeat,
)
from tensorhub_common.runtime.supervision import Supervisor
from tensorhub_runner.app.engine_driver import EngineDriver
from tensorhub_runner.core.runner import Runner
from tensorhub_runner.core.runner_events import (
    AbortCame,
    AnswerAbort,
    AnswerAssign,
    AssignCame,
    Begin,
    EngineStepped,
    FrameAnswered,
    HeartbeatAnswered,
    ReportAnswered,
    RunnerEffect,
    RunnerInput,
    SendFrame,
    SendHeartbeat,
    SendReport,
    StepTokens,
    Stop,
)

ANSWER_S_MAX: Final = 0.5
"""What the leader has not answered by then is said again by the core."""
ASSIGNS_PENDING_MAX: Final = 256

_SILENCE: Final = b""
_log: Final = logger(__name__)

ReadAnswer = Callable[[bytes], RunnerInput]


class LeaderLink:
    """One core, its engine, and the leader of its job: `start`, and in the end `close`."""

    def __init__(self, bus: Bus, job: str, core: Runner, driver: EngineDriver, work: Supervisor) -> None:
        """Prepare. `work` has the tasks, and the caller ends them."""
        self.core, self.driver = core, driver
        driver.on_stepped = self._on_stepped
        self._bus, self._job, self._work = bus, job, work
        self._talk = work.group()
        self._encoder = msgspec.msgpack.Encoder()
        self._assigns, self._aborts = msgspec.msgpack.Decoder(AssignRequest), msgspec.msgpack.Decoder(AbortRequest)
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._services: list[RequestService] = []
        self._is_closed = False

    async def start(self) -> None:
        """Hear the leader, and say to it that this runner lives."""
        self._work.start(self.driver.run(), "driving the engine")
        for what, on_message in (("assign", self._on_assign), ("abort", self._on_abort)):
            subject = subjects.to_runner(self._job, what, self.core.name)
            self._services.append(await self._bus.serve(subject, on_message, pending_max=ASSIGNS_PENDING_MAX))
        self.tell(Tick())

    async def close(self) -> None:
        """Say and hear nothing more, and leave the engine."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for service in self._services:
            await service.close()
        await self.driver.leave(self.core.held)
        await self.driver.close()

    def tell(self, event: RunnerInput) -> None:
        """Give an event to the core, and carry out what it wants done."""
        for effect in self._handle(event):
            self._do(effect)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so of the core, which is looked at after each of its events."""
        while not is_so():
            self._changed.clear()
            await self._changed.wait()

    def look(self) -> None:
        """Have those who wait look again."""
        self._changed.set()

    def _handle(self, event: RunnerInput) -> list[RunnerEffect]:
        if self._is_closed:
            return []
        effects = self.core.handle(event, time.monotonic())
        self._changed.set()
        self._set_timer()
        return effects

    def _do(self, effect: RunnerEffect) -> None:
        match effect:
            case Begin() | Stop():
                self.driver.do(effect)
            case SendFrame(frame=frame):
                self._say("tokens", frame, _frame_answered)
            case SendReport(report=report):
                self._say("report", report, _report_answered)
            case SendHeartbeat(beat=beat):
                self._say("beat", beat, _heartbeat_answered)
            case _:
                raise AssertionError(f"{effect} answers nothing that was asked in job {self._job!r}")

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wait_s = max(0.0, self.core.deadline() - time.monotonic())
        self._timer = self._work.call_later(wait_s, self.tell, Tick(), what="what is due")

    def _on_stepped(self, made: tuple[StepTokens, ...], seconds: float) -> None:
        self.tell(EngineStepped(made, seconds))

    # ------------------------------------------------------------------------------------------ the leader

    def _say(self, what: str, said: Frame | Report | RunnerHeartbeat, read: ReadAnswer) -> None:
        subject = subjects.from_runner(self._job, what, self.core.name)
        self._talk.start(self._ask(subject, self._encoder.encode(said), read), f"saying {what}")

    async def _ask(self, subject: str, body: bytes, read: ReadAnswer) -> None:
        try:
            event = read(await self._bus.request(subject, body, ANSWER_S_MAX))
        except (TensorHubError, *MALFORMED) as why:
            _log.debug("the leader did not answer", subject=subject, why=str(why))
            return
        self.tell(event)

    async def _on_assign(self, message: Message) -> bytes:
        try:
            request = self._assigns.decode(message.data)
        except MALFORMED:
            return _SILENCE
        answer = _SILENCE
        for effect in self._handle(AssignCame(request)):
            if isinstance(effect, AnswerAssign):
                answer = self._encoder.encode(AssignAnswer(effect.results))
            else:
                self._do(effect)
        return answer

    async def _on_abort(self, message: Message) -> bytes:
        try:
            request = self._aborts.decode(message.data)
        except MALFORMED:
            return _SILENCE
        answer = _SILENCE
        for effect in self._handle(AbortCame(request)):
            if isinstance(effect, AnswerAbort):
                answer = self._encoder.encode(AbortAnswer(effect.stopped, effect.forgotten))
            else:
                self._do(effect)
        return answer


_frame_results: Final = msgspec.msgpack.Decoder(FrameResult)
_report_results: Final = msgspec.msgpack.Decoder(ReportResult)
_heartbeat_results: Final = msgspec.msgpack.Decoder(HeartbeatResult)


def _frame_answered(data: bytes) -> RunnerInput:
    return FrameAnswered(_frame_results.decode(data))


def _report_answered(data: bytes) -> RunnerInput:
    return ReportAnswered(_report_results.decode(data))


def _heartbeat_answered(data: bytes) -> RunnerInput:
    return HeartbeatAnswered(_heartbeat_results.decode(data))
