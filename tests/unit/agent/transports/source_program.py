"""A source in a process of its own: serves one segment of bytes that are never 0 to whoever comes, until it is killed.

python source_program.py FOLDER NBYTES
"""

import asyncio
import sys
from pathlib import Path

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.storage.segments import Segment, SegmentStore, segment_prefix
from tensorhub_agent.transports.base import LeaseOpened
from tensorhub_agent.transports.ucxx.transport import UcxxTransport


class AlwaysOpen:
    """Every ticket is good, and every lease holds."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def redeem(self, ticket: str, _: str) -> LeaseOpened:
        return LeaseOpened(ticket, self._segment)

    def renew(self, _: str) -> bool:
        return False

    def holds(self, _: str) -> bool:
        return True

    def ended(self, lease: str, done: bool) -> None:  # noqa: FBT001 (as LeaseAuthority has it)
        """Keep nothing."""


async def main() -> None:
    store = SegmentStore(Path(sys.argv[1]), segment_prefix("hub1", "alone"), 1 << 32)
    segment = store.create(int(sys.argv[2]))
    segment.view[:] = b"\x07" * segment.nbytes
    book = AlwaysOpen(segment)
    transport = UcxxTransport(address="127.0.0.1", agent="alone", pool=CopyPool(1), leases=book, fault=sys.exit)
    await transport.start()
    print("ready", transport.endpoint, flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
