"""What the tests of every transport stand in for: who decides about leases, and who hears of losses."""

import asyncio
from collections.abc import Sequence
from typing import Final

from tensorhub_agent.storage.segments import Segment
from tensorhub_agent.transports.base import LeaseOpened, TicketRejected

GIVE_UP_S: Final = 60.0


class Book:
    """A LeaseBook: tickets are good once, and what is told is written down."""

    def __init__(self) -> None:
        self.tickets: dict[str, LeaseOpened] = {}
        self.open: set[str] = set()
        self.told: list[tuple[str, str]] = []
        self.news = asyncio.Event()

    def offer(self, lease: str, segment: Segment, patches: Sequence[tuple[bytes, ...] | None] = ()) -> None:
        self.tickets[f"ticket-{lease}"] = LeaseOpened(lease, segment, patches=patches)

    def redeem(self, ticket: str, reader: str) -> LeaseOpened | TicketRejected:
        opened = self.tickets.pop(ticket, None)
        if opened is None:
            return TicketRejected("the ticket is unknown, used or too old")
        self.open.add(opened.lease)
        return opened

    def renew(self, lease: str) -> bool:
        self._tell("renewed", lease)
        return False

    def holds(self, lease: str) -> bool:
        return lease in self.open

    def ended(self, lease: str, done: bool) -> None:  # noqa: FBT001 (as LeaseBook has it)
        self.open.discard(lease)
        self._tell("done" if done else "gone", lease)

    def _tell(self, what: str, lease: str) -> None:
        self.told.append((what, lease))
        self.news.set()

    async def until(self, what: str, lease: str) -> None:
        async with asyncio.timeout(GIVE_UP_S):
            while (what, lease) not in self.told:
                self.news.clear()
                await self.news.wait()


class Lost:
    """An on_lost that can be waited for."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self._event = asyncio.Event()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self._event.set()

    async def wait(self) -> str:
        async with asyncio.timeout(GIVE_UP_S):
            await self._event.wait()
        (reason,) = self.reasons
        return reason
