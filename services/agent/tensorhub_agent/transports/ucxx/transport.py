"""The transport between agents of different hosts: UCX, over RDMA where the host's UCX has it, else over TCP.

The source listens. A reader connects, shows its ticket, posts its receives and asks for what should go into them. Each
open lease has its own connection, so closing one affects no other read. Closing ends the receives that a stopped or
unreachable source will never complete, so a destination always has one writer.

A lease that ends in order leaves its connection to the next lease, because making a connection costs more than reading
a small model. `IdleLinkPool` stores the connections to sources that no lease uses at the moment.

`engine.py` is the thread that runs UCX, `session.py` is the reader, and `server.py` is the source.

Invariants:
- Nothing is under way on an idle connection, and the source has said so.
- An idle connection that goes down is closed and forgotten.
- At most `IDLE_LINKS_MAX` idle connections exist.
"""

import asyncio
import functools
import secrets
from collections.abc import Callable
from typing import Final

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.primitives.lease_messages import AvailabilityUpdate, Hello
from tensorhub_agent.storage.mapping_cache import MAPPINGS_MAX, MappingCache
from tensorhub_agent.transports.base import (
    LeaseAuthority,
    OnAvailability,
    OnLost,
    TransportLost,
    opening,
    unheard,
)
from tensorhub_agent.transports.lease_server import LeaseServer
from tensorhub_agent.transports.ucxx.bounce_buffers import SlotPool
from tensorhub_agent.transports.ucxx.engine import UcxxEngine
from tensorhub_agent.transports.ucxx.link import UcxxLink
from tensorhub_agent.transports.ucxx.protocol.frames import COUNT_BITS, TAG_BITS, encode
from tensorhub_agent.transports.ucxx.server import ReaderConnection
from tensorhub_agent.transports.ucxx.session import UcxxSession
from tensorhub_common.protocol.handshake import OLDEST_PROTOCOL
from tensorhub_common.protocol.leases import LeaseGrant
from tensorhub_common.protocol.log.commands import PROTOCOL
from tensorhub_common.runtime.supervision import Supervisor

IDLE_LINKS_MAX: Final = 64
"""Above this the one that has been idle for longest is closed."""


class IdleLinkPool:
    """All idle connections of one agent, the longest idle first."""

    def __init__(self) -> None:
        """Begin with none."""
        self._links: dict[UcxxLink, str] = {}
        # A connection that can't be closed may bring bytes, so a fault ends the process.
        self._closing = Supervisor("idle connections over ucxx").group()

    def put(self, endpoint: str, link: UcxxLink) -> None:
        """Keep a connection to a source."""
        link.on_frame = lambda _: self._drop(link)
        link.on_down = lambda _: self._drop(link)
        self._links[link] = endpoint
        if link.over is not None or len(self._links) > IDLE_LINKS_MAX:
            self._drop(link if link.over is not None else next(iter(self._links)))

    def take(self, endpoint: str) -> UcxxLink | None:
        """Return the connection to a source that was used last, if there is one."""
        for link, where in reversed(self._links.items()):
            if where == endpoint:
                del self._links[link]
                return link
        return None

    async def close(self) -> None:
        """Close them all."""
        for link in list(self._links):
            self._drop(link)
        await self._closing.ended()

    def _drop(self, link: UcxxLink) -> None:
        if self._links.pop(link, None) is not None:
            self._closing.start(link.close(), "closing one")


OPEN_S: Final = 1.8
"""A source that doesn't let a reader in within this is left out. It takes some milliseconds."""


class _Gate:
    """Lets a loss through only once the session was opened: before, `open` itself tells."""

    def __init__(self, on_lost: OnLost) -> None:
        self._on_lost, self.is_open = on_lost, False

    def lost(self, reason: str) -> None:
        if self.is_open:
            self._on_lost(reason)


class UcxxTransport:
    """Both sides of the ucxx transport of one agent. See `Transport`."""

    def __init__(
        self,
        *,
        address: str,
        agent: str,
        pool: CopyPool,
        leases: LeaseAuthority,
        fault: Callable[[str], None],
    ) -> None:
        """Be reached at `address`, an IP, and ask `leases` about tickets.

        `fault` is called when bytes may arrive that nothing but the end of this process can stop.
        """
        self._address, self._agent, self._pool, self._leases = address, agent, pool, leases
        self._cache = MappingCache(MAPPINGS_MAX)
        self._engine = UcxxEngine(address, self._arrived, fault)
        self._idle = IdleLinkPool()
        self._slots = SlotPool()
        self._port = 0
        self._readers: set[ReaderConnection] = set()
        self.served_bytes = 0
        """What was sent to readers."""

    @property
    def endpoint(self) -> str:
        """IP and port, as `address:port`."""
        return f"{self._address}:{self._port}"

    @property
    def links(self) -> int:
        """How many connections there are, from readers and to sources."""
        return self._engine.links

    async def start(self) -> None:
        """Load UCX and listen. Raises `TransportUnavailable`."""
        self._port = await self._engine.start()

    async def stop(self) -> None:
        """See `Transport.stop`."""
        readers = list(self._readers)
        for reader in readers:
            reader.end("the agent ends")
        await asyncio.gather(*(reader.ended() for reader in readers))
        await self._idle.close()
        await self._engine.stop()
        self._cache.close()

    def break_lease(self, lease: str, reason: str) -> None:
        """See `Transport.break_lease`."""
        for reader in self._readers:
            if reader.lease == lease:
                reader.break_off(reason)
                return

    def announce(self, lease: str, update: AvailabilityUpdate) -> None:
        """See `Transport.announce`."""
        for reader in self._readers:
            if reader.lease == lease:
                reader.announce(update)
                return

    async def open(
        self, grant: LeaseGrant, *, reader: str, on_lost: OnLost, on_have: OnAvailability = unheard
    ) -> UcxxSession:
        """See `Transport.open`."""
        address, _, port = grant.endpoint.rpartition(":")
        if not address or not port.isdigit():
            raise TransportLost(f"the source named {grant.endpoint!r}, which is no address of this transport")
        async with opening(grant.endpoint, OPEN_S):
            return await self._opened(grant, address, int(port), reader, _Gate(on_lost), on_have)

    async def _opened(
        self, grant: LeaseGrant, address: str, port: int, reader: str, gate: _Gate, on_have: OnAvailability
    ) -> UcxxSession:
        """Show the ticket on an idle connection, or on a new one.

        A connection that the source has closed meanwhile has not taken the ticket, so it is shown again.
        """
        while True:
            link = self._idle.take(grant.endpoint)
            is_new = link is None
            link = link or self._engine.connect(address, port)
            keep = functools.partial(self._idle.put, grant.endpoint)
            session = UcxxSession(link, self._fresh_tag(), self._pool, self._slots, gate.lost, on_have, keep)
            link.send(encode(Hello(OLDEST_PROTOCOL, grant.ticket, reader, PROTOCOL)))
            try:
                await session.welcomed()
            except TransportLost:
                if is_new or not session.unanswered:
                    raise
            else:
                gate.is_open = True
                return session
            finally:
                if not gate.is_open:
                    await session.close()

    def _fresh_tag(self) -> int:
        return secrets.randbits(TAG_BITS - COUNT_BITS) << COUNT_BITS

    def _arrived(self, link: UcxxLink) -> None:
        lease, gone = LeaseServer(self._agent, self._leases), self._readers.discard
        reader = ReaderConnection(link, lease, self._cache, self._pool, self._slots, gone, count=self._sent)
        self._readers.add(reader)

    def _sent(self, nbytes: int) -> None:
        self.served_bytes += nbytes
