"""Copies and background work in the threads of the pool: what is written, what is hashed, and when each ends."""

import asyncio
import functools
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import xxhash
from tests.kit.fakes import GIVE_UP_S, LastResort

from tensorhub_agent.compute import batch
from tensorhub_agent.compute import pool as compute_pool
from tensorhub_agent.compute.batch import CopyStopped, PoolBatch
from tensorhub_agent.compute.pool import PART_BYTES, BackgroundTask, CopyBatch, CopyPool, CopyPoolFull
from tensorhub_agent.compute.spans import Spans
from tensorhub_common.layout.layout import TensorEntry, layout_of, pieces, segment_bytes

MIB = 1024 * 1024


def bytes_of(seed: int, nbytes: int) -> memoryview:
    return memoryview(np.random.default_rng(seed).bytes(nbytes))


def packed(sizes: list[int], gap: int = 0) -> Spans:
    """Return spans of these sizes, one after another, the same at both ends."""
    at = [sum(sizes[:number]) + gap * number for number in range(len(sizes))]
    return Spans(at, at, sizes)


def digests_of(source: memoryview, spans: Spans) -> bytes:
    return b"".join(
        xxhash.xxh3_128_digest(source[at : at + nbytes]) for at, nbytes in zip(spans.origin, spans.nbytes, strict=True)
    )


