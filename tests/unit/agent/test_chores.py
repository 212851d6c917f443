"""Chores: done in the pool's threads, only when no job has a turn there, and never left before their end."""

import asyncio
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Final

import pytest

from tensorhub_agent.compute.pool import BackgroundTask, CopyPool, Spans

GIVE_UP_S: Final = 60.0
MIB: Final = 1024 * 1024


def opened(gate: threading.Event) -> None:
    gate.wait(GIVE_UP_S)


@pytest.fixture
def pool() -> Iterator[CopyPool]:
    pool = CopyPool(1)
    yield pool
    pool.close()


async def test_a_chore_is_done_in_a_thread_of_the_pool(pool: CopyPool) -> None:
    names: list[str] = []
    await pool.background(lambda: names.append(threading.current_thread().name))
    assert names == ["copy-0"]


async def test_nothing_of_a_chore_that_is_over_is_kept(pool: CopyPool) -> None:
    """What a chore has read is a publication's memory, which may have been released since."""

    class Publication(list[int]):
        pass

    publication = Publication()
    kept = weakref.ref(publication)
    await pool.background(functools.partial(publication.append, 1))
    del publication
    async with asyncio.timeout(GIVE_UP_S):
        while kept() is not None:  # noqa: ASYNC110 (the thread is about to leave its frame)
            await asyncio.sleep(0.005)


async def test_a_failure_is_heard(pool: CopyPool) -> None:
    def fail() -> None:
        raise ArithmeticError("no")

    with pytest.raises(ArithmeticError, match="no"):
        await pool.background(fail)
    await pool.background(lambda: None)


async def test_a_chore_wants_another_turn_while_jobs_have_theirs() -> None:
    done: list[str] = []
    others = [True, True, False]
    chore = BackgroundTask(lambda: done.append("work"), lambda: others.pop(0))
    assert [chore.run_task(None), chore.run_task(None)] == [True, True]
    assert not done
    assert chore.run_task(None) is False
    await chore.over
    assert done == ["work"]


async def test_chores_and_jobs_end_whatever_their_order(pool: CopyPool) -> None:
    done: list[int] = []
    chores = [asyncio.ensure_future(pool.background(lambda: done.append(1))) for _ in range(20)]
    memory = memoryview(bytearray(4 * MIB))
    jobs = [pool.digest(memory, Spans([0, MIB], [0, MIB], [MIB, MIB])) for _ in range(20)]
    async with asyncio.timeout(GIVE_UP_S):
        await asyncio.gather(*chores, *(job.result() for job in jobs))
    assert len(done) == 20


async def test_a_chore_that_was_stopped_ends_without_its_work_though_jobs_have_turns() -> None:
    done: list[str] = []
    chore = BackgroundTask(lambda: done.append("work"), lambda: True)
    chore.stop()
    assert chore.run_task(None) is False
    await chore.over
    assert not done


async def test_a_cancelled_caller_stays_until_the_work_has_ended(pool: CopyPool) -> None:
    began, gate, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        gate.wait(GIVE_UP_S)
        ended.set()

    chore = asyncio.ensure_future(pool.background(work))
    assert await asyncio.to_thread(began.wait, GIVE_UP_S)
    chore.cancel()
    await asyncio.sleep(0)
    assert not chore.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await chore
    assert ended.is_set()


async def test_a_chore_that_was_cancelled_before_its_turn_is_not_done(pool: CopyPool) -> None:
    gate, done = threading.Event(), threading.Event()
    held = asyncio.ensure_future(pool.background(lambda: opened(gate)))
    await asyncio.sleep(0)
    late = asyncio.ensure_future(pool.background(done.set))
    await asyncio.sleep(0)
    late.cancel()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await late
    await held
    assert not done.is_set()
