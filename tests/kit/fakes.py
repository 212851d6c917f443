"""Stand-ins for parts of an agent, for the tests of the parts beside them. Each keeps what it was told."""

import asyncio
from collections.abc import Sequence
from typing import Final

from tensorhub_agent.primitives.lease_messages import AvailabilityUpdate
from tensorhub_agent.storage.segments import Segment
from tensorhub_agent.transports.base import (
    LeaseOpened,
    OnAvailability,
    OnLost,
    SourceSession,
    TicketRejected,
    TransportLost,
    unheard,
)
from tensorhub_common.protocol.leases import LeaseGrant
from tensorhub_common.runtime.supervision import Fault

GIVE_UP_S: Final = 60.0


class FakeLeases:
    """A `LeaseAuthority` whose tickets are good once."""

    def __init__(self) -> None:
        self.tickets: dict[str, LeaseOpened] = {}
        self.open: set[str] = set()
        self.waits = False
        """Whether readers are told, when they renew, that the source is alive."""
        self.told: list[tuple[str, str]] = []
        self._changed = asyncio.Event()

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
        return self.waits

    def holds(self, lease: str) -> bool:
        return lease in self.open

    def ended(self, lease: str, done: bool) -> None:  # noqa: FBT001 (as LeaseAuthority has it)
        self.open.discard(lease)
        self._tell("done" if done else "gone", lease)

    @property
    def ends(self) -> list[tuple[str, str]]:
        return [told for told in self.told if told[0] != "renewed"]

    def _tell(self, what: str, lease: str) -> None:
        self.told.append((what, lease))
        self._changed.set()

    async def until(self, what: str, lease: str = "lease") -> None:
        async with asyncio.timeout(GIVE_UP_S):
            while (what, lease) not in self.told:
                self._changed.clear()
                await self._changed.wait()


class Lost:
    """An `on_lost` that can be waited for."""

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


class FakeTransport:
    """A `Transport` that opens nothing."""

    def __init__(self, endpoint: str, failure: Exception | None = None) -> None:
        self.endpoint, self.failure = endpoint, failure
        self.told: list[str] = []
        self.served_bytes, self.links = 5, 2

    async def start(self) -> None:
        if self.failure is not None:
            raise self.failure
        self.told.append("start")

    async def stop(self) -> None:
        self.told.append("stop")

    def break_lease(self, lease: str, reason: str) -> None:
        self.told.append(f"break {lease}: {reason}")

    def announce(self, lease: str, news: AvailabilityUpdate) -> None:
        self.told.append(f"announce {lease}: {news}")

    async def open(
        self, grant: LeaseGrant, *, reader: str, on_lost: OnLost, on_have: OnAvailability = unheard
    ) -> SourceSession:
        self.told.append(f"open {grant.lease} as {reader}")
        raise TransportLost("a fake opens nothing")


class LastResort:
    """Stands for the program's `main`: a fault that comes here ends the process."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self._came = asyncio.Event()

    def take(self, fault: Fault) -> None:
        self.faults.append(fault)
        self._came.set()

    async def wait(self) -> Fault:
        async with asyncio.timeout(GIVE_UP_S):
            await self._came.wait()
        return self.faults[0]
