"""The calls that are under way, from their submission to their last token. I/O, through the line to the rollouts.

Always true: a call that was submitted comes to its end here, or its error says why nothing more is known of it. What is
told of its tokens before is a beginning of what its end has, or it ends with an error.
"""

import asyncio
from array import array
from collections import deque
from collections.abc import Callable
from typing import Final, NoReturn

import numpy as np

from tensorhub import Prompt, Sampling
from tensorhub.aio.session_line import EndedCall, SessionLine
from tensorhub_common.errors import BadPrompt, RolloutUnavailable, TensorHubError
from tensorhub_common.observability.logs import logger
from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_gateway.api.refusals import Refusal, bad, unavailable
from tensorhub_gateway.sessions.session import Session, Turn

SUBMITTED_TOGETHER_MAX: Final = 256
"""Limit of the calls of one submission."""
AGAIN_S: Final = 0.2
"""The pause after a question that was not answered."""

_log: Final = logger(__name__)


class OpenCall:
    """One call that is under way."""

    def __init__(self, session: Session, turn: Turn, sampling: Sampling, *, is_followed: bool) -> None:
        self.session, self.turn, self.sampling = session, turn, sampling
        self.prompt = turn.prompt()
        self.is_followed = is_followed
        """Whether its tokens are wanted before its end."""
        self.group: str | None = None
        """None: it is not submitted yet."""
        self.token_ids = array("i")
        self.logprobs = array("f")
        self.ended: EndedCall | None = None
        self.error: Refusal | None = None
        self.is_gone = False
        """Whether nobody waits for it any more."""
        self.news = asyncio.Event()

    def fail(self, error: Refusal) -> None:
        """End it for who waits for it."""
        if self.ended is None and self.error is None:
            self.error = error
            self.news.set()


class OpenCalls:
    """All calls of a gateway that are under way. Its three loops are run by its owner."""

    def __init__(self, line: SessionLine, on_orphan: Callable[[str | None, RequestId], None]) -> None:
        """Prepare. `on_orphan` is told of what has ended and was given up here before, with its session's id."""
        self._line, self._on_orphan = line, on_orphan
        self._waiting: deque[OpenCall] = deque()
        self._submitting: list[OpenCall] = []
        """Those of the submission that is under way."""
        self._submitted: dict[str, OpenCall] = {}
        self._cancels: list[str] = []
        self._has_waiting, self._has_submitted, self._has_followed, self._has_cancels = (
            asyncio.Event() for _ in range(4)
        )
        self._has_none = asyncio.Event()

    @property
    def count(self) -> int:
        """How many are under way."""
        return len(self._waiting) + len(self._submitting) + len(self._submitted)

    def begin(self, call: OpenCall) -> None:
        """Take a call, which is submitted soon."""
        self._waiting.append(call)
        self._has_waiting.set()

    def give_up(self, call: OpenCall) -> None:
        """Cancel a call for which nobody waits any more. It still comes to its end here."""
        call.is_gone = True
        if call.group is not None and call.ended is None:
            self._cancels.append(call.group)
            self._has_cancels.set()

    def fail_all(self, error: Refusal) -> None:
        """End all calls for who waits for them."""
        for call in (*self._waiting, *self._submitting, *self._submitted.values()):
            call.fail(error)

    async def wait_none(self) -> None:
        """Wait until none is under way."""
        while self.count:
            self._has_none.clear()
            await self._has_none.wait()

    # ------------------------------------------------------------------------------------------ loops

    async def submit_always(self) -> NoReturn:
        """Submit what waits: what came while one submission was under way goes with the next."""
        while True:
            await self._has_waiting.wait()
            calls = list[OpenCall]()
            while self._waiting and len(calls) < SUBMITTED_TOGETHER_MAX:
                if calls and self._waiting[0].sampling != calls[0].sampling:
                    break
                call = self._waiting.popleft()
                if call.is_gone:
                    call.fail(unavailable(503, "the call was given up", "cancelled"))
                else:
                    calls.append(call)
            if not self._waiting:
                self._has_waiting.clear()
            if calls:
                self._submitting = calls
                try:
                    await self._submit(calls)
                finally:
                    self._submitting = []
            self._has_none.set()

    async def _submit(self, calls: list[OpenCall]) -> None:
        prompts = [Prompt(call.prompt, session=call.session.id, turn=call.turn.number) for call in calls]
        try:
            groups = await self._line.submit(prompts, calls[0].sampling)
        except BadPrompt as why:
            for call in calls:
                call.fail(bad(None, str(why)))
            return
        except TensorHubError as why:
            for call in calls:
                call.fail(unavailable(503, str(why), "unavailable"))
            return
        for group, call in zip(groups, calls, strict=True):
            call.group = group
            self._submitted[group] = call
            if call.is_gone:
                self.give_up(call)
        self._has_submitted.set()
        if any(call.is_followed for call in calls):
            self._has_followed.set()

    async def cancel_always(self) -> NoReturn:
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

    async def follow_always(self) -> NoReturn:
        """Take tokens of streams as they are made."""
        while True:
            await self._has_followed.wait()
            followed = {group: call for group, call in self._submitted.items() if call.is_followed and not call.is_gone}
            if not followed:
                self._has_followed.clear()
                continue
            try:
                found = await self._line.follow({group: len(call.token_ids) for group, call in followed.items()})
            except TensorHubError as why:
                # The end of a call has all of its tokens: this only comes later.
                _log.debug("tokens can't be followed yet", why=str(why))
                await asyncio.sleep(AGAIN_S)
                continue
            for group, made in found.items():
                call = followed[group]
                call.token_ids.extend(made.token_ids.tolist())
                call.logprobs.extend(made.logprobs.tolist())
                call.news.set()

    async def end_always(self) -> NoReturn:
        """Take the ends of calls."""
        while True:
            await self._has_submitted.wait()
            if not self._submitted:
                self._has_submitted.clear()
                continue
            try:
                found = await self._line.ended()
            except TensorHubError as why:
                _log.warning("the ends of calls can't be had yet", calls=len(self._submitted), why=str(why))
                # What else fails is asked again: a call waits for as long as it may.
                if isinstance(why, RolloutUnavailable):
                    for call in self._submitted.values():
                        call.fail(unavailable(503, str(why), "unavailable"))
                await asyncio.sleep(AGAIN_S)
                continue
            for ended in found:
                self._end(ended)
            if not self.count:
                self._has_none.set()

    def _end(self, ended: EndedCall) -> None:
        call = self._submitted.pop(ended.group, None)
        if call is None or call.error is not None:
            self._on_orphan(ended.response.session, ended.request)
        if call is None:
            return
        made, told = ended.response, len(call.token_ids)
        if not np.array_equal(made.prompt_ids, np.array(call.prompt, np.int32)):
            call.fail(unavailable(500, "the response is to another prompt", "internal"))
        elif made.token_ids[:told].tolist() != call.token_ids.tolist():
            call.fail(
                unavailable(
                    503,
                    "the answer began anew behind what was streamed, since weights were changed or several machines "
                    "were lost at once: ask again",
                    "began_anew",
                )
            )
        call.ended = ended
        call.news.set()
