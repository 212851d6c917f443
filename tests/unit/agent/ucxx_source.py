"""A source in a process of its own: serves one segment of bytes that are never 0 to whoever comes, until it is killed.

python ucxx_source.py FOLDER NBYTES
"""

import asyncio
import sys
from pathlib import Path

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.storage.segments import SegmentStore, segment_prefix
from tensorhub_agent.transports.base import LeaseOpened
from tensorhub_agent.transports.ucxx.server import Book
from tensorhub_agent.transports.ucxx.transport import UcxxTransport


async def main() -> None:
    store = SegmentStore(Path(sys.argv[1]), segment_prefix("hub1", "alone"), 1 << 32)
    segment = store.create(int(sys.argv[2]))
    segment.view[:] = b"\x07" * segment.nbytes
    book = Book(
        redeem=lambda ticket, _: LeaseOpened(ticket, segment),
        renew=lambda _: False,
        holds=lambda _: True,
        ended=lambda _lease, _done: None,
    )
    transport = UcxxTransport(address="127.0.0.1", agent="alone", pool=CopyPool(1), book=book, fault=sys.exit)
    await transport.start()
    print("ready", transport.endpoint, flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
