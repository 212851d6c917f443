"""Copying boxes that lie strided at either end, or both, in the copy pool's threads.

A box is copied by numpy, which lets go of the GIL: as one array of its runs, so that the inner loop moves whole runs
however short. Boxes that lie in one piece at both ends are joined, and moved as spans are.

Invariants:
- What `compute/pool.py` says of every job.
- Nothing outside the boxes is written, and nothing outside the views is read: every box is checked against both before
  the first byte, wherever its form is from, and numpy checks each array again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from tensorhub_agent.casting.conversion import Convert, by_amax, check_cast, converter_of
from tensorhub_agent.compute.batch import TASK_BYTES_MAX, HostBatch, address_of, memmove
from tensorhub_agent.compute.device_boxes import DeviceBoxBatch
from tensorhub_agent.compute.device_copy import device_of
from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import check_fits
from tensorhub_agent.devices.columns import Columns, cut_to_chunks, join_adjacent
from tensorhub_agent.primitives.block_forms import amax_bytes, needs_amax
from tensorhub_agent.primitives.forms import FormPart, check_amax, check_form, cut_form, is_run, normalized, run_bytes
from tensorhub_agent.primitives.memory_region import MemoryRegion
from tensorhub_common.programs.regions import Sizes, StridedCopies, StridedForm

PART_BYTES_MAX: Final = 1024 * 1024
"""A box is cut at this: its parts are shared out among the threads, and a stop waits for one of them at most."""

SHORT_RUN_BYTES_MAX: Final = 256
"""Runs up to this are elements of numpy's; longer ones are rows of bytes, for numpy keeps the GIL for few elements."""

NUMBERS_BYTES: Final = frozenset((2, 4, 8))
"""Runs as long as an unsigned integer are copied as such."""

SCATTERED_MIN: Final = 8
"""From this many on, short runs of one length are copied by one call of numpy's."""

SCATTERED_MAX: Final = 4096
"""The most runs of such a call: another thread may have the others."""

SCATTERED_COST_BYTES: Final = 64
"""What each of them costs beside its bytes, in bytes."""


@dataclass(frozen=True, slots=True)
class _Arrays:
    """A part of a box as numpy sees it at both ends."""

    shape: Sizes
    to_strides: Sizes
    origin_shape: Sizes
    origin_strides: Sizes
    to_dtype: np.dtype[Any]
    dtype: np.dtype[Any]
    convert: Convert

    @classmethod
    def of(cls, form: StridedForm, amax: bytes = b"") -> "_Arrays":
        """Return how numpy copies a normal form, with what came for this box."""
        if form.cast:
            dtype, to_dtype = (np.dtype(f"u{size}") for size in (form.itemsize, form.to_itemsize))
            origin = form.origin_shape, form.origin_strides
            convert = by_amax(form, amax) if amax else converter_of(form)
            return cls(form.shape, form.to_strides, *origin, to_dtype, dtype, convert)
        run = run_bytes(form)
        if 1 < run <= SHORT_RUN_BYTES_MAX:
            # Where both ends are strided numpy is eight times as fast with numbers as with others of their size.
            dtype = np.dtype(f"u{run}") if run in NUMBERS_BYTES else np.dtype((np.void, run))
            shape = form.shape[:-1]
            return cls(shape, form.to_strides[:-1], shape, form.origin_strides[:-1], dtype, dtype, np.copyto)
        dtype = np.dtype("u1")
        return cls(form.shape, form.to_strides, form.shape, form.origin_strides, dtype, dtype, np.copyto)

    def copy(self, destination: memoryview, to: int, source: memoryview, origin: int) -> None:
        """Copy the part that begins at byte `origin` to byte `to`."""
        there: npt.NDArray[Any] = np.ndarray(self.origin_shape, self.dtype, source, origin, self.origin_strides)
        here: npt.NDArray[Any] = np.ndarray(self.shape, self.to_dtype, destination, to, self.to_strides)
        self.convert(here, there)


