"""The layout of a shard: where in its segment each box of each tensor is.

A layout is what two holders must agree on before bytes move. It is a value: tensors sorted by name, so
that the same tensors given in another order are the same layout, and content-addressed by a digest, so that
commands and events carry 64 hexadecimal digits instead of a list that may be larger than a NATS message.

A *piece* is the unit of transfer: a box of one tensor in global index space, so that it means the same in
every layout. The canonical pieces of a layout follow from the layout alone (`pieces`), and so two holders
of one layout number their pieces alike and their root digests can be compared.

Invariants of a layout's pieces: they are in segment order, each is contiguous in the segment, each has at
least one byte and at most `PIECE_BYTES_MAX` (or one element), and together they cover every element exactly once.
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter, lt
from typing import Final

import msgspec

from tensorhub_common.errors import LayoutMismatch
from tensorhub_common.layout.parts import (
    NAME_BYTES_MAX,
    SIZE_MAX,
    Part,
    Shape,
    check_parts,
    columns_of,
    name_bytes,
    named,
)
from tensorhub_common.layout.quantized import check_derived

PIECE_BYTES_MAX: Final = 4 * 1024 * 1024
"""A piece is at most this long. Part of the protocol: it decides which digests a root is taken over."""

ALIGNMENT_BYTES: Final = 256
"""Every tensor starts at a multiple of this, which suits vector loads, CUDA and every dtype's itemsize."""

TENSORS_MAX: Final = 1_000_000
_PARTS_NAMED: Final = 4
"""A sentence about a tensor names at most this many of its parts."""
TENSOR_BYTES_MAX: Final = 2**53 - 1
"""What every reader of JSON counts exactly; sizes are part of commands."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, gc=False, cache_hash=True):
    """One tensor's box: `shape` elements that begin at `offset` of a global tensor of `global_shape`."""

    name: str
    dtype: str
    """Torch's name of the dtype without its module: "bfloat16", "float8_e4m3fn"."""
    itemsize: int
    shape: Shape
    global_shape: Shape
    offset: Shape
    parts: tuple[Part, ...] = ()
    """What the tensor consists of where it is no box of a global tensor of its own name; each element in one part.

    With parts, `global_shape` and `offset` say nothing of a global tensor: they are the shape itself, and zeros.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of the local box."""
        return math.prod(self.shape) * self.itemsize


class Layout(msgspec.Struct, frozen=True):
    """The tensors of one shard, sorted by name. Build it with `layout_of`, which checks it."""

    tensors: tuple[TensorEntry, ...]


class Box(msgspec.Struct, frozen=True, array_like=True):
    """A box of one tensor in global index space: elements `start[d] <= index[d] < stop[d]` of every dimension."""

    tensor: str
    start: Shape
    stop: Shape


@dataclass(frozen=True, slots=True)
class PieceTable:
    """The canonical pieces of a layout, by column: piece i is `nbytes[i]` bytes at `at[i]` of the segment."""

    layout: Layout
    tensor: list[int] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    start: list[Shape] = field(default_factory=list)
    stop: list[Shape] = field(default_factory=list)

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self.at)

    def box(self, piece: int) -> Box:
        """Return the box of global index space that piece number `piece` is."""
        return Box(self.layout.tensors[self.tensor[piece]].name, self.start[piece], self.stop[piece])

    def piece_at(self, at: int) -> int:
        """Return the number of the last piece that starts at or before byte `at`."""
        return bisect_right(self.at, at) - 1


def layout_of(entries: Iterable[TensorEntry]) -> Layout:
    """Sort and check entries. Raises `LayoutMismatch` that names the tensor which is not well formed."""
    tensors = _in_order(tuple(entries))
    check_entries(tensors)
    return _together(tensors)


def layout_of_checked(entries: Iterable[TensorEntry]) -> Layout:
    """Sort entries that were checked each by itself (`check_entries`), and check how they go together.

    Thousands of ranks have most of their entries alike: so these need be checked once. Raises `LayoutMismatch`.
    """
    return _together(_in_order(tuple(entries)))


def check_entries(entries: Sequence[TensorEntry]) -> None:
    """Raise `LayoutMismatch` that names the first entry which is not well formed."""
    if not _are_usual([entry.name for entry in entries]):
        for entry in entries:
            _check_name(entry)
    # A model has hundreds of thousands of tensors, and few of another form than all the others.
    boxes = {(entry.itemsize, entry.shape, entry.global_shape, entry.offset): entry for entry in reversed(entries)}
    for entry in boxes.values():
        _check_box(entry)
    for entry in entries:
        if entry.parts:
            check_parts(entry.name, entry.shape, entry.parts)
            _check_derived(entry)


