"""The ways for bytes that this agent has: local always, ucxx where UCX can be used.

An agent without UCX serves its host all the same. A read over ucxx from it, or by it, fails with the reason.
"""

import logging
from typing import Final

from tensorhub_agent.primitives.lease_messages import AvailabilityUpdate
from tensorhub_agent.transports.base import (
    OnAvailability,
    OnLost,
    SourceSession,
    Transport,
    TransportLost,
    TransportUnavailable,
)
from tensorhub_common.protocol.leases import LeaseGrant
from tensorhub_common.protocol.plans import Transport as Name

_log: Final = logging.getLogger(__name__)


class TransportRegistry:
    """All transports of one agent."""

    def __init__(self, local: Transport, ucxx: Transport | None) -> None:
        """Take the local transport, and the one between hosts unless it was switched off."""
        self._by_name: dict[Name, Transport] = {"local": local}
        self._ucxx = ucxx
        self._why_no_ucxx = "it was switched off by TENSORHUB_UCXX=off"

    async def start(self) -> None:
        """Start them. Without UCX the agent goes on, and says so."""
        await self._by_name["local"].start()
        if self._ucxx is None:
            return
        try:
            await self._ucxx.start()
        except TransportUnavailable as why:
            self._why_no_ucxx = str(why)
            _log.warning("this agent can't exchange bytes with other hosts: %s", why)
        else:
            self._by_name["ucxx"] = self._ucxx

    async def stop(self) -> None:
        """Stop them all."""
        for transport in self._by_name.values():
            await transport.stop()

    def endpoint(self, name: Name) -> str | None:
        """Return where readers find a transport; None when this agent doesn't have it."""
        transport = self._by_name.get(name)
        return None if transport is None else transport.endpoint

    def served_bytes(self) -> dict[str, int]:
        """Return what readers took from here, by transport. It may be called from another thread."""
        return {name: transport.served_bytes for name, transport in list(self._by_name.items())}

    def connections(self) -> dict[str, int]:
        """Return how many connections there are, by transport. It may be called from another thread."""
        return {name: transport.links for name, transport in list(self._by_name.items())}

    def lack(self, name: Name) -> str:
        """Say why a transport is not there, and what to do."""
        return f"this agent has no transport {name!r}: {self._why_no_ucxx}; 'tensorhub doctor' on its host says more"

    def break_lease(self, lease: str, reason: str) -> None:
        """See `Transport.break_lease`; whichever transport serves it."""
        for transport in self._by_name.values():
            transport.break_lease(lease, reason)

    def announce(self, lease: str, update: AvailabilityUpdate) -> None:
        """See `Transport.announce`; whichever transport serves it."""
        for transport in self._by_name.values():
            transport.announce(lease, update)

    async def open(
        self, name: Name, grant: LeaseGrant, *, reader: str, on_lost: OnLost, on_have: OnAvailability
    ) -> SourceSession:
        """See `Transport.open`."""
        transport = self._by_name.get(name)
        if transport is None:
            raise TransportLost(f"agent {reader!r} can't read: {self.lack(name)}")
        return await transport.open(grant, reader=reader, on_lost=on_lost, on_have=on_have)
