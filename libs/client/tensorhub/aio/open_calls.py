"""Calls that are under way in one process, from their submission to their end. I/O, through the line to the rollouts.

A gateway and verl's server have them: each of their many callers waits for one response.

Always true: a call that was submitted comes to its end here, or its error says why nothing more is known of it. What
has ended is acknowledged by its caller, or told to the owner as an orphan.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, NoReturn, TypeVar

from tensorhub._rollouts.prompts import Prompt, Sampling
from tensorhub._rollouts.responses import Response
from tensorhub.aio.session_line import EndedCall, SessionLine
from tensorhub_common.errors import RolloutUnavailable, TensorHubError
from tensorhub_common.observability.logs import logger
from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_common.runtime.supervision import OnFault, Supervisor

SUBMITTED_TOGETHER_MAX: Final = 256
"""Limit of the calls of one submission."""
AGAIN_S: Final = 0.2
"""The pause after a question that was not answered."""

_log: Final = logger(__name__)


class OpenCall:
    """One call that is under way."""

    def __init__(self, prompt: Prompt, sampling: Sampling) -> None:
        self.prompt, self.sampling = prompt, sampling
        self.group: str | None = None
        """None: it is not submitted yet."""
        self.ended: EndedCall | None = None
        self.error: Exception | None = None
        self.is_gone = False
        """Whether its caller has left."""
        self.news = asyncio.Event()

    def end(self, ended: EndedCall) -> None:
        """Take its end."""
        self.ended = ended
        self.news.set()

    def fail(self, why: Exception) -> None:
        """End it for its caller, unless it has ended."""
        if not self.is_over:
            self.error = why
            self.news.set()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or failed."""
        return self.ended is not None or self.error is not None

    async def wait(self) -> None:
        """Wait until it has ended, or failed."""
        while not self.is_over:
            self.news.clear()
            await self.news.wait()


Call = TypeVar("Call", bound=OpenCall)