class Gate:
    """A memmove that waits, so that a test can look at a copy under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.inside = 0
        self.entered = threading.Semaphore(0)
        self.writes = 0
        self._lock = threading.Lock()
        self._memmove: Callable[..., Any] = batch.memmove
        monkeypatch.setattr(compute_pool, "memmove", self)

    def __call__(self, to: int, origin: int, nbytes: int) -> None:
        with self._lock:
            self.inside += 1
        self.entered.release()
        assert self.open.wait(GIVE_UP_S)
        self._memmove(to, origin, nbytes)
        with self._lock:
            self.inside -= 1
            self.writes += 1

    async def until_entered(self, times: int = 1) -> None:
        for _ in range(times):
            assert await asyncio.to_thread(self.entered.acquire, timeout=GIVE_UP_S)


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [1],
        [PART_BYTES],
        [PART_BYTES - 1, 3, PART_BYTES + 1],
        [2 * PART_BYTES + 12_345, 17, 4 * MIB],
        [0, 5, 0, 0, 240, 0],
        [4 * MIB] * 6 + [999_999],
    ],
)
@pytest.mark.parametrize("gap", [0, 56])
async def test_bytes_and_digests_are_those_of_the_source(pool: CopyPool, sizes: list[int], gap: int) -> None:
    spans = packed(sizes, gap)
    source = bytes_of(1, sum(sizes) + gap * len(sizes) + 7)
    memory = bytearray(len(source))
    destination = memoryview(memory)
    assert await pool.copy_and_digest(destination, source, spans).result() == digests_of(source, spans)
    expected = bytearray(len(source))
    for at, nbytes in zip(spans.to, spans.nbytes, strict=True):
        expected[at : at + nbytes] = source[at : at + nbytes]
    assert destination == expected, "something beside the spans was written, or not all of them"
    assert await pool.digest(destination, spans).result() == digests_of(source, spans)
    without = memoryview(bytearray(len(source)))
    assert await pool.copy_and_digest(without, source, spans, digests=False).result() == b""
    assert without == expected
    destination.release()
    memory.append(1)  # An ended job lets go of its memory: a bytearray that somebody looks at can't grow.


async def test_five_thousand_tiny_pieces_at_other_places(pool: CopyPool) -> None:
    """Offsets differ, so that what is one run at the source is not one at the destination."""
    dice = random.Random(2)
    sizes = [dice.randrange(0, 900) for _ in range(5000)]
    origin = packed(sizes).origin
    order = list(range(5000))
    dice.shuffle(order)
    to, end = [0] * 5000, 0
    for number in order:
        to[number], end = end, end + sizes[number]
    source, destination = bytes_of(3, sum(sizes)), memoryview(bytearray(sum(sizes)))
    spans = Spans(to, origin, sizes)
    job = pool.copy_and_digest(destination, source, spans)
    assert len(job._bounds) < 100, "tiny pieces cost a hand-over each"
    assert await job.result() == digests_of(source, spans)
    for number in range(5000):
        at, start = to[number], origin[number]
        assert destination[at : at + sizes[number]] == source[start : start + sizes[number]]


async def test_a_layouts_pieces(pool: CopyPool) -> None:
    shapes: dict[str, tuple[int, ...]] = {"a": (1500, 1000), "b": (), "c": (0, 4), "d": (3, 5, 7)}
    layout = layout_of(
        TensorEntry(name, "float32", 4, shape, shape, (0,) * len(shape)) for name, shape in shapes.items()
    )
    table = pieces(layout)
    source = bytes_of(4, segment_bytes(layout))
    destination = memoryview(bytearray(len(source)))
    spans = Spans.of(table)
    found = await pool.copy_and_digest(destination, source, spans).result()
    assert found == digests_of(source, spans)
    part = Spans.of(table, [(2, 1), (0, 1)])
    assert await pool.digest(destination, part).result() == found[32:48] + found[:16]


@pytest.mark.parametrize("sizes", [[1000], [PART_BYTES * 3]])
async def test_the_digest_is_of_what_stands_in_the_destination(
    pool: CopyPool, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    """A copy that went wrong is found, though the source is as it should be."""
    memmove = batch.memmove
    spans = packed(sizes)
    source, destination = bytes_of(5, sum(sizes)), bytearray(sum(sizes))

    def wrong(to: int, origin: int, nbytes: int) -> None:
        memmove(to, origin, nbytes)
        destination[500] = source[500] ^ 1

    monkeypatch.setattr(compute_pool, "memmove", wrong)
    found = await pool.copy_and_digest(memoryview(destination), source, spans).result()
    assert found != digests_of(source, spans)
    assert found == digests_of(memoryview(destination), spans)


SHORT = [([90], [0], [11]), ([0], [90], [11]), ([-1], [0], [1]), ([0], [-1], [1]), ([0], [0], [-1])]


@pytest.mark.parametrize("spans", [*SHORT, ([0, 2**62], [0, 0], [1, 2**62]), ([0, 1], [0, 1], [1])])
async def test_spans_that_do_not_fit_are_refused_before_a_byte_is_written(
    pool: CopyPool, spans: tuple[list[int], list[int], list[int]]
) -> None:
    destination = bytearray(100)
    for digests in (True, False):
        with pytest.raises(ValueError, match=r"does not fit|different lengths"):
            pool.copy_and_digest(memoryview(destination), bytes_of(6, 100), Spans(*spans), digests=digests)
    with pytest.raises(ValueError, match="can't be written"):
        pool.copy_and_digest(memoryview(b"fixed"), memoryview(b"other"), packed([5]))
    assert destination == bytes(100)


async def test_a_stopped_job_ends_when_nobody_writes_any_more(pool: CopyPool, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    source = bytes_of(7, 40 * MIB)
    destination = memoryview(bytearray(len(source)))
    job = pool.copy_and_digest(destination, source, packed([4 * MIB] * 10), digests=False)
    await gate.until_entered(2)
    job.stop()
    waiting = asyncio.create_task(job.result())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done(), "it said that it had ended while two threads were still to write"
    gate.open.set()
    with pytest.raises(CopyStopped):
        await waiting
    assert gate.inside == 0
    assert gate.writes == 2, "a task was begun after the stop"
    writes = bytes(destination)
    await pool.digest(destination, packed([MIB])).result()
    assert destination == writes


async def test_a_cancelled_caller_is_kept_until_nobody_writes_any_more(
    pool: CopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    source = bytes_of(8, 40 * MIB)
    job = pool.copy_and_digest(memoryview(bytearray(len(source))), source, packed([4 * MIB] * 10))
    waiting = asyncio.create_task(job.result())
    await gate.until_entered()
    for _ in range(3):
        waiting.cancel()
        await asyncio.sleep(0)
        assert not waiting.done()
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert gate.inside == 0
    assert gate.writes < 40 * MIB // PART_BYTES


async def test_what_goes_wrong_in_a_thread_is_raised_once_all_have_ended(
    pool: CopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_to: int, _origin: int, _nbytes: int) -> None:
        raise RuntimeError("no copy today")

    monkeypatch.setattr(compute_pool, "memmove", fails)
    with pytest.raises(RuntimeError, match="no copy today"):
        await pool.copy_and_digest(memoryview(bytearray(64 * MIB)), bytes_of(9, 64), packed([8] * 8)).result()
    monkeypatch.undo()
    assert await pool.digest(bytes_of(9, 64), packed([64])).result() == xxhash.xxh3_128_digest(bytes_of(9, 64))


async def test_a_job_wakes_the_loop_once(pool: CopyPool, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    calls = mock.Mock(wraps=loop.call_soon_threadsafe)
    monkeypatch.setattr(loop, "call_soon_threadsafe", calls)
    source = bytes_of(10, 20 * MIB)
    await pool.copy_and_digest(memoryview(bytearray(len(source))), source, packed([2 * MIB] * 10)).result()
    calls.assert_called_once()


async def test_a_small_job_takes_its_turn_beside_a_large_one(pool: CopyPool, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[PoolBatch] = []
    run = CopyBatch._run

    def noted(job: CopyBatch, first: int, last: int, hasher: Any) -> None:
        order.append(job)
        run(job, first, last, hasher)

    monkeypatch.setattr(CopyBatch, "_run", noted)
    gate = Gate(monkeypatch)
    source = bytes_of(11, 64 * MIB)
    large = pool.copy_and_digest(memoryview(bytearray(len(source))), source, packed([4 * MIB] * 16))
    await gate.until_entered()
    small = pool.copy_and_digest(memoryview(bytearray(MIB)), source, packed([MIB]))
    gate.open.set()
    await asyncio.gather(large.result(), small.result())
    assert order.index(small) <= 3
    assert order.count(large) == len(large._bounds) - 1


async def test_there_is_a_bound_on_jobs(pool: CopyPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_pool, "JOBS_MAX", 1)
    gate = Gate(monkeypatch)
    source = bytes_of(13, 64)
    job = pool.copy_and_digest(memoryview(bytearray(64)), source, packed([64]))
    with pytest.raises(CopyPoolFull):
        pool.copy_and_digest(memoryview(bytearray(64)), source, packed([64]))
    gate.open.set()
    await job.result()
    assert await pool.digest(source, packed([64])).result() == xxhash.xxh3_128_digest(source)


async def test_a_pool_that_closes_ends_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = CopyPool(2)
    gate = Gate(monkeypatch)
    source = bytes_of(14, 32 * MIB)
    jobs = [
        pool.copy_and_digest(memoryview(bytearray(len(source))), source, packed([4 * MIB] * 8), digests=False)
        for _ in range(3)
    ]
    await gate.until_entered(2)
    closing = asyncio.create_task(asyncio.to_thread(pool.close))
    while not all(job._stopped for job in jobs):  # noqa: ASYNC110 (there is nothing to be told by)
        await asyncio.sleep(0)
    gate.open.set()
    await closing
    assert not any(worker.is_alive() for worker in pool._workers)
    await jobs[0].result()  # Both its tasks were under way.
    for job in jobs[1:]:
        with pytest.raises(CopyStopped):
            await job.result()


@pytest.fixture
def one() -> Iterator[CopyPool]:
    """A pool of one thread."""
    one = CopyPool(1)
    yield one
    one.close()


async def test_nothing_of_a_chore_that_is_over_is_kept(one: CopyPool) -> None:
    """What a chore has read is a publication's memory, which may have been released since."""

    class Publication(list[int]):
        pass

    publication = Publication()
    kept = weakref.ref(publication)
    await one.background(functools.partial(publication.append, 1))
    del publication
    async with asyncio.timeout(GIVE_UP_S):
        while kept() is not None:  # noqa: ASYNC110 (the thread is about to leave its frame)
            await asyncio.sleep(0.005)


