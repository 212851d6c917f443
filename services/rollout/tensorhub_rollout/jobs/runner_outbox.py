"""What the leader asks one runner, one request after the other. I/O.

What waits is merged into the next request: the last word on each attempt counts. A request that fails is not repeated
here, since the leader asks again by its own time.
"""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from tensorhub_common.bus.connection import Bus
from tensorhub_common.errors import TensorHubError
from tensorhub_common.observability.logs import logger
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.rollout.entries import Attempt
from tensorhub_common.protocol.rollout.messages import (
    AbortAnswer,
    AbortRequest,
    Assign,
    AssignAnswer,
    AssignRequest,
)
from tensorhub_common.runtime.supervision import TaskGroup
from tensorhub_rollout.core.leader_events import AbortAnswered, AssignAnswered

ANSWER_S_MAX: Final = 0.5
REQUEST_BYTES_MAX: Final = 512 * 1024
"""Limit of the assigns of one request; one assign may have more by itself."""
ATTEMPTS_MAX: Final = 1024
"""Limit of the attempts in one abort."""

_encoder: Final = msgspec.msgpack.Encoder()
_assign_answers: Final = msgspec.msgpack.Decoder(AssignAnswer)
_abort_answers: Final = msgspec.msgpack.Decoder(AbortAnswer)
_log: Final = logger(__name__)

Answer = TypeVar("Answer")
OnAnswer = Callable[[AssignAnswered | AbortAnswered], None]


class RunnerOutbox:
    """The requests to one runner; it holds no more attempts than are placed there."""

    def __init__(self, bus: Bus, job: str, runner: str, work: TaskGroup, on_answer: OnAnswer) -> None:
        self._bus, self._runner, self._work, self._on_answer = bus, runner, work, on_answer
        self._assign_subject = subjects.to_runner(job, "assign", runner)
        self._abort_subject = subjects.to_runner(job, "abort", runner)
        self._assign: AssignRequest | None = None
        self._abort: AbortRequest | None = None
        self._assigns: dict[Attempt, Assign] = {}
        self._stops: dict[Attempt, None] = {}
        self._forgets: dict[Attempt, None] = {}
        self._incarnation = 0
        self._sending: asyncio.Task[None] | None = None

    def assign(self, request: AssignRequest) -> None:
        """Ask the runner to begin attempts."""
        self._see(request.incarnation)
        self._assign = request
        self._assigns.update((each.attempt, each) for each in request.assigns)
        self._send_soon()

    def abort(self, request: AbortRequest) -> None:
        """Ask the runner to stop attempts, or to forget them."""
        self._see(request.incarnation)
        self._abort = request
        self._stops.update(dict.fromkeys(request.stop))
        self._forgets.update(dict.fromkeys(request.forget))
        for attempt in (*request.stop, *request.forget):
            self._assigns.pop(attempt, None)
        self._send_soon()

    def _see(self, incarnation: int) -> None:
        """Leave what was for an earlier process of the runner."""
        if incarnation != self._incarnation:
            self._incarnation = incarnation
            self._assigns.clear()
            self._stops.clear()
            self._forgets.clear()

    def close(self) -> None:
        """Ask nothing more."""
        if self._sending is not None:
            self._sending.cancel()

    def _send_soon(self) -> None:
        if self._sending is None or self._sending.done():
            self._sending = self._work.start(self._send_all(), f"asking runner {self._runner}")

    async def _send_all(self) -> None:
        # All that this turn of the loop has for the runner goes as one request.
        await asyncio.sleep(0)
        while self._assigns or self._stops or self._forgets:
            if self._stops or self._forgets:
                await self._send_abort()
            if self._assigns:
                await self._send_assign()

    async def _send_assign(self) -> None:
        assert self._assign is not None
        taken, nbytes = list[Assign](), 0
        for assign in [*self._assigns.values()]:
            # All that it has, its stop tokens and runs too: NATS takes 1 MiB, and what is larger never arrives.
            nbytes += len(_encoder.encode(assign))
            if taken and nbytes > REQUEST_BYTES_MAX:
                break
            taken.append(self._assigns.pop(assign.attempt))
        request = msgspec.structs.replace(self._assign, assigns=tuple(taken))
        answer = await self._ask(self._assign_subject, request, _assign_answers)
        if answer is not None:
            self._on_answer(AssignAnswered(self._runner, request.incarnation, answer.results))

    async def _send_abort(self) -> None:
        assert self._abort is not None
        stops, forgets = [*self._stops][:ATTEMPTS_MAX], [*self._forgets][:ATTEMPTS_MAX]
        for attempt in stops:
            del self._stops[attempt]
        for attempt in forgets:
            del self._forgets[attempt]
        request = msgspec.structs.replace(self._abort, stop=tuple(stops), forget=tuple(forgets))
        answer = await self._ask(self._abort_subject, request, _abort_answers)
        if answer is not None:
            self._on_answer(AbortAnswered(self._runner, request.incarnation, answer.stopped, answer.forgotten))

    async def _ask(
        self, subject: str, request: AssignRequest | AbortRequest, decoder: msgspec.msgpack.Decoder[Answer]
    ) -> Answer | None:
        try:
            return decoder.decode(await self._bus.request(subject, _encoder.encode(request), ANSWER_S_MAX))
        except (TensorHubError, *MALFORMED) as why:
            _log.debug("a runner did not answer", runner=self._runner, subject=subject, why=str(why))
            return None
