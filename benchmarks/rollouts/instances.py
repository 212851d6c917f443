"""Instances without engines: they take requests, and send tokens at a steady pace as a runner does.

They speak the runner's messages without the runner's core, since ten thousand responses have to be made beside the
manager that is measured. Every token is 0, so none is kept, and what a new leader asks for again is sent again.

`python -m benchmarks.rollouts.instances NATS KEY COUNT FIRST TOKENS_PER_S FLUSH_S` runs some of them until it is
killed, and writes what it has measured as a line of JSON each second.
"""

import asyncio
import contextlib
import json
import sys
import time
from array import array
from pathlib import Path
from typing import Final

import msgspec

from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.bus.message import Message
from tensorhub_common.errors import TensorHubError
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.rollout.entries import Attempt, RequestId
from tensorhub_common.protocol.rollout.messages import (
    AbortAnswer,
    AbortRequest,
    AbortResult,
    AssignAnswer,
    AssignRequest,
    AssignResult,
    Finished,
    Frame,
    FrameResult,
    HeartbeatResult,
    HeldAttempt,
    Report,
    ReportResult,
    RunnerHeartbeat,
    TokenRun,
    attempt_key,
)

JOB: Final = "default"
MODEL: Final = "policy"
HEARTBEAT_S: Final = 0.1
ANSWER_S_MAX: Final = 5.0
SLOTS: Final = 512
FRAME_TOKENS_MAX: Final = 65_536
"""As of a runner."""
_encoder: Final = msgspec.msgpack.Encoder()
_results: Final = msgspec.msgpack.Decoder(FrameResult)
_reports: Final = msgspec.msgpack.Decoder(ReportResult)
_beats: Final = msgspec.msgpack.Decoder(HeartbeatResult)
_assigns: Final = msgspec.msgpack.Decoder(AssignRequest)
_aborts: Final = msgspec.msgpack.Decoder(AbortRequest)


class Held:
    """One attempt: how many tokens it has, how many of them are sent, and how many it will have."""

    __slots__ = ("is_over", "key", "made", "prefix", "request", "sent", "tokens_max")

    def __init__(self, key: int, request: RequestId, prefix: int, tokens_max: int) -> None:
        self.key, self.request, self.prefix, self.tokens_max = key, request, prefix, tokens_max
        self.made = self.sent = prefix
        self.is_over = False
        """The leader was told that it has finished."""


