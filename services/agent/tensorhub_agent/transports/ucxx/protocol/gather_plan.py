"""How boxes become messages of UCX, and which of them are asked for together. Pure.

A box whose bytes lie in one piece at an end needs no copy there. So boxes become one message as long as that costs no
end a copy that it could do without: neighbours at both ends, neighbours at one where the other has to pack or unpack
anyway, and any where both have to. Only tiny boxes come together whatever it costs, as a message for each costs more.

Messages are asked for by the *lot*: one frame, with at most one slot of bounce memory at either end. So neither end has
to hold anything to go on, and how much is under way is how many lots are.

Invariant: every element of a box is in exactly one message, and no message is longer than `MESSAGE_BYTES_MAX`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from tensorhub_agent.primitives.block_forms import amax_bytes
from tensorhub_agent.primitives.forms import (
    FormPart,
    check_form,
    cut_form,
    is_run,
    normalized,
    receiver_form,
    run_form,
    sender_form,
)
from tensorhub_agent.transports.ucxx.protocol.frames import (
    AMAX_BYTES_MAX,
    BOXES_MAX,
    COMPUTED_BYTES_MAX,
    FORMS_MAX,
    MESSAGES_MAX,
    SLOT_BYTES,
    GatherRequest,
)
from tensorhub_agent.transports.ucxx.protocol.message_plan import MESSAGE_BYTES_MAX, TINY_BYTES_MAX
from tensorhub_common.programs.regions import StridedCopies, StridedForm

LOT_BYTES_MAX: Final = 16 * 1024 * 1024
"""So much comes with one frame at most: while it is hashed the next one is on the wire."""

MESSAGE_BOXES_MAX: Final = FORMS_MAX
"""The most boxes of one message that have to be packed: each may have a form of its own."""


@dataclass(slots=True)
class GatherItem:
    """A box, or several that follow one another at both ends."""

    to: int
    origin: int
    nbytes: int
    """As it is sent."""
    is_run: bool
    """Whether it lies in one piece at both ends, without a cast."""
    sent: StridedForm
    """From its place in the source to packed."""
    received: StridedForm
    """From packed to where it belongs. Of several boxes in one neither form counts."""
    is_whole_here: bool
    is_whole_there: bool
    computed_bytes: int
    """Of how many bytes of the source it is computed; 0 where it is not."""
    amax: bytes = b""
    """What it is computed by, if it is by its blocks' largest magnitudes."""

    def packing(self) -> StridedForm:
        """Return the form from its place in the source to packed."""
        return run_form(self.nbytes) if self.is_run else self.sent

    def unpacking(self) -> StridedForm:
        """Return from packed to where it belongs."""
        return run_form(self.nbytes) if self.is_run else self.received


@dataclass(slots=True)
class GatherMessage:
    """Items that are sent as one."""

    items: list[GatherItem]
    nbytes: int
    item_bytes_max: int
    is_whole_here: bool
    """Whether it can be received right where it belongs."""
    is_whole_there: bool
    """Whether it is contiguous in the source, as it is sent."""
    computed_bytes: int
    amax_bytes: int

    def takes(self, item: GatherItem) -> bool:
        """Tell whether an item comes with the message, and take it if so."""
        if (
            self.nbytes + item.nbytes > MESSAGE_BYTES_MAX
            or len(self.items) >= MESSAGE_BOXES_MAX
            or self.computed_bytes + item.computed_bytes > COMPUTED_BYTES_MAX
            or self.amax_bytes + len(item.amax) > AMAX_BYTES_MAX
        ):
            return False
        first = self.items[0]
        here = self.is_whole_here and item.is_whole_here and item.to == first.to + self.nbytes
        there = self.is_whole_there and item.is_whole_there and item.origin == first.origin + self.nbytes
        costs_it = (item.is_whole_here and not here) or (item.is_whole_there and not there)
        costs_us = (self.is_whole_here and not here) or (self.is_whole_there and not there)
        if (costs_it and item.nbytes > TINY_BYTES_MAX) or (costs_us and self.item_bytes_max > TINY_BYTES_MAX):
            return False
        self.items.append(item)
        self.nbytes += item.nbytes
        self.computed_bytes += item.computed_bytes
        self.amax_bytes += len(item.amax)
        self.item_bytes_max = max(self.item_bytes_max, item.nbytes)
        self.is_whole_here, self.is_whole_there = here, there
        return True


