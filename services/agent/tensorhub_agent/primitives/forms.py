"""Forms of boxes as the copying of them wants them: checked, with as few dimensions as they can have, and cut. Pure.

A *run* is what lies in one piece at both ends. A normal form has no dimension of size 1 and none that continues its
neighbour at both ends. Where nothing is converted its elements are bytes, so a run is its last dimension; where
something is converted its elements are those that the converter knows. What is computed of whole blocks stays as it is.

Always true: a form that is derived from another one here names the same bytes in the same order.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from tensorhub_agent.primitives.block_forms import amax_bytes, block_parts, form_error, needs_amax
from tensorhub_common.programs.regions import DIMS_MAX, Sizes, StridedCopies, StridedForm, joined_dims


class InvalidForm(ValueError):
    """No box is like this."""


RUNS_KEPT_MAX: Final = 4096
"""At most this many forms of runs are kept."""

CAST_ITEMSIZES: Final = frozenset((1, 2, 4, 8))
"""Elements that are converted have one of these sizes."""


@dataclass(frozen=True, slots=True)
class FormPart:
    """A box within a box: where it begins, from the beginning of the whole one, and its form."""

    to: int
    origin: int
    form: StridedForm


def check_form(form: StridedForm) -> None:
    """Raise `InvalidForm` unless everything holds that must of a form, whatever made it."""
    if not len(form.shape) == len(form.to_strides) == len(form.origin_strides):
        raise InvalidForm("a form's shape and strides have different lengths")
    if min(form.shape, default=1) < 1 or form.itemsize < 1 or form.to_itemsize < 1:
        raise InvalidForm("a form has a dimension or elements without size")
    if min(form.to_strides + form.origin_strides, default=0) < 0:
        raise InvalidForm("a form has a negative stride")
    if form.blocks is not None or needs_amax(form):
        why = form_error(form)
        if why is not None:
            raise InvalidForm(why)
    if form.cast and not {form.itemsize, form.to_itemsize} <= CAST_ITEMSIZES:
        raise InvalidForm(f"elements of {form.itemsize} bytes can't be converted to {form.to_itemsize}")
    if not form.cast and form.itemsize != form.to_itemsize:
        raise InvalidForm(f"elements of {form.itemsize} bytes are to become {form.to_itemsize}, and no cast says how")


def check_boxes(regions: StridedCopies, nbytes: int) -> None:
    """Raise ValueError unless every form is good and every box fits into a destination of `nbytes`."""
    if not len(regions.to) == len(regions.origin) == len(regions.form):
        raise ValueError("the columns of boxes have different lengths")
    spans: dict[int, int] = {}
    for to, form in zip(regions.to, regions.form, strict=True):
        span = spans.get(id(form))
        if span is None:
            check_form(form)
            normalized(form)
            span = spans[id(form)] = max(form.span_bytes, form.nbytes)
        if not 0 <= to <= nbytes - span:
            raise ValueError(f"a box that spans {span} bytes from {to} on is not in the destination of {nbytes}")
    check_amax(regions)


def check_amax(regions: StridedCopies) -> None:
    """Raise ValueError unless as much comes with each box as it is computed by."""
    known: dict[int, int] = {}
    sizes = [known.get(id(form)) or known.setdefault(id(form), amax_bytes(form)) for form in regions.form]
    if any(sizes) if not regions.amax else [len(each) for each in regions.amax] != sizes:
        raise ValueError("the largest magnitudes that come with boxes are not those of their blocks")


def normalized(form: StridedForm) -> StridedForm:
    """Return the normal form of one that is good. Raises `InvalidForm` if it still has too many dimensions."""
    if form.blocks is not None or needs_amax(form):
        _check_dims(len(form.shape))
        return form
    dims = list(zip(form.shape, form.to_strides, form.origin_strides, strict=True))
    itemsize, to_itemsize = form.itemsize, form.to_itemsize
    if not form.cast:
        dims.append((itemsize, 1, 1))
        itemsize = to_itemsize = 1
    merged = joined_dims(dims)
    _check_dims(len(merged))
    shape, to_strides, origin_strides = zip(*merged, strict=True) if merged else ((), (), ())
    return StridedForm(shape, to_strides, origin_strides, itemsize, to_itemsize, form.cast)


def _check_dims(count: int) -> None:
    if count > DIMS_MAX:
        raise InvalidForm(f"a box has {count} dimensions that can't be joined, and {DIMS_MAX} are allowed")


def run_bytes(form: StridedForm) -> int:
    """Return how many bytes of a normal form lie together at both ends."""
    is_run = form.shape and not form.cast and form.to_strides[-1] == form.origin_strides[-1] == 1
    return form.shape[-1] if is_run else form.itemsize


def is_run(form: StridedForm) -> bool:
    """Tell whether a normal form lies in one piece at both ends, and nothing is converted."""
    return not form.cast and run_bytes(form) == form.nbytes


@functools.lru_cache(RUNS_KEPT_MAX)
def run_form(nbytes: int) -> StridedForm:
    """Return the normal form of bytes that lie in one piece at both ends; boxes that are alike share it."""
    return StridedForm((nbytes,), (1,), (1,), 1, 1) if nbytes > 1 else StridedForm((), (), (), 1, 1)


def cut_form(form: StridedForm, nbytes_max: int) -> Iterator[FormPart]:
    """Cut a normal form into boxes of at most `nbytes_max` at either end, in the order of its elements."""
    if form.blocks is not None or needs_amax(form):
        for to, origin, computed in block_parts(form, nbytes_max):
            yield FormPart(to, origin, computed)
        return
    itemsize = max(form.itemsize, form.to_itemsize)
    if form.elements * itemsize <= nbytes_max or not form.shape:
        yield FormPart(0, 0, form)
        return
    size, to, origin = form.shape[0], form.to_strides[0], form.origin_strides[0]
    inner = math.prod(form.shape[1:]) * itemsize
    if inner <= nbytes_max:
        rows = nbytes_max // inner
        whole, rest = (_first(form, rows), _first(form, size % rows)) if size % rows else (_first(form, rows), None)
        for row in range(0, size, rows):
            yield FormPart(row * to, row * origin, whole if rest is None or row + rows <= size else rest)
        return
    rest = msgspec.structs.replace(
        form, shape=form.shape[1:], to_strides=form.to_strides[1:], origin_strides=form.origin_strides[1:]
    )
    of_one = list(cut_form(rest, nbytes_max))
    for row in range(size):
        for part in of_one:
            yield FormPart(row * to + part.to, row * origin + part.origin, part.form)


def _first(form: StridedForm, rows: int) -> StridedForm:
    if rows == 1:
        return msgspec.structs.replace(
            form, shape=form.shape[1:], to_strides=form.to_strides[1:], origin_strides=form.origin_strides[1:]
        )
    return msgspec.structs.replace(form, shape=(rows, *form.shape[1:]))


def packed_strides(shape: Sizes, itemsize: int) -> Sizes:
    """Return the strides of elements that follow one another in the order of their indices."""
    strides = [itemsize] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def sender_form(form: StridedForm) -> StridedForm:
    """Return the first half of a form that is cut in two by a wire: from where it stands to packed.

    What is converted is converted in this half, unless it grows by it. What is computed of blocks never does.
    """
    casts = form.cast if form.blocks is not None or form.to_itemsize <= form.itemsize else ""
    itemsize = form.to_itemsize if casts else form.itemsize
    strides = packed_strides(form.shape, itemsize)
    return StridedForm(form.shape, strides, form.origin_strides, form.itemsize, itemsize, casts, form.blocks)


def receiver_form(form: StridedForm) -> StridedForm:
    """Return the other half: from packed to where it belongs."""
    casts = form.cast if form.blocks is None and form.to_itemsize > form.itemsize else ""
    itemsize = form.itemsize if casts or not form.cast else form.to_itemsize
    strides = packed_strides(form.shape, itemsize)
    return StridedForm(form.shape, form.to_strides, strides, itemsize, form.to_itemsize, casts)