class Instance:
    """One instance."""

    def __init__(self, bus: Bus, name: str, tokens_per_s: float, flush_s: float) -> None:
        self._bus, self._name = bus, name
        self._tokens_per_s, self._flush_s = tokens_per_s, flush_s
        self._log, self._term, self._number, self._steps = "", 0, 0, 0
        self._incarnation = time.time_ns() // 1_000_000
        self.held: dict[Attempt, Held] = {}
        self._owed = 0.0
        self.latencies_s: list[float] = []
        self.tokens = self.sent = 0

    async def run(self) -> None:
        """Generate until cancelled."""
        await self._bus.serve(subjects.to_runner(JOB, "assign", self._name), self._on_assign)
        await self._bus.serve(subjects.to_runner(JOB, "abort", self._name), self._on_abort)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat_always())
            tasks.create_task(self._flush_always())

    async def _on_assign(self, message: Message) -> bytes:
        request = _assigns.decode(message.data)
        results = []
        for each in request.assigns:
            if each.attempt not in self.held:
                self.held[each.attempt] = Held(
                    attempt_key(each.attempt), each.request, each.prefix, each.sampling.tokens_max
                )
            results.append(AssignResult(each.attempt, each.prefix))
        return _encoder.encode(AssignAnswer(tuple(results)))

    async def _on_abort(self, message: Message) -> bytes:
        request = _aborts.decode(message.data)
        stopped = []
        for attempt in request.stop:
            held = self.held.get(attempt)
            stopped.append(AbortResult(attempt, None if held is None else held.made))
            if held is not None:
                held.tokens_max = held.made
        for attempt in request.forget:
            self.held.pop(attempt, None)
        return _encoder.encode(AbortAnswer(tuple(stopped), request.forget))

    async def _beat_always(self) -> None:
        subject = subjects.from_runner(JOB, "beat", self._name)
        while True:
            beat = RunnerHeartbeat(self._log, self._incarnation, self._steps, MODEL, SLOTS, 1)
            try:
                answer = _beats.decode(await self._bus.request(subject, _encoder.encode(beat), ANSWER_S_MAX))
            except (TensorHubError, msgspec.MsgspecError):
                await asyncio.sleep(HEARTBEAT_S)
                continue
            self._log, self._flush_s = answer.log, max(self._flush_s, answer.flush_s)
            if answer.wants_report:
                await self._report()
            await asyncio.sleep(HEARTBEAT_S)

    async def _report(self) -> None:
        held = tuple(HeldAttempt(each.request, attempt, each.made, "running") for attempt, each in self.held.items())
        report = _encoder.encode(Report(self._log, self._incarnation, held))
        with contextlib.suppress(TensorHubError, msgspec.MsgspecError):
            subject = subjects.from_runner(JOB, "report", self._name)
            answer = _reports.decode(await self._bus.request(subject, report, ANSWER_S_MAX))
            for attempt in answer.forget:
                self.held.pop(attempt, None)
            self._send_again(answer.resend)

    def _send_again(self, resend: tuple[tuple[Attempt, int], ...]) -> None:
        for attempt, start in resend:
            held = self.held.get(attempt)
            if held is not None:
                held.sent, held.is_over = start, False

    async def _flush_always(self) -> None:
        subject = subjects.from_runner(JOB, "tokens", self._name)
        turn = time.monotonic()
        while True:
            turn += self._flush_s
            await asyncio.sleep(max(0.0, turn - time.monotonic()))
            self._owed += self._tokens_per_s * self._flush_s
            count = int(self._owed)
            self._owed -= count
            self._make(count)
            while (frame := self._frame()) is not None:
                began = time.monotonic()
                try:
                    answer = _results.decode(await self._bus.request(subject, _encoder.encode(frame), ANSWER_S_MAX))
                except (TensorHubError, msgspec.MsgspecError):
                    # A leader that comes asks for what it lacks.
                    break
                self.latencies_s.append(time.monotonic() - began)
                self._send_again(answer.resend)
                if answer.wants_report:
                    await self._report()

    def _make(self, count: int) -> None:
        """Make some tokens of each attempt that goes on."""
        before = self.tokens
        for held in self.held.values():
            made = min(count, held.tokens_max - held.made)
            held.made += made
            self.tokens += made
        self._steps += self.tokens > before

    def _frame(self) -> Frame | None:
        """Return what is not sent, as much as a frame takes; None: all is."""
        keys, starts, counts = array("q"), array("q"), array("q")
        runs, finished = [], []
        total = 0
        for attempt, held in self.held.items():
            count = min(held.made - held.sent, FRAME_TOKENS_MAX - total)
            if count > 0:
                keys.append(held.key)
                starts.append(held.sent)
                counts.append(count)
                if held.sent <= held.prefix:
                    runs.append((attempt, TokenRun(held.prefix, 1, "", self._name, attempt)))
                held.sent += count
                total += count
            if held.sent == held.tokens_max and not held.is_over:
                held.is_over = True
                finished.append(Finished(attempt, held.sent, "length"))
        if not total and not finished:
            return None
        self._number += 1
        self.sent += total
        body = bytes(4 * total)
        return Frame(
            self._log,
            self._incarnation,
            self._number,
            keys.tobytes(),
            starts.tobytes(),
            counts.tobytes(),
            body,
            body,
            tuple(runs),
            tuple(finished),
        )


async def main() -> None:
    """Run instances and report."""
    nats, key, count, first, tokens_per_s, flush_s = sys.argv[1:]
    bus = await connect(nats, name="instances", credentials=Path(key))
    instances = [
        Instance(bus, f"instance-{int(first) + number}", float(tokens_per_s), float(flush_s))
        for number in range(int(count))
    ]
    async with asyncio.TaskGroup() as tasks:
        for number, each in enumerate(instances):
            tasks.create_task(_begin_later(each, number * float(flush_s) / int(count)))
        tasks.create_task(_report_always(instances))


async def _begin_later(instance: Instance, pause_s: float) -> None:
    await asyncio.sleep(pause_s)
    await instance.run()


async def _report_always(instances: list[Instance]) -> None:
    while True:
        await asyncio.sleep(1.0)
        latencies = [each for instance in instances for each in instance.latencies_s]
        for instance in instances:
            instance.latencies_s.clear()
        said = {
            "tokens": sum(each.tokens for each in instances),
            "sent": sum(each.sent for each in instances),
            "latencies_s": [round(each, 5) for each in latencies],
        }
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main())
