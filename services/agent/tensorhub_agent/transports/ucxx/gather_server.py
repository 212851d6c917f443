"""The serving side of `gather` over ucxx: what one open lease's reader wants of boxes, packed and sent.

A box that is contiguous is sent out of the segment. Other boxes are packed by the copy pool into a slot of bounce
memory, and sent from there; frames that find no slot wait, so the next one is packed while the last is on the wire.

Invariants:
- Everything that a frame asks for is checked before a byte of it is read or sent. What is wrong raises, and its
  connection ends.
- The connection holds `SLOTS_MAX` slots at most, and a slot goes back only when no send out of it is under way.
- `ended` comes back only when nothing reads from the segment any more.
"""

from collections.abc import Callable, Sequence
from typing import Final

from tensorhub_agent.casting.conversion import check_cast
from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.compute.strided_copy import copy_boxes
from tensorhub_agent.primitives.block_forms import amax_bytes
from tensorhub_agent.primitives.forms import check_form
from tensorhub_agent.primitives.memory_region import MemoryRegion
from tensorhub_agent.runtime.shield import wait_shielded
from tensorhub_agent.transports.base import BeyondGrant, ReadableRange
from tensorhub_agent.transports.ucxx.bounce_buffers import BounceBuffers, SlotPool
from tensorhub_agent.transports.ucxx.host_copies import on_host
from tensorhub_agent.transports.ucxx.link import UcxxBatch, UcxxLink
from tensorhub_agent.transports.ucxx.protocol.frames import (
    AMAX_BYTES_MAX,
    BOXES_MAX,
    COMPUTED_BYTES_MAX,
    FORMS_MAX,
    FRAMES_UNDER_WAY_MAX,
    MESSAGES_MAX,
    SLOT_BYTES,
    GatherDigests,
    GatherRequest,
    encode,
)
from tensorhub_agent.transports.ucxx.protocol.gather_plan import starts
from tensorhub_common.errors import BadCommand
from tensorhub_common.programs.regions import StridedCopies, StridedForm
from tensorhub_common.runtime.supervision import Supervisor

SLOTS_MAX: Final = 4
"""The most slots that a connection packs into: one is filled, one is sent, and two make up for uneven times."""


