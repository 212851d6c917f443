"""Questions for leases whose answer is known soon: each is asked again when something has happened, until its bound."""

import asyncio
from collections.abc import Callable

from tensorhub_common.protocol.plans import LeaseAnswer


class Postponed:
    """The questions that wait. Nothing is done for them while there are none."""

    def __init__(self) -> None:
        """Begin with none."""
        self._waiting: list[asyncio.Event] = []

    def happened(self) -> None:
        """Let all that wait be asked again."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                each.set()

    async def answer(self, question: Callable[[], LeaseAnswer | None], bound_s: float) -> LeaseAnswer | None:
        """Return the first answer that is not None; None after the bound."""
        answer = question()
        until = asyncio.get_running_loop().time() + bound_s
        while answer is None:
            something = asyncio.Event()
            self._waiting.append(something)
            try:
                async with asyncio.timeout_at(until):
                    await something.wait()
            except TimeoutError:
                return None
            finally:
                if something in self._waiting:
                    self._waiting.remove(something)
            answer = question()
        return answer
