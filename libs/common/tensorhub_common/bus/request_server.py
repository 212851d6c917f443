"""The answering side of request and reply: runs a handler for each question, and for a bounded number at a time.

Always true: at most `concurrent_max` handlers run and at most `pending_max` questions wait, and of either one subject
has at most half; what comes on top is answered `Busy` at once. A subject names the job, or the agent that asks, so a
flood from one leaves room for all others, and they take turns. Every question gets an answer (what the handler
returned, or its error under the error's name; none past `BUSY_MAX`), and no answer goes anywhere but to an inbox: a
reply subject comes from outside, and this process may publish where the asker may not. Where askers are known to wait
no longer than `age_s_max`, an older question is dropped when its turn comes: its asker has given up, and in a storm of
questions such work would be all that is done, since each asker that gave up asks again behind it.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from tensorhub_common.bus.errors import Busy, MessageTooLarge
from tensorhub_common.bus.message import Message
from tensorhub_common.bus.subscription import Subscription
from tensorhub_common.errors import TensorHubError, from_code
from tensorhub_common.protocol.subjects import is_inbox
from tensorhub_common.runtime.supervision import Supervisor, log_only

CONCURRENT_MAX: Final = 64
PENDING_MAX: Final = 1024
BUSY_MAX: Final = 256
"""Limit of answers `Busy` under way; while the socket takes not even those, other askers get no answer and time out."""
HANDLER_S_MAX: Final = 300.0
"""The time after which a handler is stopped; its asker has given up long before."""

ERROR_HEADER: Final = "Tensorhub-Error"
"""Carries the name of the error when the body of an answer is its message."""

RequestHandler = Callable[[Message], Awaitable[bytes]]
SendReply = Callable[[Message, bytes, Mapping[str, str]], Awaitable[None]]

_log: Final = logging.getLogger(__name__)


class RequestServer:
    """Questions of one subscription, on their way through a handler."""

    def __init__(
        self,
        handler: RequestHandler,
        respond: SendReply,
        work: Supervisor,
        *,
        concurrent_max: int,
        pending_max: int,
        age_s_max: float = HANDLER_S_MAX,
    ) -> None:
        self._handler, self._work = handler, work
        self._age_s_max = age_s_max
        self.stale = 0
        """Questions whose askers had given up when their turn came."""
        self._respond = respond
        self._concurrent_max = concurrent_max
        self._pending_max = pending_max
        self._running: dict[asyncio.Task[None], str] = {}
        self._running_of: Counter[str] = Counter()
        self._pending: dict[str, deque[tuple[Message, float]]] = {}
        """By subject, with the time of arrival; the subject whose turn is next is first."""
        self._pending_count = 0
        self._refusing: set[asyncio.Task[None]] = set()
        self._foreign_replies = 0

    def take(self, question: Message) -> None:
        """Start on a question, put it in the queue, or tell the asker that there is no room."""
        if not question.reply:
            return
        if not is_inbox(question.reply):
            self._note_foreign(question)
            return
        now = asyncio.get_running_loop().time()
        waiting = self._pending.get(question.subject, ())
        if not waiting and self._has_room(question.subject):
            self._begin(question, now)
        elif self._pending_count < self._pending_max and len(waiting) < _share(self._pending_max):
            self._pending.setdefault(question.subject, deque()).append((question, now))
            self._pending_count += 1
        elif len(self._refusing) < BUSY_MAX:
            busy = Busy(f"{question.subject} has {len(waiting)} questions waiting: ask again a little later")
            task = self._work.start(self._refuse(question, busy), "refusing a question", on_fault=log_only)
            self._refusing.add(task)
            task.add_done_callback(self._refusing.discard)

    async def stop(self) -> None:
        """Cancel what runs and forget what waits."""
        self._pending.clear()
        self._pending_count = 0
        running = [*self._running, *self._refusing]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _begin(self, question: Message, arrived: float) -> None:
        # What fails here fails this question alone, and its asker gets no answer.
        task = self._work.start(self._answer(question, arrived), "answering a question", on_fault=log_only)
        self._running[task] = question.subject
        self._running_of[question.subject] += 1
        task.add_done_callback(self._work.guarded(self._ended, "beginning with the next question"))

    def _ended(self, task: asyncio.Task[None]) -> None:
        subject = self._running.pop(task)
        self._running_of[subject] -= 1
        if not self._running_of[subject]:
            del self._running_of[subject]
        following = next((each for each in self._pending if self._has_room(each)), None)
        if following is not None:
            self._begin(*self._next_of(following))

    def _has_room(self, subject: str) -> bool:
        return len(self._running) < self._concurrent_max and self._running_of[subject] < _share(self._concurrent_max)

    def _next_of(self, subject: str) -> tuple[Message, float]:
        """Take the oldest question of a subject, which has its next turn after all others."""
        waiting = self._pending.pop(subject)
        question = waiting.popleft()
        self._pending_count -= 1
        if waiting:
            self._pending[subject] = waiting
        return question

    def _note_foreign(self, question: Message) -> None:
        self._foreign_replies += 1
        if self._foreign_replies == 1:
            _log.warning(
                "a question on %s wants its answer on %.200s, which is no inbox, and gets none (said once)",
                question.subject,
                question.reply,
            )

    async def _answer(self, question: Message, arrived: float) -> None:
        if asyncio.get_running_loop().time() - arrived > self._age_s_max:
            self.stale += 1
            return
        headers: dict[str, str] = {}
        try:
            async with asyncio.timeout(HANDLER_S_MAX):
                body = await self._handler(question)
        except TensorHubError as error:
            headers, body = {ERROR_HEADER: error.code}, str(error).encode()
        except Exception as error:  # noqa: BLE001 (whatever it is, the asker must get an answer)
            # A fault of ours: the asker learns that it is one, the log learns which.
            self._work.fault(f"answering a question on {question.subject}", error, log_only)
            fault = f"the answering process failed with {type(error).__name__}; its log says where"
            headers, body = {ERROR_HEADER: TensorHubError().code}, fault.encode()
        await self._say(question, body, headers)

    async def _refuse(self, question: Message, busy: Busy) -> None:
        await self._say(question, str(busy).encode(), {ERROR_HEADER: busy.code})

    async def _say(self, question: Message, body: bytes, headers: Mapping[str, str]) -> None:
        try:
            try:
                await self._respond(question, body, headers)
            except MessageTooLarge as error:
                # Without a word the asker would ask again, and again for nothing.
                _log.warning("the answer to a question on %s is too long: %s", question.subject, error)
                await self._respond(question, str(error).encode(), {ERROR_HEADER: error.code})
        except TensorHubError as error:
            _log.warning("the answer to a question on %s could not be sent: %s", question.subject, error)


def _share(count_max: int) -> int:
    """Return how much of a bound one subject may have."""
    return max(1, count_max // 2)


def answer_or_raise(answer: Message) -> bytes:
    """Return the body of an answer, or raise the error that it carries."""
    code = answer.headers.get(ERROR_HEADER)
    if code is None:
        return answer.data
    text = answer.data.decode(errors="replace")
    raise Busy(text) if code == Busy.__name__ else from_code(code, text)


class RequestService:
    """A handler that answers the questions on a subject, until `close`."""

    def __init__(self, subscription: Subscription, answering: RequestServer) -> None:
        self._subscription = subscription
        self._answering = answering
        self.is_closed = False

    @property
    def stale(self) -> int:
        """How many questions were too old when their turn came."""
        return self._answering.stale

    async def close(self) -> None:
        """Take no more questions and cancel those under way."""
        self.is_closed = True
        await self._subscription.close()
        await self._answering.stop()