class GatherServer:
    """The frames of one lease that are under way."""

    def __init__(
        self,
        link: UcxxLink,
        pool: CopyPool,
        store: SlotPool,
        readable: ReadableRange,
        sent: Callable[[int], None],
        failed: Callable[[str], None],
    ) -> None:
        """Send out of `readable`. `sent` is called with a frame's bytes once its last send has ended."""
        self._link, self._pool, self._readable = link, pool, readable
        self._sent, self._failed = sent, failed
        self._bounce = BounceBuffers(store, SLOTS_MAX)
        self._tasks = Supervisor("gathering for a reader", on_fault=lambda fault: failed(str(fault))).group()

    def take(self, frame: GatherRequest, nbytes_max: int) -> int:
        """Begin to send what a frame asks for; return how many bytes that is. Raises when it may not be asked for."""
        if len(self._tasks) >= FRAMES_UNDER_WAY_MAX:
            raise BeyondGrant(f"{FRAMES_UNDER_WAY_MAX} questions for boxes are under way already")
        sizes = self._checked(frame)
        nbytes = sum(frame.nbytes) + sum(sizes)
        if nbytes > nbytes_max:
            raise BeyondGrant(f"{nbytes} bytes of boxes were asked for, and {nbytes_max} more are allowed at a time")
        self._tasks.start(self._serve(frame, sizes, nbytes), "a frame")
        return nbytes

    def stop(self) -> None:
        """Begin nothing more. What is on the wire ends with the connection."""
        self._tasks.cancel()

    async def ended(self) -> None:
        """Wait until nothing is under way."""
        await self._tasks.ended()

    # What may be asked for.

    def _checked(self, frame: GatherRequest) -> list[int]:
        """Return the sizes of the messages that have to be packed."""
        _check_counts(frame)
        self._readable.check(frame.origin, frame.nbytes)
        try:
            for form in frame.forms:
                _check_packs(form)
        except ValueError as why:
            raise BadCommand(f"boxes were asked for that can't be packed: {why}") from None
        spans, sizes = [form.origin_span_bytes for form in frame.forms], [form.nbytes for form in frame.forms]
        self._readable.check(frame.box_origin, [spans[number] for number in frame.box_form])
        by_amax = [amax_bytes(form) for form in frame.forms]
        computed = [
            0 if form.blocks is None and not amax else form.origin_nbytes
            for form, amax in zip(frame.forms, by_amax, strict=True)
        ]
        if sum(computed[number] for number in frame.box_form) > COMPUTED_BYTES_MAX:
            raise BeyondGrant(f"boxes were to be computed of more than {COMPUTED_BYTES_MAX} bytes at a time")
        if len(frame.amax) > AMAX_BYTES_MAX or sum(by_amax[number] for number in frame.box_form) != len(frame.amax):
            raise BadCommand(f"{len(frame.amax)} bytes of largest magnitudes are not those of the boxes, or too many")
        each = iter([sizes[number] for number in frame.box_form])
        messages = [sum(next(each) for _ in range(count)) for count in frame.counts]
        if sum(messages) > SLOT_BYTES:
            raise BeyondGrant(f"{sum(messages)} bytes were to be packed at a time, and {SLOT_BYTES} are allowed")
        return messages

    # What is done.

    async def _serve(self, frame: GatherRequest, sizes: list[int], nbytes: int) -> None:
        batches: list[UcxxBatch] = []
        try:
            sums = await self._send_whole(frame, batches)
            sums += await self._send_packed(frame, sizes)
            if frame.sums:
                self._link.send(encode(GatherDigests(frame.tag, sums)))
        except Exception as why:  # noqa: BLE001 (whatever it is, the reader must not wait for what does not come)
            self._failed(f"boxes could not be sent: {why}")
        finally:
            for batch in batches:
                await wait_shielded(batch.ended)
            self._sent(nbytes)

    async def _send_whole(self, frame: GatherRequest, batches: list[UcxxBatch]) -> bytes:
        """Send what needs no packing, and hash it meanwhile."""
        if not frame.origin:
            return b""
        view, at = await on_host(self._pool, self._readable.view, frame.origin, frame.nbytes)
        views = [view[origin : origin + size] for origin, size in zip(at, frame.nbytes, strict=True)]
        batches.append(self._link.transmit(views, frame.tag))
        return await self._sums(frame, view, at, frame.nbytes)

    async def _send_packed(self, frame: GatherRequest, sizes: list[int]) -> bytes:
        if not sizes:
            return b""
        forms = [frame.forms[number] for number in frame.box_form]
        begins = starts([form.nbytes for form in forms])
        regions = StridedCopies(begins, frame.box_origin, forms, _amax(frame, forms))
        at = starts(sizes)
        async with self._bounce.slot() as slot:
            await copy_boxes(self._pool, slot, self._readable.view, regions).done()
            views = [slot[start : start + size] for start, size in zip(at, sizes, strict=True)]
            batch = self._link.transmit(views, frame.tag + len(frame.origin))
            try:
                return await self._sums(frame, slot, at, sizes)
            finally:
                await wait_shielded(batch.ended)

    async def _sums(self, frame: GatherRequest, view: MemoryRegion, at: Sequence[int], sizes: Sequence[int]) -> bytes:
        return await self._pool.digest(view, Spans(at, at, sizes)).result() if frame.sums else b""


def _amax(frame: GatherRequest, forms: Sequence[StridedForm]) -> Sequence[bytes]:
    """Return what comes with each box; nothing where nothing comes with any."""
    if not frame.amax:
        return ()
    sizes = [amax_bytes(form) for form in forms]
    return [frame.amax[at : at + size] for at, size in zip(starts(sizes), sizes, strict=True)]


def _check_counts(frame: GatherRequest) -> None:
    messages, boxes, forms = len(frame.origin) + len(frame.counts), len(frame.box_origin), len(frame.forms)
    if not 0 < messages <= MESSAGES_MAX or boxes > BOXES_MAX or forms > FORMS_MAX:
        raise BadCommand(f"{messages} messages of {boxes} boxes of {forms} forms can't be sent at a time")
    if len(frame.nbytes) != len(frame.origin) or len(frame.box_form) != boxes:
        raise BadCommand("the columns of a question for boxes have different lengths")
    if min(frame.counts, default=1) < 1 or sum(frame.counts) != boxes:
        raise BadCommand(f"messages of {sum(frame.counts)} boxes were asked for, and {boxes} were named")
    if boxes and not 0 <= min(frame.box_form) <= max(frame.box_form) < forms:
        raise BadCommand("a box was asked for whose form was not named")


def _check_packs(form: StridedForm) -> None:
    check_form(form)
    if not form.is_packed_here:
        raise ValueError("a form does not pack its elements one after another")
    if form.cast:
        check_cast(form)
