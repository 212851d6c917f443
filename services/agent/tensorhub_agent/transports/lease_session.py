"""The question that a reader asks of its source after the last byte: has the lease held all the time?"""

import asyncio

from tensorhub_agent.primitives.lease_messages import CONFIRM_S, ConfirmReply, ConfirmRequest


class PendingConfirmations:
    """The questions of one session that have no answer yet, on any transport."""

    def __init__(self) -> None:
        """Begin with none."""
        self._asked: dict[int, asyncio.Future[bool]] = {}
        self._count = 0

    def __bool__(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._asked)

    def ask(self) -> ConfirmRequest:
        """Return another question, to be sent to the source."""
        self._count += 1
        self._asked[self._count] = asyncio.get_running_loop().create_future()
        return ConfirmRequest(self._count)

    async def answer(self, question: ConfirmRequest) -> bool:
        """Wait for what the source says to it. Raises `TimeoutError`, in words, when that is nothing."""
        try:
            async with asyncio.timeout(CONFIRM_S):
                return await self._asked[question.number]
        except TimeoutError:
            raise TimeoutError(f"the source has not said within {CONFIRM_S:g} s whether the lease holds") from None
        finally:
            self._asked.pop(question.number, None)

    def answered(self, holds: ConfirmReply) -> None:
        """The source has said something; to a question that nobody waits for it is dropped."""
        waiting = self._asked.get(holds.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(holds.holds)

    def end(self) -> None:
        """The session is over: whoever waits is told that the lease has not held."""
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_result(False)