async def test_chores_and_jobs_end_whatever_their_order_and_a_failure_is_heard(one: CopyPool) -> None:
    def fail() -> None:
        raise ArithmeticError("no")

    with pytest.raises(ArithmeticError, match="no"):
        await one.background(fail)
    done: list[str] = []
    chores = [one.background(lambda: done.append(threading.current_thread().name)) for _ in range(20)]
    memory = memoryview(bytearray(4 * MIB))
    jobs = [one.digest(memory, Spans([0, MIB], [0, MIB], [MIB, MIB])) for _ in range(20)]
    async with asyncio.timeout(GIVE_UP_S):
        await asyncio.gather(*chores, *(job.result() for job in jobs))
    assert done == ["copy-0"] * 20


async def test_a_chore_wants_another_turn_while_jobs_have_theirs_and_ends_without_its_work_once_stopped() -> None:
    done: list[str] = []
    others = [True, True, False]
    chore = BackgroundTask(lambda: done.append("work"), lambda: others.pop(0))
    assert [chore.run_task(None), chore.run_task(None)] == [True, True]
    assert not done
    assert chore.run_task(None) is False
    await chore.over
    assert done == ["work"]
    stopped = BackgroundTask(lambda: done.append("work"), lambda: True)
    stopped.stop()
    assert stopped.run_task(None) is False
    await stopped.over
    assert done == ["work"]


async def test_a_cancelled_caller_stays_until_the_work_has_ended_and_work_before_its_turn_is_not_done(
    one: CopyPool,
) -> None:
    began, gate, ended, late_done = (threading.Event() for _ in range(4))

    def work() -> None:
        began.set()
        gate.wait(GIVE_UP_S)
        ended.set()

    chore = asyncio.ensure_future(one.background(work))
    assert await asyncio.to_thread(began.wait, GIVE_UP_S)
    late = asyncio.ensure_future(one.background(late_done.set))
    await asyncio.sleep(0)
    chore.cancel()
    late.cancel()
    await asyncio.sleep(0)
    assert not chore.done()
    gate.set()
    for each in (chore, late):
        with pytest.raises(asyncio.CancelledError):
            await each
    assert (ended.is_set(), late_done.is_set()) == (True, False)


async def test_a_thread_of_the_copy_pool_that_ends_ends_the_process(last_resort: LastResort) -> None:
    class Broken:
        def run_task(self, _: object) -> bool:
            raise ArithmeticError("planted")

    pool = CopyPool(1)
    await pool.background(lambda: None)
    pool._turns.put(Broken())  # type: ignore[arg-type]
    assert (await last_resort.wait()).owner == "copying"
    pool.close()