def _in_order(tensors: tuple[TensorEntry, ...]) -> tuple[TensorEntry, ...]:
    """Sort entries by name. Raises `LayoutMismatch` when they are too many, or two of them have one name."""
    if len(tensors) > TENSORS_MAX:
        raise LayoutMismatch(
            f"a shard has {len(tensors)} tensors; at most {TENSORS_MAX} are possible, so use more shards"
        )
    names = [entry.name for entry in tensors]
    if all(map(lt, names, names[1:])):
        # What was kept is sorted, and is read far more often than made.
        return tensors
    for before, after in pairwise(sorted(names)):
        if before == after:
            raise LayoutMismatch(f"tensor {after!r} is given twice; give every tensor a name of its own")
    return tuple(sorted(tensors, key=attrgetter("name")))


def _together(tensors: tuple[TensorEntry, ...]) -> Layout:
    layout = Layout(tensors)
    mismatch = (
        shared_mismatch(layout, layout, "elsewhere in the shard") if any(entry.parts for entry in tensors) else None
    )
    if mismatch is not None:
        raise LayoutMismatch(mismatch)
    return layout


def _are_usual(names: list[str]) -> bool:
    """Tell at one look whether all names are some ASCII characters, and none is long."""
    joined = "".join(names)
    return joined.isascii() and all(names) and (len(joined) <= NAME_BYTES_MAX or max(map(len, names)) <= NAME_BYTES_MAX)


def _check_name(entry: TensorEntry) -> None:
    if not 0 < name_bytes(entry.name) <= NAME_BYTES_MAX:
        raise LayoutMismatch(
            f"tensor name {entry.name[:40]!r} is empty, no text or longer than {NAME_BYTES_MAX} bytes: rename it"
        )


def _check_box(entry: TensorEntry) -> None:
    if not 1 <= entry.itemsize <= PIECE_BYTES_MAX:
        raise LayoutMismatch(
            f"tensor {entry.name!r} has itemsize {entry.itemsize}: dense dtypes of whole bytes are possible"
        )
    ranks = {len(entry.shape), len(entry.global_shape), len(entry.offset)}
    if len(ranks) != 1:
        raise LayoutMismatch(
            f"tensor {entry.name!r}: shape {entry.shape}, global shape {entry.global_shape} and offset {entry.offset} "
            "must have the same number of dimensions"
        )
    for size, whole, begin in zip(entry.shape, entry.global_shape, entry.offset, strict=True):
        if whole > SIZE_MAX:
            raise LayoutMismatch(
                f"tensor {entry.name!r} has global shape {entry.global_shape}: a dimension has at most {SIZE_MAX} "
                "elements"
            )
        if size < 0 or begin < 0 or begin + size > whole:
            raise LayoutMismatch(
                f"tensor {entry.name!r}: a box of shape {entry.shape} at offset {entry.offset} does not fit "
                f"into global shape {entry.global_shape}"
            )
    if entry.nbytes > TENSOR_BYTES_MAX:
        raise LayoutMismatch(f"tensor {entry.name!r} has {entry.nbytes} bytes; at most {TENSOR_BYTES_MAX} are possible")


def _check_derived(entry: TensorEntry) -> None:
    for number, part in enumerate(entry.parts):
        try:
            if part.cast:
                check_derived(part, entry.dtype)
        except LayoutMismatch as why:
            raise LayoutMismatch(f"tensor {entry.name!r}: {named(number, part)} {why}") from None


def encoded(layout: Layout) -> bytes:
    """Return a layout as it is kept and digested: parts are named only where a tensor has some."""
    columns = [
        (
            e.name,
            e.dtype,
            e.itemsize,
            e.shape,
            e.global_shape,
            e.offset,
            *((tuple(map(columns_of, e.parts)),) if e.parts else ()),
        )
        for e in layout.tensors
    ]
    return msgspec.msgpack.encode({"tensors": columns})


def layout_digest(layout: Layout) -> str:
    """Return the content address of a layout: 64 hexadecimal digits (BLAKE2b-256 of its MessagePack form)."""
    return hashlib.blake2b(encoded(layout), digest_size=32).hexdigest()


def placements(layout: Layout) -> list[int]:
    """Return where each tensor starts in the segment, in bytes, in the layout's order."""
    starts, end = [], 0
    for entry in layout.tensors:
        starts.append(end)
        end += room(entry)
    return starts