@dataclass(frozen=True, slots=True)
class _Scattered:
    """Many short runs of one length: run i goes from byte `origin[i]` to byte `to[i]`."""

    to: Columns
    origin: Columns
    nbytes: int

    def copy(self, destination: memoryview, source: memoryview) -> None:
        """Copy them all. A call for each would cost far more than its bytes, and the GIL each time."""
        dtype = np.dtype((np.void, self.nbytes))
        there: npt.NDArray[Any] = np.ndarray((len(source) - self.nbytes + 1,), dtype, source, 0, (1,))
        here: npt.NDArray[Any] = np.ndarray((len(destination) - self.nbytes + 1,), dtype, destination, 0, (1,))
        here[self.to] = there[self.origin]


_How = int | _Arrays | _Scattered
"""How an item is copied; of what lies in one piece at both ends it is the number of its bytes."""


@dataclass(frozen=True, slots=True)
class _FormTemplate:
    """What all boxes of a form have in common. Without parts they lie in one piece at both ends."""

    nbytes: int
    origin_nbytes: int
    span: int
    origin_span: int
    parts: tuple[tuple[FormPart, _Arrays | None], ...]
    """None: something comes with each box, so it has arrays of its own."""
    costs: list[int]
    """What each part costs, in bytes: those of the end that has more."""

    @classmethod
    def of(cls, form: StridedForm, nbytes_max: int, origin_nbytes_max: int) -> "_FormTemplate":
        """Look at a form whose boxes go from `origin_nbytes_max` bytes into `nbytes_max`. Raises ValueError."""
        check_form(form)
        if form.cast:
            check_cast(form)
        form = normalized(form)
        if max(form.nbytes, form.span_bytes) > nbytes_max:
            raise ValueError(f"a box that spans {form.span_bytes} bytes exceeds the destination of {nbytes_max}")
        if max(form.origin_nbytes, form.origin_span_bytes) > origin_nbytes_max:
            raise ValueError(
                f"a box that spans {form.origin_span_bytes} bytes exceeds the source of {origin_nbytes_max}"
            )
        own = needs_amax(form)
        cut = (
            ()
            if is_run(form)
            else tuple((part, None if own else _Arrays.of(part.form)) for part in cut_form(form, PART_BYTES_MAX))
        )
        costs = [max(part.form.nbytes, part.form.origin_nbytes) for part, _ in cut]
        return cls(form.nbytes, form.origin_nbytes, form.span_bytes, form.origin_span_bytes, cut, costs)


class StridedBatch(HostBatch):
    """Boxes under way. `await job.done()`, or `stop()` it; it holds its views until it has ended."""

    def __init__(self, destination: MemoryRegion, source: MemoryRegion, origin_nbytes: int) -> None:
        """Begin without boxes; `copy_boxes` adds them."""
        super().__init__(destination, source)
        self.origin_nbytes = origin_nbytes
        self._to_address, self._from_address = address_of(destination), address_of(source)
        self._to: list[int] = []
        self._origin: list[int] = []
        self._how: list[_How] = []

    def add(self, to: Sequence[int], origin: Sequence[int], how: Sequence[_How]) -> None:
        """Copy these too."""
        self._to += to
        self._origin += origin
        self._how += how

    def _do(self, first: int, last: int, hasher: xxhash.xxh3_128) -> None:  # noqa: ARG002 (nothing is hashed here)
        views = self._views
        assert views is not None
        destination, source = views
        assert source is not None
        for item in range(first, last):
            to, origin, how = self._to[item], self._origin[item], self._how[item]
            if isinstance(how, int):
                memmove(self._to_address + to, self._from_address + origin, how)
            elif isinstance(how, _Scattered):
                how.copy(destination, source)
            else:
                how.copy(destination, to, source, origin)


