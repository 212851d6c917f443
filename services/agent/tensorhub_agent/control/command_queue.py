"""Lanes: how an agent's commands reach the log, in the order in which they were said.

A lane has one command under way. It is appended with the same id until the log has acknowledged it, however long that
takes, and only then the next one is tried. The catalog recognises what came twice.

Invariants:
- The order on a lane is the order in the log.
- No single command of a lane is lost: all that was said reaches the log, or the whole incarnation that said it is given
  up, and the agent states anew what its memory has.
- That the log takes nothing is one line when it begins and one when it is over, however many lanes wait and try again.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from tensorhub_common.bus.errors import LogMissing, MessageTooLarge
from tensorhub_common.errors import TensorHubError
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.observability.trace_context import TraceContext, headers_of
from tensorhub_common.protocol.log.codec import encode
from tensorhub_common.protocol.log.commands import AnyCommand
from tensorhub_common.protocol.subjects import command_subject
from tensorhub_common.runtime.peer_status import PeerStatus
from tensorhub_common.runtime.supervision import Supervisor

WAITING_MAX: Final = 256
"""At this many commands that wait on one lane the incarnation is given up."""

CALLS_WAIT_MAX: Final = 128
"""At this many a shard's calls are refused: each says a few commands more, and the log takes none of them now."""

AGAIN_S: Final = 0.2
"""How long to wait after the log could not be reached within an append's own bound."""

_log: Final = logging.getLogger(__name__)


class CommandQueue:
    """All lanes of one agent in one job."""

    def __init__(
        self, joblog: JobLog, reopen: Callable[[], Awaitable[None]], work: Supervisor, give_up: Callable[[], None]
    ) -> None:
        """Append to this log; `reopen` asks a registry to make it when it is missing.

        `give_up` is called where a lane has no room left: the agent joins anew, and what waits is forgotten.
        """
        self._joblog, self._reopen, self._work, self._give_up = joblog, reopen, work, give_up
        self._waiting: dict[str, deque[tuple[AnyCommand, dict[str, str]]]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._refused: set[str] = set()
        """The lanes of which the log did not take the command that was tried last."""
        self._log_taking = PeerStatus(
            f"the log of job {joblog.job}",
            lost="takes no commands from here, so they wait and are tried again",
            back="takes commands again",
        )

    def say(self, command: AnyCommand, cause: TraceContext | None = None) -> None:
        """Append the command after all earlier ones of its lane. `cause` is the span that it belongs to."""
        by = command.by
        if by is None:
            raise ValueError(f"an agent's command must name its sender: {command}")
        queue = self._waiting.setdefault(by.lane, deque())
        if len(queue) >= WAITING_MAX:
            # A lane with a gap would say things out of order, so this incarnation says nothing more.
            _log.error(
                "the log has taken none of the %d commands of lane %s that wait: the agent joins anew",
                len(queue),
                by.lane,
            )
            self._give_up()
            return
        queue.append((command, headers_of(cause)))
        if by.lane not in self._tasks:
            self._tasks[by.lane] = self._work.start(self._run(by.lane, queue), f"appending the commands of {by.lane}")

    def waiting(self, lane: str) -> int:
        """Return how many commands of a lane the log has not taken."""
        return len(self._waiting.get(lane, ()))

    def forget(self) -> None:
        """Drop what waits: an older incarnation said it, and would be refused."""
        for queue in self._waiting.values():
            queue.clear()
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        self._waiting.clear()
        # Whether the log takes commands is told by the next one that is said.
        self._refused.clear()

    async def _run(self, lane: str, queue: deque[tuple[AnyCommand, dict[str, str]]]) -> None:
        while queue:
            command, headers = queue[0]
            await self._append(command, headers)
            if queue and queue[0][0] is command:
                queue.popleft()
        if self._tasks.get(lane) is asyncio.current_task():
            del self._tasks[lane]

    async def _append(self, command: AnyCommand, headers: dict[str, str]) -> None:
        by = command.by
        assert by is not None
        verb = str(command.__struct_config__.tag)
        subject = command_subject(self._joblog.job, verb, by.process)
        body = encode(command)
        msg_id = f"{by.lane}:{by.incarnation}:{by.n}"
        while True:
            try:
                await self._joblog.append(subject, body, msg_id, headers)
            except LogMissing:
                why = await self._try_reopen()
                if why is not None:
                    self._note_refused(by.lane, f"the job has no log, and no registry makes one: {why}")
            except MessageTooLarge:
                # No command that a core says can be that large; going on without it would leave a gap.
                raise
            except TensorHubError as refusal:
                self._note_refused(by.lane, str(refusal))
            else:
                self._note_taken(by.lane)
                return
            await asyncio.sleep(AGAIN_S)

    async def _try_reopen(self) -> TensorHubError | None:
        """Have the log made; return why it was not."""
        try:
            await self._reopen()
        except TensorHubError as why:
            return why
        return None

    def _note_refused(self, lane: str, why: str) -> None:
        # That NATS is away the bus itself has said, once.
        if self._joblog.is_reachable:
            self._refused.add(lane)
            self._log_taking.is_silent(why)

    def _note_taken(self, lane: str) -> None:
        # A log that is nearly full takes a short command and refuses a long one: that is no end of it.
        self._refused.discard(lane)
        if not self._refused:
            self._log_taking.answers()
