"""The line between a demo process and the one that shows it: messages out on stdout, orders in on stdin.

Always true: nothing else is ever written to that stdout (what a library prints goes to stderr, which is a log); when
the other side is gone, the order is to leave.
"""

import asyncio
import os
import sys
from typing import Final, TypeVar

import msgspec

from tensorhub.demo.messages import LINE_BYTES_MAX, AnyMessage, AnyOrder, Leave, Part
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.runtime.supervision import Supervisor

STDOUT: Final = 1
STDERR: Final = 2

AnOrder = TypeVar("AnOrder", bound=AnyOrder)


def part_given() -> Part:
    """Return what this process is to play, from its command line."""
    try:
        return msgspec.json.decode(sys.argv[1].encode(), type=Part)
    except (IndexError, *MALFORMED) as error:
        sys.exit(f"this is a part of 'tensorhub demo', which starts it itself ({error})")


class Station:
    """The end of the line in a demo process. It belongs to the event loop that opened it."""

    def __init__(self) -> None:
        """Take stdout for messages alone."""
        self._out = os.fdopen(os.dup(STDOUT), "wb", buffering=0)
        os.dup2(STDERR, STDOUT)
        self._orders: asyncio.Queue[AnyOrder] = asyncio.Queue()
        self._work = Supervisor("the demo's line")

    async def open(self) -> None:
        """Begin to listen."""
        reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        # Who can't hear any more leaves.
        self._work.start(self._listen(reader), "listening", lambda _: self._orders.put_nowait(Leave()))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        decoder = msgspec.json.Decoder(AnyOrder)
        while line := await reader.readline():
            self._orders.put_nowait(decoder.decode(line))
        self._orders.put_nowait(Leave())

    def say(self, message: AnyMessage) -> None:
        """Send a message. A reader that is gone is no error: the order to leave comes by itself then."""
        try:
            self._out.write(msgspec.json.encode(message) + b"\n")
        except BrokenPipeError:
            self._orders.put_nowait(Leave())

    async def next(self) -> AnyOrder:
        """Wait for an order."""
        return await self._orders.get()

    def told(self) -> AnyOrder | None:
        """Return the next order, if there is one."""
        return None if self._orders.empty() else self._orders.get_nowait()
