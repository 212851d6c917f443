"""The leader's commands in one job's log: an agent is lost, or forgotten as it was lost long ago, or a hold has ended.

The fold decides. All registries use one lane, under one name that no agent can have. Terms order their commands, so the
fold refuses a late command of an older leader. A leader sends them only once its own term is in the log
(`term_claim.py`). A command that the log does not take is dropped, and the core decides it again.

Invariants:
- The commands for one job reach its log one after the other, with rising numbers.
- A job whose log takes nothing delays no other job's commands.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from tensorhub_common.errors import TensorHubError
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.observability import logs
from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.commands import AnyCommand, EndHold, Expire, ForgetAgent, Sender
from tensorhub_common.protocol.subjects import REGISTRY, registry_command_subject
from tensorhub_common.runtime.supervision import Supervisor
from tensorhub_registry.core.agent_forgetting import LostIncarnation
from tensorhub_registry.core.hold_ending import OverdueHold
from tensorhub_registry.core.liveness import ExpireAgent
from tensorhub_registry.jobs.term_claim import TermClaim

APPEND_TIMEOUT_S: Final = 2.0
"""An expiry that the log has not taken by then is dropped, and repeated after another window of silence."""

Decided = ExpireAgent | LostIncarnation | OverdueHold
OnAppended = Callable[[Exception | None], None]

_log: Final = logs.logger(__name__)


class AgentExpiry:
    """Appends one job's expiries one after the other, in the order in which they were decided."""

    def __init__(
        self, log: JobLog, claim: TermClaim, work: Supervisor, numbers: Iterator[int], on_appended: OnAppended
    ) -> None:
        """Take the registry's `numbers`, which rise while it runs. `on_appended` is called after each attempt."""
        self._log, self._claim, self._work, self._numbers, self._on_appended = log, claim, work, numbers, on_appended
        self._waiting: dict[str | OverdueHold, Decided] = {}
        """By agent, or by hold. A repeated command takes the place of one that still waits."""
        self._task: asyncio.Task[None] | None = None

    def expire(self, lost: ExpireAgent) -> None:
        """Take an expiry that the liveness core decided."""
        self._waiting[lost.agent] = lost
        if self._task is None or self._task.done():
            self._task = self._work.start(self._append_all(), "appending expiries")

    def forget(self, agents: Iterable[LostIncarnation]) -> None:
        """Append that these agents, which were lost long ago, are forgotten. It may be repeated until they are gone."""
        for agent in agents:
            self._waiting.setdefault(agent.agent, agent)
        if self._waiting and (self._task is None or self._task.done()):
            self._task = self._work.start(self._append_all(), "appending that agents are forgotten")

    def end_holds(self, holds: Iterable[OverdueHold]) -> None:
        """Append that these holds have ended. It may be repeated until they have."""
        self._waiting.update({each: each for each in holds})
        if self._waiting and (self._task is None or self._task.done()):
            self._task = self._work.start(self._append_all(), "appending that holds have ended")

    def cancel(self) -> None:
        """Append nothing more: this registry does not lead any longer."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _append_all(self) -> None:
        while self._waiting:
            expiry = self._waiting.pop(next(iter(self._waiting)))
            term = self._claim.term
            if term is None:
                continue
            try:
                await self._append(expiry, term)
            except TensorHubError as why:
                # The job logs once that its log takes nothing, however many agents are lost meanwhile.
                _log.debug("what the leader decided is not written", job=self._log.job, why=str(why), **_fields(expiry))
                self._on_appended(why)
            else:
                # The registry logs the loss of an agent once, not once for each job.
                _log.debug("what the leader decided is written", job=self._log.job, **_fields(expiry))
                self._on_appended(None)

    async def _append(self, decided: Decided, term: int) -> None:
        command = _command(decided, Sender(REGISTRY, term, next(self._numbers)), term)
        subject = registry_command_subject(self._log.job, str(command.__struct_config__.tag))
        assert command.by is not None
        msg_id = f"{REGISTRY}.{term}.{command.by.n}"
        await self._log.append(subject, encode(command), msg_id, timeout_s=APPEND_TIMEOUT_S)


def _command(decided: Decided, by: Sender, term: int) -> AnyCommand:
    match decided:
        case ExpireAgent():
            return Expire(by=by, agent=decided.agent, incarnation=decided.incarnation, term=term)
        case LostIncarnation():
            return ForgetAgent(by=by, agent=decided.agent, incarnation=decided.incarnation, term=term)
        case OverdueHold():
            return EndHold(by=by, model=decided.model, holder=decided.holder, term=term)


def _fields(decided: Decided) -> dict[str, object]:
    if isinstance(decided, OverdueHold):
        return {"model": decided.model, "holder": decided.holder}
    return {"agent": decided.agent, "incarnation": decided.incarnation}
