"""One runner on the bus: drives the core, and lets it speak with the engine, the leader and the hub. I/O.

Invariant: what the core wants done is carried out in its order. What is said to the leader may be lost, since the core
says again what was not answered.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Final

import msgspec
from opentelemetry.metrics import Meter

import tensorhub
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.message import Message
from tensorhub_common.config.settings import Settings
from tensorhub_common.errors import TensorHubError
from tensorhub_common.introspection.ping import answer_pings
from tensorhub_common.machine import Tick
from tensorhub_common.observability.logs import logger
from tensorhub_common.observability.metrics import recorder
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
from tensorhub_common.service.systemd import serving
from tensorhub_runner.app.engine_thread import EngineThread
from tensorhub_runner.app.engines import load_engine
from tensorhub_runner.app.weight_follower import WeightFollower
from tensorhub_runner.core.runner import Runner, RunnerLimits
from tensorhub_runner.core.runner_events import (
    AbortCame,
    AnswerAbort,
    AnswerAssign,
    AssignCame,
    Begin,
    EngineStepped,
    FrameAnswered,
    HeartbeatAnswered,
    PreemptionNoticed,
    ReportAnswered,
    RunnerEffect,
    RunnerInput,
    SendFrame,
    SendHeartbeat,
    SendReport,
    StepTokens,
    Stop,
)

ROLE: Final = "runner"
ANSWER_S_MAX: Final = 0.5
"""What the leader has not answered by then is said again by the core."""
ASSIGNS_PENDING_MAX: Final = 256
RELEASE_S_MAX: Final = 1.0
"""So long the hub is given to let go of the replica when the process ends."""
NOTICE: Final = signal.SIGUSR1
"""The machine goes away soon: the runner takes no new request, and the leader moves what it has."""

_SILENCE: Final = b""
_log: Final = logger(__name__)

ReadAnswer = Callable[[bytes], RunnerInput]


class RunnerService:
    """One runner on one connection: `run`, and then `close`."""

    def __init__(self, bus: Bus, settings: Settings, meter: Meter) -> None:
        self.id = settings.runner_id
        self._bus, self._settings = bus, settings
        self._work = Supervisor(f"runner {self.id!r}")
        self._talk = self._work.group()
        self._encoder = msgspec.msgpack.Encoder()
        self._assigns, self._aborts = msgspec.msgpack.Decoder(AssignRequest), msgspec.msgpack.Decoder(AbortRequest)
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._hub: tensorhub.AsyncHub | None = None
        self.thread: EngineThread | None = None
        self.core: Runner | None = None
        """Both from when the engine is loaded on."""
        self._record_pause = recorder(meter, "tensorhub.runner.load.pause")
        self._record_wait = recorder(meter, "tensorhub.runner.load.wait")

    async def run(self) -> None:
        """Load the engine, register its weights, and serve until cancelled."""
        settings, job = self._settings, self._settings.job
        # Building a model takes seconds; NATS must have its answers meanwhile.
        loaded = await asyncio.to_thread(load_engine, settings)
        limits = RunnerLimits(slots=loaded.engine.capacity.slots)
        incarnation = time.time_ns() // 1_000_000
        self.core = Runner(self.id, settings.runner_hub_model, incarnation, limits, time.monotonic())
        self.thread = EngineThread(loaded.engine, self._on_stepped)
        # This process has a runner's key. The SDK in it is a worker, whose key its agent names.
        os.environ.pop("TENSORHUB_CREDENTIALS", None)
        self._hub = await tensorhub.connect_async(job=job)
        shard = await self._hub.register(
            settings.runner_hub_model,
            loaded.module,
            replica=settings.runner_replica or self.id,
            spot=settings.runner_spot,
            install=settings.runner_install,
        )
        follower = WeightFollower(
            shard,
            self.thread,
            self._tell,
            self._wait_loadable,
            self._on_loaded,
            waits_for_finish=settings.runner_install != "mapped",
        )
        self._work.start(self.thread.run(), "driving the engine")
        self._work.start(follower.run(), "following versions")
        await self._bus.serve(
            subjects.to_runner(job, "assign", self.id), self._on_assign, pending_max=ASSIGNS_PENDING_MAX
        )
        await self._bus.serve(
            subjects.to_runner(job, "abort", self.id), self._on_abort, pending_max=ASSIGNS_PENDING_MAX
        )
        asyncio.get_running_loop().add_signal_handler(NOTICE, self._on_notice)
        self._tell(Tick())
        await answer_pings(self._bus, self.id, ROLE)
        async with serving(f"runner {self.id} serves"):
            _log.info("ready", engine=loaded.engine.facts.kind, slots=limits.slots, incarnation=incarnation)
            await asyncio.Event().wait()

    async def close(self) -> None:
        """Let go of engine and replica. What was running goes on elsewhere."""
        await self._work.close()
        if self.thread is not None:
            self.thread.close()
        if self._hub is not None:
            try:
                await self._hub.close(timeout_s=RELEASE_S_MAX)
            except TensorHubError as why:
                # The wait for a newer version goes on at the agent for seconds, for instance.
                _log.info("the replica stays with the agent, for the next process", why=str(why))

    # ------------------------------------------------------------------------------------------ the core

    def _tell(self, event: RunnerInput) -> None:
        """Give an event to the core, and carry out what it wants done."""
        for effect in self._handle(event):
            self._do(effect)

    def _handle(self, event: RunnerInput) -> list[RunnerEffect]:
        assert self.core is not None
        effects = self.core.handle(event, time.monotonic())
        self._changed.set()
        self._set_timer()
        return effects

    def _do(self, effect: RunnerEffect) -> None:
        job = self._settings.job
        match effect:
            case Begin() | Stop():
                assert self.thread is not None
                self.thread.do(effect)
            case SendFrame(frame=frame):
                self._say("tokens", frame, _frame_answered)
            case SendReport(report=report):
                self._say("report", report, _report_answered)
            case SendHeartbeat(beat=beat):
                self._say("beat", beat, _heartbeat_answered)
            case _:
                raise AssertionError(f"{effect} answers nothing that was asked in job {job!r}")

    def _set_timer(self) -> None:
        assert self.core is not None
        deadline = self.core.deadline()
        if self._timer is not None:
            self._timer.cancel()
        wait_s = max(0.0, deadline - time.monotonic())
        self._timer = self._work.call_later(wait_s, self._tell, Tick(), what="what is due")

    def _on_stepped(self, made: tuple[StepTokens, ...], seconds: float) -> None:
        self._tell(EngineStepped(made, seconds))

    def _on_notice(self) -> None:
        _log.warning("the machine goes away soon")
        self._tell(PreemptionNoticed())

    def _on_loaded(self, wait_s: float, pause_s: float) -> None:
        self._record_wait(wait_s)
        self._record_pause(pause_s)

    async def _wait_loadable(self) -> None:
        assert self.core is not None
        while not self.core.may_load:
            self._changed.clear()
            await self._changed.wait()

    # ------------------------------------------------------------------------------------------ the leader

    def _say(self, what: str, said: Frame | Report | RunnerHeartbeat, read: ReadAnswer) -> None:
        subject = subjects.from_runner(self._settings.job, what, self.id)
        self._talk.start(self._ask(subject, self._encoder.encode(said), read), f"saying {what}")

    async def _ask(self, subject: str, body: bytes, read: ReadAnswer) -> None:
        try:
            event = read(await self._bus.request(subject, body, ANSWER_S_MAX))
        except (TensorHubError, *MALFORMED) as why:
            _log.debug("the leader did not answer", subject=subject, why=str(why))
            return
        self._tell(event)

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
