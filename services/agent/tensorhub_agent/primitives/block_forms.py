"""Forms of boxes that are computed of whole blocks: fp8 values, and scales. Checked, and cut. Pure.

Such a form's `shape` is what comes out, in the destination; `blocks.shape` is the box of the source that it is computed
of. That one begins with a block in each dimension, so its blocks are known without the global tensor; only its last
ones may be smaller.

Always true: a form that is cut gives the same elements; each of its parts is computed of whole blocks again.
"""

from collections.abc import Iterator
from itertools import pairwise, product
from math import prod
from typing import Final, NamedTuple

from tensorhub_common.layout.casts import CASTABLE, FP8_SOURCES
from tensorhub_common.layout.quantized import AMAX_KINDS, BLOCK_BYTES_MAX, DERIVED, QuantizedKind
from tensorhub_common.programs.regions import Blocks, Sizes, StridedForm

MATRIX: Final = 2
"""Blocks lie in the last two dimensions."""

AMAX_ITEMSIZE: Final = 4
PART_AMAX_BYTES_MAX: Final = 16 * 1024
"""A part of values by amax is of at most this many blocks, by the bytes of their largest magnitudes: these go to the
source within a frame."""


class BlockPart(NamedTuple):
    """A box within such a box: where what comes out begins, where what it is computed of does, and its form."""

    to: int
    origin: int
    form: StridedForm


def derivation_of(form: StridedForm) -> tuple[str, QuantizedKind] | None:
    """Return of which dtype what is computed, or None where the form's cast is no such thing."""
    from_dtype, arrow, name = form.cast.partition(">")
    kind = DERIVED.get(name) or AMAX_KINDS.get(name)
    return None if kind is None or not arrow or from_dtype not in FP8_SOURCES else (from_dtype, kind)


def needs_amax(form: StridedForm) -> bool:
    """Tell whether a form is computed of its own box and of the largest magnitudes of its blocks."""
    return form.blocks is None and derivation_of(form) is not None


def amax_bytes(form: StridedForm) -> int:
    """Return how many bytes of largest magnitudes come with a box of this form; 0 where it needs none."""
    found = derivation_of(form) if form.blocks is None else None
    return 0 if found is None else AMAX_ITEMSIZE * prod(found[1].scheme.scales_shape(form.shape))


def form_error(form: StridedForm) -> str | None:
    """Say what is wrong with a form that is computed of blocks, and good but for that, whatever made it; or None."""
    found, blocks = derivation_of(form), form.blocks
    if found is not None and blocks is None and not found[1].is_scales:
        blocks = _its_own(form)
    if blocks is None:
        return "scales are computed of blocks, and it is not said of which"
    if found is None:
        return f"boxes are computed of blocks, as {form.cast!r:.60}, which is not in this version of tensorhub"
    from_dtype, kind = found
    if (form.itemsize, form.to_itemsize) != (CASTABLE[from_dtype], kind.itemsize):
        return f"elements of {form.itemsize} bytes are to become {form.to_itemsize} as {form.cast!r}"
    if not len(form.shape) == len(blocks.shape) == len(blocks.skip) >= MATRIX:
        return "what a box is computed of has other dimensions than the box"
    if min(blocks.shape) < 1 or min(blocks.skip) < 0:
        return "what a box is computed of has a dimension without size, or begins before it"
    if prod(kind.scheme.steps(blocks.shape)) * form.itemsize > BLOCK_BYTES_MAX:
        return f"a block is longer than {BLOCK_BYTES_MAX} bytes"
    lies_within = all(
        skip + size <= whole for skip, size, whole in zip(blocks.skip, form.shape, blocks.shape, strict=True)
    )
    if kind.is_scales:
        lies_within = form.shape == kind.shape(blocks.shape) and not any(blocks.skip)
    return None if lies_within else "a box does not lie within what it is computed of"


def block_parts(form: StridedForm, nbytes_max: int) -> Iterator[BlockPart]:
    """Cut a form that is good into boxes of at most `nbytes_max` at either end, or a block, in the order of rows."""
    found, blocks = derivation_of(form), form.blocks or _its_own(form)
    assert found is not None
    kind, block = found[1], found[1].block(blocks.shape)
    block_bytes = max(prod(block) * form.itemsize, form.to_itemsize)
    there = tuple(-(-size // step) for size, step in zip(blocks.shape, block, strict=True))
    blocks_max = nbytes_max // block_bytes
    if form.blocks is None:
        # Parts are runs of blocks in their order, so each has a run of what comes with the box.
        blocks_max = min(blocks_max, PART_AMAX_BYTES_MAX // AMAX_ITEMSIZE)
    counts = _blocks_in_a_part(there, blocks_max)
    spans = [_cut(size, step * count) for size, step, count in zip(blocks.shape, block, counts, strict=True)]
    for source in product(*spans):
        begins = tuple(a for a, _ in source)
        inside = tuple(b - a for a, b in source)
        if kind.is_scales:
            first = tuple(a // step for a, step in zip(begins, block, strict=True))
            shape, skip = kind.shape(inside), blocks.skip
        else:
            ends = tuple(zip(source, blocks.skip, form.shape, strict=True))
            begin = tuple(max(a, lead) for (a, _), lead, _ in ends)
            end = tuple(min(b, lead + size) for (_, b), lead, size in ends)
            if any(a >= b for a, b in zip(begin, end, strict=True)):
                continue
            first = tuple(a - lead for a, lead in zip(begin, blocks.skip, strict=True))
            shape = tuple(b - a for a, b in zip(begin, end, strict=True))
            skip = tuple(a - b for a, b in zip(begin, begins, strict=True))
        part = StridedForm(
            shape,
            form.to_strides,
            form.origin_strides,
            form.itemsize,
            form.to_itemsize,
            form.cast,
            None if form.blocks is None else Blocks(inside, skip),
        )
        yield BlockPart(_bytes(first, form.to_strides), _bytes(begins, form.origin_strides), part)


def _its_own(form: StridedForm) -> Blocks:
    return Blocks(form.shape, (0,) * len(form.shape))


def _blocks_in_a_part(there: Sizes, blocks_max: int) -> Sizes:
    """Return of how many blocks a part consists in each dimension: as many as can be of the last dimensions first."""
    counts: list[int] = []
    for size in reversed(there):
        count = max(1, min(size, blocks_max))
        counts.append(count)
        # Where a dimension has to be cut the ones before it are taken block by block.
        blocks_max = blocks_max // count if count == size else 1
    return tuple(reversed(counts))


def _cut(size: int, step: int) -> list[tuple[int, int]]:
    return list(pairwise([*range(0, size, step), size]))


def _bytes(index: Sizes, strides: Sizes) -> int:
    return sum(at * stride for at, stride in zip(index, strides, strict=True))
