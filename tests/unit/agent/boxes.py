"""Boxes for the tests of everything that copies them, and numpy's answer to what they bring."""

import asyncio
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view
from tests.examples_of import examples
from tests.kit.fakes import GIVE_UP_S

from tensorhub_agent.compute import strided_copy
from tensorhub_agent.primitives.forms import packed_strides
from tensorhub_agent.transports.base import SourceSession
from tensorhub_common.programs.regions import StridedCopies, StridedForm


@st.composite
def forms(draw: st.DrawFn, bytes_max: int = 4096) -> StridedForm:
    """Return a form of up to 5 dimensions whose elements overlap at neither end; each end has an order of its own."""
    itemsize = draw(st.sampled_from((1, 2, 3, 4, 8, 16)))
    shape: list[int] = []
    for _ in range(draw(st.integers(0, 5))):
        room = bytes_max // (itemsize * math.prod(shape))
        shape.append(draw(st.integers(1, min(7, max(room, 1)))))
    return StridedForm(tuple(shape), draw(strides(shape, itemsize)), draw(strides(shape, itemsize)), itemsize, itemsize)


@st.composite
def strides(draw: st.DrawFn, shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Lay out the dimensions in any order, with gaps here and there."""
    found = [0] * len(shape)
    # Mostly in order, as tensors lie; else any.
    order = list(range(len(shape)))[::-1]
    if draw(st.integers(0, 3)) == 0:
        order = draw(st.permutations(order))
    extent = itemsize
    for dim in order:
        extent += draw(st.sampled_from((0, 0, 0, 1, itemsize, 5)))
        found[dim] = extent
        extent *= shape[dim]
    return tuple(found)


@st.composite
def regions(draw: st.DrawFn, bytes_max: int = 4096) -> tuple[StridedCopies, int, int]:
    """Return boxes that overlap nowhere in the destination, and the sizes of destination and source."""
    known = draw(st.lists(forms(bytes_max), min_size=1, max_size=4))
    chosen = draw(st.lists(st.sampled_from(known), max_size=12))
    to: list[int] = []
    origin: list[int] = []
    at = there = draw(st.integers(0, 3))
    for form in chosen:
        at += draw(st.sampled_from((0, 0, 1, 7)))
        there += draw(st.sampled_from((0, 0, 1, 9)))
        to.append(at)
        origin.append(there)
        at += form.span_bytes
        there += form.origin_span_bytes
    order = draw(st.permutations(range(len(chosen)))) if draw(st.booleans()) else range(len(chosen))
    return (
        StridedCopies([to[n] for n in order], [origin[n] for n in order], [chosen[n] for n in order]),
        at + draw(st.integers(0, 5)),
        there + draw(st.integers(0, 5)),
    )


def check_gathering(runner: asyncio.Runner, session: SourceSession, source: memoryview) -> None:
    """Let a session bring random boxes; they are numpy's, and nothing else is touched."""

    @given(regions())
    @settings(max_examples=examples(0.4))
    def each(drawn: tuple[StridedCopies, int, int]) -> None:
        boxes, nbytes, _ = drawn
        memory = bytearray(b"\xaa" * nbytes)
        runner.run(session.gather(memoryview(memory), boxes, digests=True))
        assert memory == answer(b"\xaa" * nbytes, source, boxes)

    each()


def source_of(nbytes: int, seed: int = 1) -> memoryview:
    return memoryview(np.random.default_rng(seed).bytes(nbytes))


def answer(destination: bytes, source: memoryview, boxes: StridedCopies) -> bytes:
    """Return what the destination is to become, found run by run with numpy's indices.

    A run is what has no gap at either end: an element, or as many of the last dimensions as lie one behind the other.
    """
    found = np.frombuffer(destination, np.uint8).copy()
    origin = np.frombuffer(source, np.uint8)
    for to, at, form in zip(boxes.to, boxes.origin, boxes.form, strict=True):
        dims, nbytes = len(form.shape), form.itemsize
        while dims and form.to_strides[dims - 1] == form.origin_strides[dims - 1] == nbytes:
            dims -= 1
            nbytes *= form.shape[dims]
        into = sliding_window_view(found, nbytes, writeable=True)
        into[to + starts(form.shape[:dims], form.to_strides)] = sliding_window_view(origin, nbytes)[
            at + starts(form.shape[:dims], form.origin_strides)
        ]
    return found.tobytes()


def places(form: StridedForm, strides: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return where each byte of a box stands, from its beginning, in the order of its elements."""
    return (starts(form.shape, strides)[:, None] + np.arange(form.itemsize)).reshape(-1)


def starts(shape: Sequence[int], strides: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return where each element of these dimensions begins, from the first one, in their order."""
    at: npt.NDArray[Any] = np.zeros(shape, np.int64)
    for dim, size in enumerate(shape):
        at += (np.arange(size) * strides[dim]).reshape([-1 if dim == each else 1 for each in range(len(shape))])
    return at.reshape(-1)


def rows(count: int, nbytes: int, to_stride: int, origin_stride: int) -> StridedForm:
    """Return a form of rows of bytes."""
    return StridedForm((count, nbytes), (to_stride, 1), (origin_stride, 1), 1, 1)


def dense(shape: Sequence[int], itemsize: int, origin_strides: Sequence[int]) -> StridedForm:
    """Return a form that is packed in the destination."""
    return StridedForm(tuple(shape), packed_strides(tuple(shape), itemsize), tuple(origin_strides), itemsize, itemsize)


class Gate:
    """Holds up every copy of a strided box, so that a test can look at one under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.entered = threading.Event(), threading.Semaphore(0)
        self.inside = self.writes = 0
        lock, copy = threading.Lock(), strided_copy._Arrays.copy

        def slow(arrays: Any, *args: Any) -> None:
            with lock:
                self.inside += 1
            self.entered.release()
            assert self.open.wait(GIVE_UP_S)
            copy(arrays, *args)
            with lock:
                self.inside -= 1
                self.writes += 1

        monkeypatch.setattr(strided_copy._Arrays, "copy", slow)

    async def until_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=GIVE_UP_S)


def widen(to: npt.NDArray[Any], origin: npt.NDArray[Any]) -> None:
    """Stand in for a converter, either way: what fits stays what it is."""
    np.copyto(to, origin, casting="unsafe")
