"""Strided boxes come where they belong and nothing else is touched, whoever has made their forms."""

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples_of import examples
from tests.unit.agent.boxes import answer, dense, forms, regions, rows, source_of, widen

from tensorhub_agent.casting import conversion
from tensorhub_agent.casting.conversion import CastUnknown
from tensorhub_agent.compute import strided_copy
from tensorhub_agent.compute.batch import memmove
from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.compute.strided_copy import PART_BYTES_MAX, StridedBatch, copy_boxes
from tensorhub_common.programs.regions import StridedCopies, StridedForm

MIB = 1024 * 1024


async def bring(pool: CopyPool, destination: bytearray, source: memoryview, boxes: StridedCopies) -> None:
    await copy_boxes(pool, memoryview(destination), source, boxes).done()


def brought(nbytes: int, source: memoryview, boxes: StridedCopies) -> bytearray:
    """Copy boxes into memory of their own and return it."""

    async def run() -> bytearray:
        pool, destination = CopyPool(1), bytearray(b"\xaa" * nbytes)
        await bring(pool, destination, source, boxes)
        pool.close()
        return destination

    return asyncio.run(run())


@given(regions())
@settings(deadline=None)
def test_random_boxes_are_numpys(drawn: tuple[StridedCopies, int, int]) -> None:
    boxes, nbytes, origin_nbytes = drawn
    source = source_of(origin_nbytes)
    assert brought(nbytes, source, boxes) == answer(b"\xaa" * nbytes, source, boxes)


@given(forms(100_000))
@settings(max_examples=examples(0.4))
def test_a_box_is_the_same_however_it_is_cut(form: StridedForm) -> None:
    whole, strided_copy.PART_BYTES_MAX = PART_BYTES_MAX, 700  # type: ignore[misc]
    try:
        source, boxes = source_of(form.origin_span_bytes), StridedCopies([0], [0], [form])
        assert brought(form.span_bytes, source, boxes) == answer(b"\xaa" * form.span_bytes, source, boxes)
    finally:
        strided_copy.PART_BYTES_MAX = whole  # type: ignore[misc]


@pytest.mark.parametrize(
    "form",
    [
        rows(3000, 2, 6, 10),
        rows(1000, 256, 300, 1001),
        rows(1000, 257, 300, 1001),
        rows(700, 4096, 4096, 9000),
        rows(700, 4096, 9000, 4096),
        rows(3, 3 * MIB, 4 * MIB, 3 * MIB + 5),
        rows(1, 9 * MIB + 1, 1, 1),
        dense((700, 900), 4, (4, 2800)),
        dense((5, 40, 30, 16), 2, (100_000, 32, 1300, 2)),
    ],
)
async def test_boxes_of_many_kinds(pool: CopyPool, form: StridedForm) -> None:
    source = source_of(form.origin_span_bytes + 11)
    destination = bytearray(form.span_bytes + 20)
    boxes = StridedCopies([13], [7], [form])
    await bring(pool, destination, source, boxes)
    assert destination == answer(bytes(len(destination)), source, boxes)
    destination.append(1)  # An ended job lets go of its memory: a bytearray that somebody looks at can't grow.