class OpenCalls(Generic[Call]):
    """All calls of one line that are under way."""

    def __init__(
        self, line: SessionLine, on_orphan: Callable[[str | None, RequestId], None], *, silence_s: float = math.inf
    ) -> None:
        """Prepare; `start` begins.

        Args:
            line: Where they are submitted.
            on_orphan: Is told of what has ended and failed here before, with its session's id.
            silence_s: So long no call may end behind the end or the submission before, in seconds: then all fail.
        """
        self.newest: int | None = None
        """A version that another process has published: what is submitted from now on begins on no older one, as
        `AsyncRollouts.submit` says."""
        self._line, self._on_orphan, self._silence_s = line, on_orphan, silence_s
        self._waiting: deque[Call] = deque()
        self._submitting: list[Call] = []
        """Those of the submission that is under way."""
        self._early: list[EndedCall] = []
        """What has ended before that submission has said which groups are its own."""
        self._submitted: dict[str, Call] = {}
        self._cancels: list[str] = []
        self._done: list[RequestId] = []
        """What is to be acknowledged."""
        self._has_waiting, self._has_submitted, self._has_cancels, self._has_done = (asyncio.Event() for _ in range(4))
        self._has_none, self._is_acknowledged = asyncio.Event(), asyncio.Event()
        self._heard_at = 0.0
        """The loop's time of the last submission or end."""

    def start(self, work: Supervisor, on_fault: OnFault | None = None) -> None:
        """Begin, in tasks of the owner."""
        for loop, what in (
            (self._submit_always(), "submitting calls"),
            (self._cancel_always(), "cancelling calls"),
            (self._end_always(), "taking the ends of calls"),
            (self._acknowledge_always(), "acknowledging calls"),
        ):
            work.start(loop, what, on_fault=on_fault)

    @property
    def count(self) -> int:
        """How many are under way."""
        return len(self._waiting) + len(self._submitting) + len(self._submitted)

    def begin(self, call: Call) -> None:
        """Take a call, which is submitted soon. Its prompt can be one: a wrong one fails others with it."""
        self._waiting.append(call)
        self._has_waiting.set()

    async def response(self, call: Call) -> Response:
        """Begin a call, wait for its response and acknowledge it. Raises what it fails with.

        Where this is cancelled, so is the call.
        """
        self.begin(call)
        try:
            await call.wait()
        except asyncio.CancelledError:
            # Failed, so that its end is an orphan.
            call.fail(TensorHubError("the call was given up"))
            self.give_up(call)
            raise
        finally:
            if call.ended is not None:
                self.acknowledge(call.ended.request)
        if call.error is not None:
            raise call.error
        assert call.ended is not None
        return call.ended.response

    def give_up(self, call: Call) -> None:
        """Cancel a call whose caller has left. It still comes to its end here."""
        call.is_gone = True
        if call.group is not None and call.ended is None:
            self._cancels.append(call.group)
            self._has_cancels.set()

    def fail_all(self, why: Exception) -> None:
        """End all calls for their callers."""
        for call in (*self._waiting, *self._submitting, *self._submitted.values()):
            call.fail(why)

    def acknowledge(self, *requests: RequestId) -> None:
        """Say that calls are done, soon."""
        self._done.extend(requests)
        self._has_done.set()

    async def wait_none(self) -> None:
        """Wait until none is under way."""
        while self.count:
            self._has_none.clear()
            await self._has_none.wait()

    async def wait_acknowledged(self) -> None:
        """Wait until what is done is acknowledged."""
        while self._done:
            self._is_acknowledged.clear()
            await self._is_acknowledged.wait()

    # ------------------------------------------------------------------------------------------ loops

    async def _submit_always(self) -> NoReturn:
        """Submit what waits: what came while one submission was under way goes with the next."""
        while True:
            await self._has_waiting.wait()
            calls = list[Call]()
            while self._waiting and len(calls) < SUBMITTED_TOGETHER_MAX:
                if calls and self._waiting[0].sampling != calls[0].sampling:
                    break
                call = self._waiting.popleft()
                if call.is_gone:
                    call.fail(TensorHubError("the call was given up"))
                else:
                    calls.append(call)
            if not self._waiting:
                self._has_waiting.clear()
            if calls:
                await self._submit(calls)
            self._has_none.set()

    async def _submit(self, calls: list[Call]) -> None:
        self._submitting = calls
        try:
            groups = await self._line.submit([call.prompt for call in calls], calls[0].sampling, self.newest)
        except TensorHubError as why:
            for call in calls:
                call.fail(why)
        else:
            for group, call in zip(groups, calls, strict=True):
                call.group = group
                self._submitted[group] = call
                if call.is_gone:
                    self.give_up(call)
            self._heard_at = asyncio.get_running_loop().time()
            self._has_submitted.set()
        finally:
            self._submitting = []
        early, self._early = self._early, []
        for ended in early:
            self._end(ended)

    async def _cancel_always(self) -> NoReturn:
        """Cancel what was given up."""
        while True:
            await self._has_cancels.wait()
            self._has_cancels.clear()
            groups, self._cancels = self._cancels, []
            still = [each for each in groups if each in self._submitted]
            if not still:
                continue
            try:
                await self._line.cancel(still)
            except TensorHubError as why:
                _log.warning("calls could not be cancelled yet", calls=len(still), why=str(why))
                self._cancels += still
                self._has_cancels.set()
                await asyncio.sleep(AGAIN_S)

    async def _end_always(self) -> NoReturn:
        """Take the ends of calls."""
        while True:
            await self._has_submitted.wait()
            if not self._submitted:
                self._has_submitted.clear()
                continue
            try:
                found = await self._line.ended()
            except TensorHubError as why:
                self._not_had(why)
                await asyncio.sleep(AGAIN_S)
                continue
            if found:
                self._heard_at = asyncio.get_running_loop().time()
            elif self._is_silent():
                self._fail_submitted(self._line.none_ended(self._silence_s))
            for ended in found:
                self._end(ended)
            if not self.count:
                self._has_none.set()

    def _not_had(self, why: TensorHubError) -> None:
        waiting = sum(call.error is None for call in self._submitted.values())
        (_log.warning if waiting else _log.debug)("the ends of calls can't be had yet", calls=waiting, why=str(why))
        # What else fails is asked again: a call waits for as long as it may.
        if isinstance(why, RolloutUnavailable) or self._is_silent():
            self._fail_submitted(why)

    def _is_silent(self) -> bool:
        """Tell whether no call has ended for too long; then it is told again after as long."""
        now = asyncio.get_running_loop().time()
        is_silent = now - self._heard_at > self._silence_s
        if is_silent:
            self._heard_at = now
        return is_silent

    def _fail_submitted(self, why: TensorHubError) -> None:
        for call in self._submitted.values():
            call.fail(why)

    def _end(self, ended: EndedCall) -> None:
        call = self._submitted.pop(ended.group, None)
        if call is None and self._submitting:
            self._early.append(ended)
        elif call is None or call.error is not None:
            self._on_orphan(ended.response.session, ended.request)
        else:
            call.end(ended)

    async def _acknowledge_always(self) -> NoReturn:
        while True:
            await self._has_done.wait()
            self._has_done.clear()
            requests = tuple(self._done)
            try:
                await self._line.acknowledge(requests)
            except TensorHubError as why:
                _log.debug("calls could not be acknowledged yet", calls=len(requests), why=str(why))
                self._has_done.set()
                await asyncio.sleep(AGAIN_S)
                continue
            del self._done[: len(requests)]
            self._is_acknowledged.set()
