"""Parts of a registered tensor that consists of several global ones: what they say, and what must hold of them. Pure.

An engine's fused tensor (q, k and v in one; an expert stack) is no box of a tensor that a trainer has. Its parts are,
and the rest of it is padding: a part without a name, which has no counterpart anywhere.

Always true of parts that `check_parts` has passed: each element of the tensor lies in exactly one of them, no part is
empty, each lies within the tensor and within its global tensor, and has the same sizes in both.
"""

import math
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Final

import msgspec

from tensorhub_common.errors import LayoutMismatch

NAME_BYTES_MAX: Final = 4096

SIZE_MAX: Final = 2**63 - 1
"""Limit of a global tensor's elements along a dimension: indices are 64-bit integers."""

PARTS_MAX: Final = 65_536
"""Limit of a tensor's parts; 256 experts with two matrices each have 512."""

TILED_DIMS_MAX: Final = 6
"""Parts that divide at most this many dimensions are checked by their corners, of which each has two to that power;
all others are compared with one another."""

Shape = tuple[int, ...]
Bounds = tuple[Shape, Shape]
"""Where a box begins, and where it ends in every dimension."""


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box of a registered tensor that is a box of a global tensor of another name: q, k or v of a fused qkv.

    Both boxes have the same sizes once the dimensions in front that have one element are left out: an expert's matrix
    may be one layer of a stack of them. A part without a name is padding: it is in no global tensor. `register` makes
    it zero, and so does a read by a transfer program, so that equal weights in equal layouts are equal bytes.
    """

    name: str
    """The global tensor's; empty for padding."""
    global_shape: Shape
    offset: Shape
    """Where the box begins in the global tensor."""
    extent: Shape
    """Its size there."""
    start: Shape
    """Where it begins in the registered tensor."""
    shape: Shape
    """Its size there."""
    cast: str = ""
    """What is computed of the global tensor, as "fp8-block-128:values" (`derived`); empty: it is a box of it.

    `global_shape` is then the shape of what it is computed of; `offset` and `extent` count values, or blocks of scales.
    """

    @property
    def is_padding(self) -> bool:
        """Whether it has no counterpart in any global tensor."""
        return not self.name

    @property
    def stop(self) -> Shape:
        """Where it ends in the registered tensor."""
        return tuple(begin + size for begin, size in zip(self.start, self.shape, strict=True))


def padding(start: Shape, shape: Shape) -> Part:
    """Return the part that says: these elements have no counterpart."""
    return Part(name="", global_shape=(), offset=(), extent=(), start=start, shape=shape)


def name_bytes(name: str) -> int:
    """Return how long a name is as UTF-8, or 0 when it can't be written so (a lone surrogate)."""
    if name.isascii():
        return len(name)
    try:
        return len(name.encode())
    except UnicodeEncodeError:
        return 0


def check_parts(tensor: str, shape: Shape, parts: Sequence[Part]) -> None:
    """Check the parts of a tensor of this shape. Raises `LayoutMismatch` that names the tensor and the part."""
    if len(parts) > PARTS_MAX:
        raise LayoutMismatch(f"tensor {tensor!r} has {len(parts)} parts; at most {PARTS_MAX} are possible: split it")
    for number, part in enumerate(parts):
        wrong = _wrong_here(part, shape) or _wrong_there(part)
        if wrong:
            raise LayoutMismatch(f"tensor {tensor!r}: {named(number, part)} {wrong}")
    if _is_tiled(parts, shape):
        return
    found = _overlap(parts)
    if found is not None:
        one, other = found
        raise LayoutMismatch(
            f"tensor {tensor!r}: {named(one, parts[one])} and {named(other, parts[other])} overlap; each element "
            "belongs to one part"
        )
    if sum(math.prod(part.shape) for part in parts) < math.prod(shape):
        start, stop = _gap([(part.start, part.stop) for part in parts], shape)
        raise LayoutMismatch(
            f"tensor {tensor!r} of shape {shape}: no part has its elements from {start} to {stop}; name the global "
            "tensor that they belong to, or declare them padding"
        )


def named(number: int, part: Part) -> str:
    """Call a part in a sentence."""
    return f"part {number} (padding)" if part.is_padding else f"part {number} ({part.name[:80]!r})"


def columns_of(part: Part) -> tuple[object, ...]:
    """Return a part as layouts are digested: what it is computed of is named only where it is."""
    columns = (part.name, part.global_shape, part.offset, part.extent, part.start, part.shape)
    return (*columns, part.cast) if part.cast else columns


def _wrong_here(part: Part, shape: Shape) -> str | None:
    """Say why the part is no box of the registered tensor, or None."""
    if not len(part.start) == len(part.shape) == len(shape):
        return f"has start {part.start} and shape {part.shape}, and the tensor's shape is {shape}: give as many numbers"
    for begin, size, whole in zip(part.start, part.shape, shape, strict=True):
        if begin < 0 or size < 1 or begin + size > whole:
            return f"of shape {part.shape} at {part.start} is empty or does not fit into the tensor's shape {shape}"
    return None


