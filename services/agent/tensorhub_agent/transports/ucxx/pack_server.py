"""The serving side of packed pieces over ucxx: packs what one open lease's reader asks for, and keeps it until fetched.

Packing reads the segment as sending does: should the lease be broken meanwhile, the digests at the reader judge.

Invariants:
- Everything that a frame asks for is checked before a byte of it is read. What is wrong raises: the connection ends.
- A connection has at most `FRAMES_MAX` frames of at most `FRAME_PIECES_BYTES_MAX` packed and not fetched.
- `ended` comes back only when nothing reads from the segment any more.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.encodings.codec_tasks import pack_pieces
from tensorhub_agent.transports.base import BeyondGrant, ReadableRange
from tensorhub_agent.transports.ucxx.host_copies import on_host
from tensorhub_agent.transports.ucxx.link import UcxxLink
from tensorhub_agent.transports.ucxx.protocol.frames import FetchPacked, PackReply, PackRequest, encode
from tensorhub_agent.transports.ucxx.protocol.message_plan import MESSAGES_MAX
from tensorhub_common.errors import BadCommand
from tensorhub_common.layout.layout import PIECE_BYTES_MAX
from tensorhub_common.runtime.supervision import Supervisor

FRAMES_MAX: Final = 16
"""The most frames that are packed for one reader at a time: more than batches under way on a slow link."""

FRAME_PIECES_BYTES_MAX: Final = 32 * 1024 * 1024
"""The most bytes of pieces in one frame: a batch and more."""

UNITS: Final = frozenset({1, 2, 4, 8})


class PackServer:
    """What is packed, or being packed, for one lease."""

    def __init__(
        self,
        link: UcxxLink,
        pool: CopyPool,
        readable: ReadableRange,
        settled: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        """Pack out of `readable`; `settled` is called when something has been packed, `failed` with why it can't be."""
        self._failed = failed
        self._link, self._pool, self._readable, self._settled = link, pool, readable, settled
        self._packed: dict[int, bytes] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._work = Supervisor("packing for a reader", on_fault=lambda fault: failed(str(fault)))

    @property
    def is_busy(self) -> bool:
        """Whether the segment is being read."""
        return bool(self._tasks)

    def take(self, frame: PackRequest) -> None:
        """Begin to pack. Raises when it may not be asked for."""
        self._check(frame)
        self._tasks[frame.number] = self._work.start(self._pack(frame), "a frame")

    def fetch(self, frame: FetchPacked) -> memoryview:
        """Return what was packed under a number, once."""
        packed = self._packed.pop(frame.number, None)
        if not packed:
            raise BeyondGrant(f"nothing is packed under number {frame.number}")
        return memoryview(packed)

    async def ended(self) -> None:
        """Forget what was packed, and wait until nothing is being packed."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._packed.clear()

    def _check(self, frame: PackRequest) -> None:
        if len(self._tasks) + len(self._packed) >= FRAMES_MAX or frame.number in (*self._tasks, *self._packed):
            raise BeyondGrant(f"{FRAMES_MAX} frames are packed already, or one of number {frame.number}")
        if not 0 < len(frame.nbytes) == len(frame.origin) == len(frame.units) <= MESSAGES_MAX:
            raise BadCommand(f"{len(frame.nbytes)} pieces from {len(frame.origin)} places can't be packed")
        if sum(frame.nbytes) > FRAME_PIECES_BYTES_MAX:
            raise BeyondGrant(f"more than {FRAME_PIECES_BYTES_MAX} bytes were to be packed at a time")
        for nbytes, unit in zip(frame.nbytes, frame.units, strict=True):
            if unit not in UNITS or not 0 < nbytes <= PIECE_BYTES_MAX or nbytes % unit:
                raise BadCommand(f"{nbytes} bytes in units of {unit} can't be packed")
        self._readable.check(frame.origin, frame.nbytes)

    async def _pack(self, frame: PackRequest) -> None:
        try:
            view, origin = await on_host(self._pool, self._readable.view, frame.origin, frame.nbytes)
            packed = await pack_pieces(self._pool, view, origin, frame.nbytes, frame.units).result()
            whole = b"".join(packed)
            if whole:
                self._packed[frame.number] = whole
            self._link.send(encode(PackReply(frame.number, [len(each) for each in packed])))
        except Exception as why:  # noqa: BLE001 (whatever it is, the reader must not wait for what does not come)
            self._failed(f"pieces could not be packed: {why}")
        finally:
            del self._tasks[frame.number]
            self._settled()
