"""A gateway's calls that are under way: those of its sessions, whose tokens a stream has before their end. I/O.

Always true: what is told of a call's tokens before its end is a beginning of what its end has, or it ends with an
error.
"""

import asyncio
from array import array
from collections.abc import Callable
from typing import Final, NoReturn

import numpy as np

from tensorhub import Prompt, Sampling
from tensorhub.aio.open_calls import AGAIN_S, OpenCall, OpenCalls
from tensorhub.aio.session_line import EndedCall, SessionLine
from tensorhub_common.errors import BadPrompt, TensorHubError
from tensorhub_common.observability.logs import logger
from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_common.runtime.supervision import OnFault, Supervisor
from tensorhub_gateway.api.refusals import Refusal, bad, unavailable
from tensorhub_gateway.sessions.session import Session, Turn

_log: Final = logger(__name__)


class GatewayCall(OpenCall):
    """One call of a session. Its error is a `Refusal`."""

    def __init__(self, session: Session, turn: Turn, sampling: Sampling, *, is_followed: bool) -> None:
        self.session, self.turn = session, turn
        self.prompt_ids = turn.prompt()
        super().__init__(Prompt(self.prompt_ids, session=session.id, turn=turn.number), sampling)
        self.is_followed = is_followed
        """Whether its tokens are wanted before its end."""
        self.token_ids = array("i")
        self.logprobs = array("f")

    def fail(self, why: Exception) -> None:
        """End it for who waits for it, with the error in HTTP's terms."""
        super().fail(why if isinstance(why, Refusal) else _refusal_of(why))

    def end(self, ended: EndedCall) -> None:
        """Take its end: an error where it does not fit to what was asked or told."""
        made, told = ended.response, len(self.token_ids)
        if not np.array_equal(made.prompt_ids, np.array(self.prompt_ids, np.int32)):
            self.fail(unavailable(500, "the response is to another prompt", "internal"))
        elif made.token_ids[:told].tolist() != self.token_ids.tolist():
            self.fail(
                unavailable(
                    503,
                    "the answer began anew behind what was streamed, since weights were changed or several machines "
                    "were lost at once: ask again",
                    "began_anew",
                )
            )
        super().end(ended)


class GatewayCalls(OpenCalls[GatewayCall]):
    """All calls of a gateway that are under way."""

    def __init__(self, line: SessionLine, on_orphan: Callable[[str | None, RequestId], None]) -> None:
        """Prepare, as `OpenCalls` does."""
        super().__init__(line, on_orphan)
        self._has_followed = asyncio.Event()

    def start(self, work: Supervisor, on_fault: OnFault | None = None) -> None:
        """Begin, in tasks of the owner."""
        super().start(work, on_fault)
        work.start(self._follow_always(), "following tokens", on_fault=on_fault)

    async def _submit(self, calls: list[GatewayCall]) -> None:
        await super()._submit(calls)
        if any(call.is_followed for call in calls):
            self._has_followed.set()

    async def _follow_always(self) -> NoReturn:
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


def _refusal_of(why: Exception) -> Refusal:
    return bad(None, str(why)) if isinstance(why, BadPrompt) else unavailable(503, str(why), "unavailable")
