"""What takes each response of a trainer's rollouts by itself has of them: calls go in, tokens and ends come out.

A gateway has it, whose ended sessions go back, and verl's server.

Always true: a call that was submitted here comes out of `ended` once, or, where this process ends before it is done,
out of the `batches()` of the next trainer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorhub._rollouts.collector import Collector, Place
from tensorhub._rollouts.manager_client import ManagerClient
from tensorhub._rollouts.prompts import Prompt, Sampling
from tensorhub._rollouts.responses import Response
from tensorhub._rollouts.trajectories import EndedSession
from tensorhub_common.errors import NoInstance, RolloutUnavailable, TensorHubError
from tensorhub_common.protocol.rollout.entries import RequestId
from tensorhub_common.protocol.rollout.questions import (
    FOLLOW_PLACES_MAX,
    WAIT_S_MAX,
    EndedRequest,
    FollowedPlace,
    FollowQuestion,
    ReadyQuestion,
)

FOLLOW_S: Final = 0.1
"""So long a question for tokens waits: calls that begin meanwhile are asked about with the next one."""
LEADER_S: Final = 60.0
"""So long a line waits for a leading manager before its calls fail, where its owner says nothing else."""


def nothing_ready(model: str, wait_s: float, *, has_instances: bool) -> TensorHubError:
    """Return why nothing has ended for so long, as far as instances say it."""
    if has_instances:
        return RolloutUnavailable(f"nothing was ready after {wait_s:g} s: see 'tensorhub rollouts'")
    return NoInstance(
        f"nothing was ready after {wait_s:g} s, and no instance generates with model {model!r}: start a runner, see "
        "'tensorhub rollouts'"
    )


class MadeTokens(NamedTuple):
    """Tokens of a response, and their log-probabilities, from the place on that was asked for."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]


class EndedCall(NamedTuple):
    """A call that has ended."""

    group: str
    request: RequestId
    response: Response


class SessionLine:
    """The line to one trainer's rollouts of what takes their responses."""

    def __init__(
        self,
        model: str,
        sampling: Sampling,
        manager: ManagerClient,
        collector: Collector,
        *,
        said: Callable[[], tuple[int, int]],
        submit: Callable[[Sequence[Prompt], Sampling, int | None, float], Awaitable[list[str]]],
        cancel: Callable[[Sequence[str]], Awaitable[None]],
        read: Callable[[list[EndedRequest]], Awaitable[list[Response]]],
        done: Callable[[tuple[RequestId, ...]], Awaitable[None]],
        leave: Callable[[], None],
        leader_s: float,
    ) -> None:
        """Prepare. `said`: the attachment, and its last entry in the log. The others are those of the rollouts.

        `leader_s`: so long a leading manager is waited for, in seconds.
        """
        self.model, self.sampling = model, sampling
        """Of the rollouts: a call has the latter where it says nothing else."""
        self._manager, self._collector, self._said = manager, collector, said
        self._submit, self._cancel, self._read, self._done, self._leave = submit, cancel, read, done, leave
        self._leader_s = leader_s
        self._has_instances = False
        """Whether an instance generates, by the manager's last answer."""
        self.sessions: set[str] = set()
        """Those that are open; the gateway keeps them."""
        self.delivered = asyncio.Event()
        """Set once another session is delivered or begins; then there is another event."""

    async def submit(self, prompts: Sequence[Prompt], sampling: Sampling, newest: int | None = None) -> list[str]:
        """Submit calls and return their groups. `newest`, and what it raises: as `AsyncRollouts.submit` has them."""
        return await self._submit(prompts, sampling, newest, self._leader_s)

    async def cancel(self, groups: Sequence[str]) -> None:
        """End calls: they come as `cancelled`, unless they had ended before. Raises as `AsyncRollouts.cancel`."""
        await self._cancel(groups)

    async def follow(self, have: Mapping[str, int]) -> dict[str, MadeTokens]:
        """Wait a moment for tokens of calls behind those that are here, and return them; none where none came.

        `have`: how many tokens are here, by group. Of more than `FOLLOW_PLACES_MAX` the first are asked for. Raises
        `RolloutUnavailable` where no manager answers, or the attachment is over.
        """
        groups = list(have)[:FOLLOW_PLACES_MAX]
        places = tuple(FollowedPlace(group, 0, have[group]) for group in groups)
        question = FollowQuestion(*self._said(), places, wait_s=FOLLOW_S)
        answer = await self._manager.follow(question, asyncio.get_running_loop().time() + self._leader_s)
        return {
            groups[row.place]: MadeTokens(np.frombuffer(row.tokens, "<i4"), np.frombuffer(row.logprobs, "<f4"))
            for row in answer.rows
            if row.place < len(groups)
        }

    async def ended(self) -> list[EndedCall]:
        """Wait a moment for calls to end, and return them with their tokens. Raises as `follow`, and as `batches`."""
        found = self._collector.pick_claimed()
        if not found:
            place = self._collector.place
            question = ReadyQuestion(*self._said(), *place, wait_s=WAIT_S_MAX)
            answer = await self._manager.ready(question, asyncio.get_running_loop().time() + self._leader_s)
            self._has_instances = answer.instances > 0
            self._collector.take(Place(question.after, question.after_request), answer)
            found = self._collector.pick_claimed()
        try:
            responses = await self._read(found)
        except BaseException:
            self._collector.claim(each.group for each in found)
            self._collector.put_back(found)
            raise
        return [EndedCall(each.group, each.request, made) for each, made in zip(found, responses, strict=True)]

    def none_ended(self, wait_s: float) -> TensorHubError:
        """Return why no call has ended for so long."""
        return nothing_ready(self.model, wait_s, has_instances=self._has_instances)

    def begin(self, session: str) -> None:
        """Note that a session is open: `batches()` waits for it."""
        self.sessions.add(session)
        self._tell()

    def deliver(self, session: EndedSession) -> None:
        """Hand a session over to `batches()`, where it has a trajectory. It is open no more."""
        if session.trajectories:
            self._collector.deliver(session)
        self.sessions.discard(session.session)
        self._tell()

    async def acknowledge(self, requests: tuple[RequestId, ...]) -> None:
        """Say that calls are done of which `batches()` yields nothing. Raises as `AsyncBatch.done`."""
        await self._done(requests)

    def may_come(self, groups: Iterable[str] | None) -> bool:
        """Tell whether a session may still come. `groups`: of these sessions alone."""
        return groups is None or not self.sessions.isdisjoint(groups)

    def close(self) -> None:
        """Leave the rollouts: no further session comes."""
        self._collector.release()
        self._leave()
        self._tell()

    def _tell(self) -> None:
        told, self.delivered = self.delivered, asyncio.Event()
        told.set()