@dataclass(slots=True)
class GatherBatch:
    """Messages that are asked for with one frame. Those that are whole at the source come first."""

    whole: list[GatherMessage] = field(default_factory=list)
    packed: list[GatherMessage] = field(default_factory=list)
    nbytes: int = 0
    bounced_bytes: int = 0
    """Bytes that pass through the reader's bounce, one message after another."""
    packed_bytes: int = 0
    computed_bytes: int = 0
    amax_bytes: int = 0
    boxes: int = 0
    forms: dict[StridedForm, int] = field(default_factory=dict)

    @property
    def messages(self) -> list[GatherMessage]:
        """All, in the order of their tags."""
        return self.whole + self.packed

    def takes(self, message: GatherMessage) -> bool:
        """Tell whether a message comes with the lot, and take it if so."""
        packs = [] if message.is_whole_there else message.items
        bounced = 0 if message.is_whole_here else message.nbytes
        packed = message.nbytes if packs else 0
        forms = {item.packing() for item in packs}
        if self.nbytes and (
            self.nbytes + message.nbytes > LOT_BYTES_MAX
            or self.bounced_bytes + bounced > SLOT_BYTES
            or self.packed_bytes + packed > SLOT_BYTES
            or self.computed_bytes + message.computed_bytes > COMPUTED_BYTES_MAX
            or self.amax_bytes + message.amax_bytes > AMAX_BYTES_MAX
            or len(self.whole) + len(self.packed) >= MESSAGES_MAX
            or self.boxes + len(packs) > BOXES_MAX
            or len(self.forms) + len(forms) > FORMS_MAX
        ):
            return False
        (self.packed if packs else self.whole).append(message)
        self.nbytes += message.nbytes
        self.bounced_bytes += bounced
        self.packed_bytes += packed
        self.computed_bytes += message.computed_bytes
        self.amax_bytes += message.amax_bytes
        self.boxes += len(packs)
        for form in forms:
            self.forms.setdefault(form, len(self.forms))
        return True

    def frame(self, tag: int, *, sums: bool) -> GatherRequest:
        """Return what the source is told."""
        items = [item for message in self.packed for item in message.items]
        return GatherRequest(
            tag=tag,
            origin=[message.items[0].origin for message in self.whole],
            nbytes=[message.nbytes for message in self.whole],
            counts=[len(message.items) for message in self.packed],
            box_origin=[item.origin for item in items],
            box_form=[self.forms[item.packing()] for item in items],
            forms=list(self.forms),
            sums=sums,
            amax=b"".join(item.amax for item in items),
        )

    def unpacking(self) -> StridedCopies:
        """Return what goes from the bounce to where it belongs."""
        to: list[int] = []
        origin: list[int] = []
        form: list[StridedForm] = []
        at = 0
        for message in self.messages:
            for item in () if message.is_whole_here else message.items:
                to.append(item.to)
                origin.append(at)
                form.append(item.unpacking())
                at += item.nbytes
        return StridedCopies(to, origin, form)


def starts(sizes: Sequence[int]) -> list[int]:
    """Return where each begins of what lies one after another."""
    return [0, *accumulate(sizes)][:-1]


def gather_batches(regions: StridedCopies) -> Iterator[GatherBatch]:
    """Return how boxes are asked for. Raises `BadForm` for one that can't be."""
    return _lots(_messages(_joined(_items(regions))))


@dataclass(frozen=True, slots=True)
class _PartTemplate:
    """What the parts of all boxes of a form have in common."""

    part: FormPart
    sent: StridedForm
    received: StridedForm
    is_run: bool
    is_whole_here: bool
    is_whole_there: bool
    nbytes: int
    """As it is sent."""
    computed_bytes: int
    amax_bytes: int

    @classmethod
    def of(cls, part: FormPart) -> "_PartTemplate":
        """Look at a part."""
        sent, received = sender_form(part.form), receiver_form(part.form)
        here, there = not received.cast and received.is_packed_here, not sent.cast and sent.is_packed_there
        amax = amax_bytes(sent)
        computed = 0 if sent.blocks is None and not amax else sent.origin_nbytes
        return cls(part, sent, received, is_run(part.form), here, there, sent.nbytes, computed, amax)


def _items(regions: StridedCopies) -> Iterator[GatherItem]:
    known: dict[int, list[_PartTemplate]] = {}
    amax = regions.amax or (b"",) * len(regions.to)
    for to, origin, form, largest in zip(regions.to, regions.origin, regions.form, amax, strict=True):
        kinds = known.get(id(form))
        if kinds is None:
            check_form(form)
            kinds = known[id(form)] = [_PartTemplate.of(part) for part in cut_form(normalized(form), MESSAGE_BYTES_MAX)]
        taken = 0
        for kind in kinds:
            taken += kind.amax_bytes
            yield GatherItem(
                to + kind.part.to,
                origin + kind.part.origin,
                kind.nbytes,
                kind.is_run,
                kind.sent,
                kind.received,
                kind.is_whole_here,
                kind.is_whole_there,
                kind.computed_bytes,
                largest[taken - kind.amax_bytes : taken],
            )


def _joined(items: Iterable[GatherItem]) -> Iterator[GatherItem]:
    """Make one of runs that follow one another at both ends."""
    last: GatherItem | None = None
    for item in items:
        if (
            last is not None
            and last.is_run
            and item.is_run
            and item.to == last.to + last.nbytes
            and item.origin == last.origin + last.nbytes
            and last.nbytes + item.nbytes <= MESSAGE_BYTES_MAX
        ):
            last.nbytes += item.nbytes
            continue
        if last is not None:
            yield last
        last = item
    if last is not None:
        yield last


def _messages(items: Iterable[GatherItem]) -> Iterator[GatherMessage]:
    message: GatherMessage | None = None
    for item in items:
        if message is not None and message.takes(item):
            continue
        if message is not None:
            yield message
        message = GatherMessage(
            [item],
            item.nbytes,
            item.nbytes,
            item.is_whole_here,
            item.is_whole_there,
            item.computed_bytes,
            len(item.amax),
        )
    if message is not None:
        yield message


def _lots(messages: Iterable[GatherMessage]) -> Iterator[GatherBatch]:
    lot = GatherBatch()
    for message in messages:
        if not lot.takes(message):
            yield lot
            lot = GatherBatch()
            lot.takes(message)
    if lot.nbytes:
        yield lot