@pytest.mark.parametrize("sizes", [[4] * 5000, [1, 2, 3, 4, 256, 257] * 500, [4] * 7])
async def test_thousands_of_tiny_boxes_cost_few_calls(
    pool: CopyPool, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    calls: list[int] = []

    def counted(to: int, origin: int, nbytes: int) -> None:
        calls.append(nbytes)
        memmove(to, origin, nbytes)

    monkeypatch.setattr(strided_copy, "memmove", counted)
    known = {size: StridedForm((), (), (), size, size) for size in set(sizes)}
    step = max(sizes) + 3
    order = list(range(len(sizes)))
    random.Random(1).shuffle(order)
    boxes = StridedCopies(
        [at * step for at in order], [at * step + 1 for at in range(len(sizes))], [known[s] for s in sizes]
    )
    source, destination = source_of(step * len(sizes) + 1), bytearray(step * len(sizes))
    await bring(pool, destination, source, boxes)
    assert destination == answer(bytes(len(destination)), source, boxes)
    assert len(calls) <= 500


@pytest.mark.parametrize(
    ("boxes", "why"),
    [
        *((StridedCopies([to], [0], [rows(2, 4, 8, 8)]), "destination of 64") for to in (-1, 53)),
        *((StridedCopies([0], [origin], [rows(2, 4, 8, 8)]), "source of 64") for origin in (-1, 53)),
        (StridedCopies([0], [0], [rows(2, 4, 61, 8)]), "destination of 64"),
        (StridedCopies([0], [0], [rows(2, 4, 8, 61)]), "source of 64"),
        (StridedCopies([1 << 80], [0], [rows(2, 4, 8, 8)]), "beyond all memory"),
        (StridedCopies([0], [1 << 63], [rows(2, 4, 8, 8)]), "beyond all memory"),
        (StridedCopies([0], [0], [StridedForm((1 << 62, 1 << 62), (1, 1), (1, 1), 1, 1)]), "destination of 64"),
        (StridedCopies([0], [0], [StridedForm((3, 1 << 50), (1 << 62, 0), (1, 0), 1, 1)]), "destination of 64"),
        (StridedCopies([0], [0], [StridedForm((65,), (0,), (0,), 1, 1)]), "destination of 64"),
        (StridedCopies([0], [0], [StridedForm((2,), (-8,), (8,), 1, 1)]), "negative stride"),
        (StridedCopies([0], [0], [StridedForm((2,), (8,), (8,), 1, 2)]), "no cast"),
        (StridedCopies([0, 0], [0], [rows(2, 4, 8, 8)]), "different lengths"),
    ],
)
async def test_what_does_not_fit_is_refused_before_the_first_byte(
    pool: CopyPool, boxes: StridedCopies, why: str
) -> None:
    destination = bytearray(64)
    good = rows(2, 4, 8, 8)
    for columns in (boxes, StridedCopies([0, *boxes.to], [0, *boxes.origin], [good, *boxes.form])):
        with pytest.raises(ValueError, match=why):
            copy_boxes(pool, memoryview(destination), source_of(64), columns)
    await pool.digest(memoryview(destination), Spans([0], [0], [64])).result()
    assert destination == bytes(64)
    with pytest.raises(ValueError, match="can't be written"):
        copy_boxes(pool, memoryview(bytes(64)), source_of(64), StridedCopies([0], [0], [good]))


hostile = st.one_of(st.integers(-3, 80), st.integers(-(1 << 64), 1 << 64))


@given(
    st.lists(st.tuples(hostile, hostile, hostile), max_size=4),
    hostile,
    hostile,
    st.sampled_from([1, 2, 3, 64, -1, 0, 1 << 40]),
)
@settings(deadline=None)
def test_no_form_reaches_outside(dims: list[tuple[int, int, int]], to: int, origin: int, itemsize: int) -> None:
    """Random numbers in every place: refused, or copied within the bounds."""
    shape, to_strides, origin_strides = zip(*dims, strict=True) if dims else ((), (), ())
    boxes = StridedCopies([to], [origin], [StridedForm(shape, to_strides, origin_strides, itemsize, itemsize)])
    memory = bytearray(b"\xaa" * 192)

    async def run() -> None:
        pool = CopyPool(1)
        try:
            await copy_boxes(pool, memoryview(memory)[64:128], source_of(64), boxes).done()
        except ValueError:
            assert memory == b"\xaa" * 192
        finally:
            pool.close()

    asyncio.run(run())
    assert memory[:64] == memory[128:] == b"\xaa" * 64


async def test_a_cast_is_looked_up_by_its_name(pool: CopyPool, monkeypatch: pytest.MonkeyPatch) -> None:
    form = StridedForm((300, 500), (4 * 600, 4), (2 * 500, 2), 2, 4, "uint16>uint32")
    source, destination = source_of(300 * 500 * 2), bytearray(form.span_bytes)
    with pytest.raises(CastUnknown, match=r"uint16>uint32.*not in this version"):
        copy_boxes(pool, memoryview(destination), source, StridedCopies([0], [0], [form]))
    monkeypatch.setitem(conversion.CONVERTERS, "uint16>uint32", widen)
    await bring(pool, destination, source, StridedCopies([0], [0], [form]))
    found = np.ndarray((300, 500), "<u4", destination, 0, (2400, 4))
    assert np.array_equal(found, np.frombuffer(source, "<u2").reshape(300, 500))


async def test_tasks_have_about_equal_bytes_and_neighbours_at_both_ends_are_one_copy(pool: CopyPool) -> None:
    forms = [rows(4096, 4096, 4096, 5000), rows(10, 100, 200, 200), rows(1, 3 * MIB, 1, 1)]
    boxes = StridedCopies([0, 20 * MIB, 21 * MIB], [0, 20 * MIB + 7, 22 * MIB], forms)
    job = copy_boxes(pool, memoryview(bytearray(32 * MIB)), source_of(32 * MIB), boxes)
    assert 4 <= len(job._bounds) - 1 <= 32
    await job.done()
    form = StridedForm((5,), (2,), (2,), 2, 2)
    boxes = StridedCopies(list(range(0, 1000, 10)), list(range(3, 1003, 10)), [form] * 100)
    job = copy_boxes(pool, memoryview(bytearray(1000)), source_of(1003), boxes)
    assert isinstance(job, StridedBatch)
    assert job._how == [1000]
    await job.done()
    await bring(pool, bytearray(), memoryview(b""), StridedCopies([], [], []))
