"""The questions of one process that are under way, and where their answers come in.

Invariants: a reply reaches the request that it answers, or is dropped; where the connection breaks, or the server
refuses a request, the caller gets the error at once instead of a time-out.
"""

import asyncio
from secrets import token_hex
from typing import Final

from tensorhub_common.bus.errors import NoBus
from tensorhub_common.bus.message import Message
from tensorhub_common.errors import TensorHubError

TOKEN_BYTES: Final = 12
"""In each inbox, and in each question's own: agents may write to any inbox, and see those of who asks them, so where
the answers of others are awaited must not be guessed. (nats-py's own go up by small steps.)"""


class RequestMux:
    """Questions whose answers come in below one inbox."""

    def __init__(self, inbox: str) -> None:
        """Wait for nothing yet."""
        self.inbox = inbox
        self._waiting: dict[str, tuple[str, asyncio.Future[Message]]] = {}

    def begin(self, subject: str) -> tuple[str, asyncio.Future[Message]]:
        """Expect an answer to what is asked on a subject; return where it comes in, and the answer to come.

        Without a subject the request goes to its own reply subject. Each `begin` needs an `end`.
        """
        token = token_hex(TOKEN_BYTES)
        inbox = f"{self.inbox}.{token}"
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[token] = (subject or inbox, answer)
        return inbox, answer

    def end(self, inbox: str) -> None:
        """Expect no answer there any more."""
        _, answer = self._waiting.pop(_token(inbox))
        if answer.done() and not answer.cancelled():
            # Where the connection breaks while the question itself waits for room in the socket, as it does where NATS
            # is stopped, the asker never looks at its answer: asyncio would report an error that was never fetched.
            answer.exception()

    def take(self, message: Message) -> None:
        """Take what came in."""
        _, answer = self._waiting.get(_token(message.subject), (None, None))
        if answer is not None and not answer.done():
            answer.set_result(message)

    def refuse(self, subject: str, error: TensorHubError) -> None:
        """The server lets nothing of this process through to a subject, which is in lower case."""
        for asked, answer in self._waiting.values():
            if asked.lower() == subject and not answer.done():
                answer.set_exception(error)

    def give_up(self) -> None:
        """The connection broke."""
        for _, answer in self._waiting.values():
            if not answer.done():
                broke = NoBus(
                    "the connection to NATS broke while an answer was awaited: whether it was done is unknown"
                )
                answer.set_exception(broke)


def _token(inbox: str) -> str:
    return inbox.rpartition(".")[2]