def room(entry: TensorEntry) -> int:
    """Return how many bytes of a segment a tensor takes, its padding included."""
    return -(-entry.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def segment_bytes(layout: Layout) -> int:
    """Return how many bytes of segment the layout takes (0 when it has no element)."""
    return sum(map(room, layout.tensors))


def payload_bytes(layout: Layout) -> int:
    """Return the bytes of the tensors themselves, without padding."""
    return sum(entry.nbytes for entry in layout.tensors)


def pieces(layout: Layout) -> PieceTable:
    """Cut every tensor into its canonical pieces."""
    table = PieceTable(layout)
    for number, (entry, base) in enumerate(zip(layout.tensors, placements(layout), strict=True)):
        if entry.nbytes == 0:
            continue
        at = base
        for start, stop in _row_blocks(entry):
            nbytes = math.prod(b - a for a, b in zip(start, stop, strict=True)) * entry.itemsize
            table.tensor.append(number)
            table.at.append(at)
            table.nbytes.append(nbytes)
            table.start.append(tuple(o + a for o, a in zip(entry.offset, start, strict=True)))
            table.stop.append(tuple(o + b for o, b in zip(entry.offset, stop, strict=True)))
            at += nbytes
    return table


def _row_blocks(entry: TensorEntry) -> Iterator[tuple[Shape, Shape]]:
    """Cut a row-major tensor into contiguous boxes of at most PIECE_BYTES_MAX, in memory order."""
    shape = entry.shape
    # The cut dimension is the first one whose single slice fits into a piece; every dimension before it is walked
    # one index at a time, every one after it is taken whole, and so each box is contiguous in memory.
    dim, slice_bytes = 0, entry.nbytes
    for dim, size in enumerate(shape):  # noqa: B007 (the last value is wanted after the loop)
        slice_bytes //= size
        if slice_bytes <= PIECE_BYTES_MAX:
            break
    if not shape:
        yield (), ()
        return
    rows = max(1, PIECE_BYTES_MAX // slice_bytes)
    tail_start, tail_stop = (0,) * (len(shape) - dim - 1), shape[dim + 1 :]
    for outer in _indices(shape[:dim]):
        head_stop = tuple(index + 1 for index in outer)
        for first in range(0, shape[dim], rows):
            yield (*outer, first, *tail_start), (*head_stop, min(first + rows, shape[dim]), *tail_stop)


def _indices(shape: Shape) -> Iterator[Shape]:
    if not shape:
        yield ()
        return
    for first in range(shape[0]):
        for rest in _indices(shape[1:]):
            yield (first, *rest)


def global_tensors(entry: TensorEntry) -> Iterator[tuple[str, Shape]]:
    """Yield names and shapes of the global tensors that a registered tensor has boxes of; padding is of none.

    What is computed of one is another one, whose name says how.
    """
    if not entry.parts:
        yield entry.name, entry.global_shape
    for part in entry.parts:
        if not part.is_padding:
            yield f"{part.name} as {part.cast}" if part.cast else part.name, part.global_shape


def shared_mismatch(one: Layout, other: Layout, where: str = "in a sibling shard") -> str | None:
    """Say why two shards of one replica can't belong together, or None: a shared name must be one global tensor."""
    known = {name: (entry, shape) for entry in one.tensors for name, shape in global_tensors(entry)}
    for entry in other.tensors:
        for name, shape in global_tensors(entry):
            twin, twin_shape = known.get(name, (entry, shape))
            if (twin.dtype, twin_shape) != (entry.dtype, shape):
                return (
                    f"tensor {name!r} is {entry.dtype} of global shape {shape}{_within(entry, name)} here and "
                    f"{twin.dtype} of global shape {twin_shape}{_within(twin, name)} {where}"
                )
    return None


def _within(entry: TensorEntry, name: str) -> str:
    return "" if entry.name == name else f" (a part of {entry.name!r})"


def difference(one: Layout, other: Layout, names_max: int = 5) -> str:
    """Say in a few words in which tensors two layouts differ, naming at most `names_max` of them."""
    left = {entry.name: entry for entry in one.tensors}
    right = {entry.name: entry for entry in other.tensors}
    names = [name for name in sorted(left.keys() | right.keys()) if left.get(name) != right.get(name)]
    described = [
        f"{name!r} ({_describe(left.get(name))} against {_describe(right.get(name))})" for name in names[:names_max]
    ]
    more = f" and {len(names) - names_max} more" if len(names) > names_max else ""
    return ", ".join(described) + more


def _describe(entry: TensorEntry | None) -> str:
    if entry is None:
        return "absent"
    if entry.parts:
        named = entry.parts[:_PARTS_NAMED]
        parts = ["padding" if part.is_padding else _describe_part(part) for part in named]
        more = f" and {len(entry.parts) - _PARTS_NAMED} parts more" if len(entry.parts) > _PARTS_NAMED else ""
        return f"{entry.dtype}{list(entry.shape)} of {', '.join(parts)}{more}"
    return f"{entry.dtype}{list(entry.shape)} of {list(entry.global_shape)} at {list(entry.offset)}"


def _describe_part(part: Part) -> str:
    return f"{part.name}{f' as {part.cast}' if part.cast else ''} at {list(part.offset)}"
