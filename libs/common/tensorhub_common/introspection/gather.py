"""One question to all processes of the hub, each of which answers for itself, and their answers.

Always true: the asker waits for a bounded time and takes at most `ANSWERS_MAX` answers; an answer that can't be read is
of another version of this program, and is left out.
"""

import asyncio
from collections.abc import Collection
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from tensorhub_common.bus.connection import NO_RESPONDERS, Bus
from tensorhub_common.bus.message import Message
from tensorhub_common.errors import BadCommand
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.queries import QueryError

GATHER_S_MAX: Final = 3.0
"""A process that has not answered within this is left out."""

QUIET_S: Final = 0.4
"""After this time without an answer only processes that are known to live are waited for."""

ANSWERS_MAX: Final = 10_000


class _Answer(Protocol):
    @property
    def process(self) -> str:
        """The process that answers."""
        ...


A = TypeVar("A", bound=_Answer)


async def gather_answers(
    bus: Bus,
    subject: str,
    question: bytes,
    kind: type[A],
    known: Collection[str] = (),
    timeout_s: float = GATHER_S_MAX,
) -> tuple[A, ...]:
    """Ask every process, and return what came within the bound. `known` are processes that should answer.

    Raises `BadCommand` where all that answer refuse the question, and `NoBus` without a connection.
    """
    inbox = bus.new_inbox()
    gathering = _Gathering(kind, set(known))
    subscription = await bus.subscribe(inbox, gathering.take)
    try:
        await bus.publish(subject, question, reply=inbox)
        await gathering.wait(timeout_s)
    finally:
        await subscription.close()
    return gathering.result()


class _Gathering(Generic[A]):
    """The answers to one question, as they come in."""

    def __init__(self, kind: type[A], known: set[str]) -> None:
        self._decoder = msgspec.json.Decoder(kind | QueryError)
        self._missing = known
        self._answers: list[A] = []
        self._refusal: QueryError | None = None
        self._nobody = False
        self._came = asyncio.Event()

    def take(self, message: Message) -> None:
        if message.status == NO_RESPONDERS:
            self._nobody = True
        elif len(self._answers) < ANSWERS_MAX:
            try:
                answer = self._decoder.decode(message.data)
            except MALFORMED:
                return
            if isinstance(answer, QueryError):
                self._refusal = answer
            else:
                self._answers.append(answer)
                self._missing.discard(answer.process)
        self._came.set()

    async def wait(self, timeout_s: float) -> None:
        """Return once none is missing and it is quiet, at the bound, or when no process listens."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not self._nobody and (left_s := deadline - asyncio.get_running_loop().time()) > 0:
            self._came.clear()
            try:
                awaited = self._missing or not self._answers
                async with asyncio.timeout(left_s if awaited else min(QUIET_S, left_s)):
                    await self._came.wait()
            except TimeoutError:
                return

    def result(self) -> tuple[A, ...]:
        if not self._answers and self._refusal is not None:
            raise BadCommand(self._refusal.message)
        return tuple(self._answers)
