"""The answering side of request and reply: runs a handler for each question, and for a bounded number at a time.

Always true: at most `concurrent_max` handlers run and at most `pending_max` questions wait; what comes on top is told
`Busy` at once. Every question gets an answer: what the handler returned, or its error under the error's name.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from tensorhub_common.bus.failures import Busy
from tensorhub_common.bus.message import Message
from tensorhub_common.errors import TensorHubError, from_code

CONCURRENT_MAX: Final = 64
PENDING_MAX: Final = 1024
HANDLER_S_MAX: Final = 300.0
"""No question is worth more than this; whoever asks has given up long before."""

ERROR_HEADER: Final = "Tensorhub-Error"
"""Carries the name of the error when the body of an answer is its message."""

Handler = Callable[[Message], Awaitable[bytes]]
Respond = Callable[[Message, bytes, Mapping[str, str]], Awaitable[None]]

_log: Final = logging.getLogger(__name__)


class Answering:
    """Questions of one subscription, on their way through a handler."""

    def __init__(self, handler: Handler, respond: Respond, *, concurrent_max: int, pending_max: int) -> None:
        self._handler = handler
        self._respond = respond
        self._concurrent_max = concurrent_max
        self._pending_max = pending_max
        self._running: set[asyncio.Task[None]] = set()
        self._pending: deque[Message] = deque()

    async def take(self, question: Message) -> None:
        """Start on a question, put it in the queue, or tell the asker that there is no room."""
        if not question.reply:
            return
        if len(self._running) < self._concurrent_max:
            self._begin(question)
        elif len(self._pending) < self._pending_max:
            self._pending.append(question)
        else:
            busy = Busy(f"{question.subject} has {self._pending_max} questions waiting: ask again a little later")
            await self._respond(question, str(busy).encode(), {ERROR_HEADER: busy.code})

    async def stop(self) -> None:
        """Cancel what runs and forget what waits."""
        self._pending.clear()
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _begin(self, question: Message) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(question))
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if self._pending:
            self._begin(self._pending.popleft())

    async def _answer(self, question: Message) -> None:
        headers: dict[str, str] = {}
        try:
            async with asyncio.timeout(HANDLER_S_MAX):
                body = await self._handler(question)
        except TensorHubError as error:
            headers, body = {ERROR_HEADER: error.code}, str(error).encode()
        except Exception as error:  # noqa: BLE001 (whatever it is, the asker must hear of it)
            # A fault of ours: the asker learns that it is one, the log learns which.
            _log.exception("no answer to a question on %s", question.subject)
            fault = f"the answering process failed with {type(error).__name__}; its log says where"
            headers, body = {ERROR_HEADER: TensorHubError().code}, fault.encode()
        try:
            await self._respond(question, body, headers)
        except TensorHubError as error:
            _log.warning("the answer to a question on %s could not be sent: %s", question.subject, error)


def answer_or_raise(answer: Message) -> bytes:
    """Return the body of an answer, or raise the error that it carries."""
    code = answer.headers.get(ERROR_HEADER)
    if code is None:
        return answer.data
    text = answer.data.decode(errors="replace")
    raise Busy(text) if code == Busy.__name__ else from_code(code, text)
