"""What a trainer says to a job's rollout manager: entries of the log, and questions. I/O."""

import asyncio
from typing import Final, TypeVar

import msgspec

from tensorhub._control.registry_client import RegistryClient
from tensorhub_common.bus.errors import Busy, LogFull, NoAnswer, NoBus, NoResponder
from tensorhub_common.errors import BadPrompt, RolloutUnavailable, StaleSender, TensorHubError, from_code
from tensorhub_common.observability.trace_context import TraceContext, headers_of
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.queries import QueryError
from tensorhub_common.protocol.rollout.entries import Attach, SdkEntry
from tensorhub_common.protocol.rollout.questions import (
    ASK_S,
    FollowAnswer,
    FollowQuestion,
    OutcomeAnswer,
    OutcomeQuestion,
    ReadyAnswer,
    ReadyQuestion,
    RolloutStatus,
    SeedingAnswer,
    SeedingQuestion,
    WhyAnswer,
)

RETRY_S: Final = 0.05
"""The pause after no manager answered."""

Answer = TypeVar("Answer", FollowAnswer, OutcomeAnswer, ReadyAnswer, RolloutStatus, SeedingAnswer, WhyAnswer)


class ManagerClient:
    """One trainer's line to the manager of its job."""

    def __init__(self, registry: RegistryClient) -> None:
        self._registry = registry

    @property
    def job(self) -> str:
        """The job."""
        return self._registry.job

    async def append(
        self, entry: Attach | SdkEntry, msg_id: str, deadline: float, cause: TraceContext | None = None
    ) -> int:
        """Write an entry and return its sequence. Raises `RolloutUnavailable` at the deadline of the loop's time.

        `cause`: the span that the entry names.
        """
        from tensorhub_common.jetstream.rollout_log import RolloutLog  # noqa: PLC0415 (it imports NATS's client)

        loop = asyncio.get_running_loop()
        log = RolloutLog(await self._registry.bus(max(0.0, deadline - loop.time())), self.job)
        try:
            return await log.append(entry, msg_id, headers_of(cause), max(0.0, deadline - loop.time()))
        except LogFull as why:
            raise BadPrompt(f"the job's rollouts have no room for more: take batches and call done() ({why})") from None
        except NoBus as why:
            raise RolloutUnavailable(f"NATS took nothing: {why}") from None

    async def outcome(self, question: OutcomeQuestion, deadline: float) -> OutcomeAnswer:
        """Return what became of an entry. Raises what it was refused with."""
        answer = await self.ask("outcome", question, OutcomeAnswer, deadline)
        if answer.error is not None:
            raise _public(answer.error, answer.message)
        return answer

    async def ready(self, question: ReadyQuestion, deadline: float) -> ReadyAnswer:
        """Return what has ended. Raises `RolloutUnavailable` where the attachment is over."""
        answer = await self.ask("ready", question, ReadyAnswer, deadline)
        if answer.error is not None:
            raise _public(answer.error, answer.message)
        return answer

    async def follow(self, question: FollowQuestion, deadline: float) -> FollowAnswer:
        """Return new tokens of responses. Raises `RolloutUnavailable` where the attachment is over."""
        answer = await self.ask("follow", question, FollowAnswer, deadline)
        if answer.error is not None:
            raise _public(answer.error, answer.message)
        return answer

    async def seeding(self, question: SeedingQuestion, deadline: float) -> SeedingAnswer:
        """Return what is known of seeding. Raises `RolloutUnavailable` where the attachment is over."""
        answer = await self.ask("seeding", question, SeedingAnswer, deadline)
        if answer.error is not None:
            raise _public(answer.error, answer.message)
        return answer

    async def ask(self, what: str, question: msgspec.Struct | None, kind: type[Answer], deadline: float) -> Answer:
        """Ask the manager until it answers. Raises `RolloutUnavailable` at the deadline."""
        loop = asyncio.get_running_loop()
        subject = subjects.rollout_ask(self.job, what)
        body = b"" if question is None else msgspec.json.encode(question)
        reason = "no manager answers: start tensorhub-rollout"
        while (left_s := deadline - loop.time()) > 0:
            # Where the hub was closed meanwhile, this raises.
            bus = await self._registry.bus(left_s)
            try:
                data = await bus.request(subject, body, min(left_s, ASK_S))
            except (NoResponder, NoAnswer, NoBus, Busy) as why:
                reason = reason if isinstance(why, NoResponder) else str(why)
            else:
                answer = _decoded(data, kind)
                if not isinstance(answer, QueryError):
                    return answer
                if answer.error != RolloutUnavailable.__name__:
                    raise from_code(answer.error, answer.message)
                reason = answer.message
            await asyncio.sleep(min(RETRY_S, max(0.0, deadline - loop.time())))
        raise RolloutUnavailable(f"the rollouts of job {self.job!r} can't be had within the bound: {reason}")


def _decoded(data: bytes, kind: type[Answer]) -> Answer | QueryError:
    if not data:
        return QueryError(error=RolloutUnavailable.__name__, message="the manager that was asked leads no more")
    try:
        found: Answer | QueryError = msgspec.json.decode(data, type=kind | QueryError)
    except MALFORMED as why:
        raise TensorHubError(f"the manager's answer can't be read ({why}): it may be of another version") from None
    return found


def _public(code: str, message: str) -> TensorHubError:
    """Return the error that a trainer sees."""
    return RolloutUnavailable(message) if code == StaleSender.__name__ else from_code(code, message)