def copy_boxes(
    pool: CopyPool, destination: MemoryRegion, source: MemoryRegion, regions: StridedCopies
) -> StridedBatch | DeviceBoxBatch:
    """Copy boxes.

    Raises ValueError, and copies nothing, when a form is bad or a box does not fit into one of the views; `CastUnknown`
    for a form with a cast that this version doesn't have.
    """
    if destination.readonly:
        raise ValueError("the destination can't be written")
    known: dict[int, _FormTemplate] = {}
    kinds = [
        known.get(id(form)) or known.setdefault(id(form), _FormTemplate.of(form, len(destination), len(source)))
        for form in regions.form
    ]
    to, origin = _column(regions.to), _column(regions.origin)
    if not len(to) == len(origin) == len(kinds):
        raise ValueError("the columns of boxes have different lengths")
    check_amax(regions)
    check_fits("destination", len(destination), to, _column([kind.span for kind in kinds]))
    check_fits("source", len(source), origin, _column([kind.origin_span for kind in kinds]))
    device = device_of(destination, source)
    if device is not None:
        by_device = DeviceBoxBatch(device, destination, source, regions, copy_box)
        return pool.start(by_device, by_device.sizes)
    job = StridedBatch(destination, source, sum(kind.origin_nbytes for kind in kinds))
    run_costs = _add_runs(job, to, origin, kinds)
    part_costs = _add_parts(job, to, origin, kinds, regions.amax or (b"",) * len(kinds))
    return pool.start(job, np.concatenate((run_costs, part_costs)))


def copy_box(form: StridedForm, amax: bytes, destination: memoryview, to: int, source: memoryview, origin: int) -> None:
    """Copy one box that was checked, in this thread."""
    own = normalized(form)
    if is_run(own):
        destination[to : to + own.nbytes] = source[origin : origin + own.nbytes]
    else:
        _Arrays.of(own, amax).copy(destination, to, source, origin)


def _add_runs(job: StridedBatch, to: Columns, origin: Columns, kinds: list[_FormTemplate]) -> Columns:
    chosen = np.fromiter((not kind.parts for kind in kinds), dtype=np.bool_, count=len(kinds))
    nbytes = _column([kind.nbytes for kind in kinds if not kind.parts])
    to, origin, nbytes = join_adjacent(to[chosen], origin[chosen], nbytes)
    alone = np.ones(len(nbytes), dtype=np.bool_)
    costs: list[int] = []
    sizes, counts = np.unique(nbytes[nbytes <= SHORT_RUN_BYTES_MAX], return_counts=True)
    for size in sizes[counts >= SCATTERED_MIN].tolist():
        alike = np.flatnonzero(nbytes == size)
        alone[alike] = False
        for first in range(0, len(alike), SCATTERED_MAX):
            some = alike[first : first + SCATTERED_MAX]
            job.add([0], [0], [_Scattered(to[some], origin[some], size)])
            costs.append(len(some) * (size + SCATTERED_COST_BYTES))
    to, origin, nbytes = cut_to_chunks(to[alone], origin[alone], nbytes[alone], TASK_BYTES_MAX)
    job.add(to.tolist(), origin.tolist(), nbytes.tolist())
    return np.concatenate((_column(costs), nbytes))


def _add_parts(
    job: StridedBatch, to: Columns, origin: Columns, kinds: list[_FormTemplate], amax: Sequence[bytes]
) -> Columns:
    costs: list[int] = []
    for at, there, kind, largest in zip(to.tolist(), origin.tolist(), kinds, amax, strict=True):
        job.add(
            [at + part.to for part, _ in kind.parts],
            [there + part.origin for part, _ in kind.parts],
            list(_with_amax(kind, largest) if largest else (arrays for _, arrays in kind.parts if arrays is not None)),
        )
        costs += kind.costs
    return _column(costs)


def _with_amax(kind: _FormTemplate, amax: bytes) -> Iterator[_Arrays]:
    """Yield how each part of one box is computed: parts are runs of its blocks, in their order."""
    begin = 0
    for part, _ in kind.parts:
        end = begin + amax_bytes(part.form)
        yield _Arrays.of(part.form, amax[begin:end])
        begin = end


def _column(values: Sequence[int]) -> Columns:
    try:
        return np.asarray(values, dtype=np.int64)
    except OverflowError:
        raise ValueError("a box begins beyond all memory") from None