def _wrong_there(part: Part) -> str | None:
    """Say why the part is no box of its global tensor, or None."""
    if part.is_padding:
        is_bare = part.global_shape == part.offset == part.extent == () and not part.cast
        return None if is_bare else "is padding of a global tensor"
    if not 0 < name_bytes(part.name) <= NAME_BYTES_MAX:
        return f"has a name that is no text or longer than {NAME_BYTES_MAX} bytes: rename it"
    if not len(part.global_shape) == len(part.offset) == len(part.extent):
        return (
            f"has global shape {part.global_shape}, offset {part.offset} and extent {part.extent}: give as many "
            "numbers in each"
        )
    for size, whole, begin in zip(part.extent, part.global_shape, part.offset, strict=True):
        is_beyond = not part.cast and begin + size > whole  # What is computed has a shape of its own: `check_derived`.
        if whole > SIZE_MAX:
            return f"has global shape {part.global_shape}: a dimension has at most {SIZE_MAX} elements"
        if size < 1 or begin < 0 or is_beyond:
            return f"of extent {part.extent} at {part.offset} does not fit into global shape {part.global_shape}"
    if without_leading_ones(part.shape) != without_leading_ones(part.extent):
        return f"has shape {part.shape} in the tensor and extent {part.extent} in the global one: they must be equal"
    return None


def without_leading_ones(shape: Shape) -> Shape:
    """Return the sizes without the dimensions in front that have one element."""
    for dim, size in enumerate(shape):
        if size != 1:
            return shape[dim:]
    return ()


def _is_tiled(parts: Sequence[Part], shape: Shape) -> bool:
    """Tell whether each element of the tensor is in exactly one part; of many dimensions that divide it, always False.

    How often each element is covered follows from the corners of the boxes, each with the sign of its number of ends:
    integrated along every dimension they give that. So the boxes cover it once if and only if their corners add up to
    the tensor's own.
    """
    dims = [dim for dim, size in enumerate(shape) if any(part.shape[dim] != size for part in parts)]
    if len(dims) > TILED_DIMS_MAX:
        return False
    ends = [(choice, -1 if sum(choice) % 2 else 1) for choice in product((0, 1), repeat=len(dims))]
    whole = [(0, shape[dim]) for dim in dims]
    corners = {tuple(whole[at][end] for at, end in enumerate(choice)): -sign for choice, sign in ends}
    for part in parts:
        start, stop = part.start, part.stop
        edges = [(start[dim], stop[dim]) for dim in dims]
        for choice, sign in ends:
            corner = tuple([edge[end] for edge, end in zip(edges, choice, strict=True)])
            corners[corner] = corners.get(corner, 0) + sign
    return not any(corners.values())


def _overlap(parts: Sequence[Part]) -> tuple[int, int] | None:
    """Return two parts that have an element in common, or None.

    A sweep along the dimension in which the parts begin at most places, so that few are open at a time.
    """
    if len(parts) < 2:  # noqa: PLR2004 (a pair)
        return None
    stops = [part.stop for part in parts]
    dims = range(len(parts[0].start))
    along = max(dims, key=lambda dim: len({part.start[dim] for part in parts}), default=None)
    if along is None:
        return 0, 1
    is_open: list[int] = []
    for number in sorted(range(len(parts)), key=lambda number: parts[number].start[along]):
        start, stop = parts[number].start, stops[number]
        is_open = [other for other in is_open if stops[other][along] > start[along]]
        for other in is_open:
            begin, end = parts[other].start, stops[other]
            if all(begin[dim] < stop[dim] and start[dim] < end[dim] for dim in dims):
                return min(number, other), max(number, other)
        is_open.append(number)
    return None


def _gap(boxes: Sequence[Bounds], shape: Shape) -> Bounds:
    """Return a box of the tensor that none of the boxes has an element of. They are disjoint and leave something."""
    start: list[int] = []
    stop: list[int] = []
    for dim, size in enumerate(shape):
        rest = math.prod(shape[dim + 1 :])
        cuts = sorted({0, size, *(box[0][dim] for box in boxes), *(box[1][dim] for box in boxes)})
        for begin, end in pairwise(cuts):
            # Between two neighbouring cuts every box is either all the way there or not at all.
            inside = [box for box in boxes if box[0][dim] <= begin and box[1][dim] >= end]
            if sum(_volume(box, dim + 1) for box in inside) < rest:
                start.append(begin)
                stop.append(end)
                boxes = inside
                break
    return tuple(start), tuple(stop)


def _volume(box: Bounds, first_dim: int) -> int:
    """Return how many elements a box has in the dimensions from `first_dim` on."""
    return math.prod(end - begin for begin, end in zip(box[0][first_dim:], box[1][first_dim:], strict=True))
