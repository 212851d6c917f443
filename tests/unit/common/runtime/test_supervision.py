"""An error that escapes is logged once, counted, and ends with the first handler that takes it."""

import asyncio
import gc
import logging
from collections.abc import Iterator

import pytest

from tensorhub_common.runtime import supervision
from tensorhub_common.runtime.peer_status import PeerStatus
from tensorhub_common.runtime.supervision import Fault, Supervisor


@pytest.fixture(autouse=True)
def no_last_resort() -> Iterator[list[Fault]]:
    """Collect what reaches the process's last resort."""
    reached: list[Fault] = []
    supervision.set_last_resort(reached.append)
    yield reached
    supervision.set_last_resort(None)


@pytest.fixture
def work(request: pytest.FixtureRequest) -> Supervisor:
    """Faults of one owner and kind are logged once a minute, so each test is an owner."""
    return Supervisor(str(request.node.nodeid))


async def fail(message: str = "broken") -> None:
    raise ValueError(message)


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_task_that_fails_is_logged_once_counted_and_handed_to_its_owner(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, no_last_resort: list[Fault]
) -> None:
    faults: list[Fault] = []
    work = Supervisor(str(request.node.nodeid), faults.append)
    work.start(fail(), "reading")
    await turns()
    gc.collect()
    assert [(fault.work, str(fault.error)) for fault in faults] == [("reading", "broken")]
    assert supervision.fault_counts()[work.owner] == 1
    assert len(caplog.records) == 1
    assert "in fail" in caplog.text, "the line has the place where it was raised"
    assert no_last_resort == []
    assert work.tasks == 0


async def test_the_tasks_own_handler_comes_first_and_a_handler_that_fails_passes_the_fault_on(
    request: pytest.FixtureRequest, no_last_resort: list[Fault]
) -> None:
    own: list[Fault] = []
    owners: list[Fault] = []

    def broken(_: Fault) -> None:
        raise RuntimeError("handler")

    work = Supervisor(str(request.node.nodeid), owners.append)
    work.start(fail("one"), "first", own.append)
    work.start(fail("two"), "second", broken)
    await turns()
    assert [str(fault.error) for fault in own] == ["one"]
    assert [str(fault.error) for fault in owners] == ["two"]

    orphan = Supervisor(str(request.node.nodeid), broken)
    orphan.start(fail("three"), "third")
    await turns()
    assert [str(fault.error) for fault in no_last_resort] == ["three"]


async def test_the_error_of_an_awaited_task_is_its_waiters_and_no_fault(
    work: Supervisor, caplog: pytest.LogCaptureFixture, no_last_resort: list[Fault]
) -> None:
    with pytest.raises(ValueError, match="broken"):
        await work.start(fail(), "asking", awaited=True)
    abandoned = work.start(fail(), "asking", awaited=True)
    await turns()
    del abandoned
    gc.collect()
    assert caplog.records == []
    assert no_last_resort == []


async def test_timers_and_callbacks_never_raise_into_the_loop(work: Supervisor, no_last_resort: list[Fault]) -> None:

    def break_down(number: int) -> None:
        raise ValueError(number)

    work.call_soon(break_down, 1, what="soon")
    work.call_later(0, break_down, 2, what="later")
    work.call_at(asyncio.get_running_loop().time(), break_down, 3, what="at")
    work.guarded(break_down, "called back")(4)
    await turns(20)
    assert sorted(fault.work for fault in no_last_resort) == ["at", "called back", "later", "soon"]


async def test_a_threads_error_is_handled_in_the_loops_thread(work: Supervisor, no_last_resort: list[Fault]) -> None:

    def break_down() -> None:
        raise ValueError

    thread = work.thread(break_down, "beating")
    thread.start()
    await asyncio.to_thread(thread.join, 10)
    await turns()
    assert [fault.work for fault in no_last_resort] == ["beating"]


async def test_the_same_fault_is_counted_each_time_and_logged_once(
    work: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        work.start(fail(), "retrying")
        await turns()
    assert supervision.fault_counts()[work.owner] == 5
    assert len(caplog.records) == 1


async def test_close_ends_tasks_and_silences_timers(work: Supervisor) -> None:
    called: list[int] = []
    task = work.start(asyncio.sleep(3600), "waiting")
    work.call_soon(called.append, 1, what="counting")
    await work.close()
    await turns()
    assert task.cancelled()
    assert called == []


async def test_what_reaches_the_loop_itself_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    supervision.watch_loop(loop)
    before = supervision.fault_counts().get("event loop", 0)
    task = loop.create_task(fail("a library's own"))
    await turns()
    del task
    gc.collect()
    loop.set_exception_handler(None)
    assert supervision.fault_counts()["event loop"] == before + 1
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_another_part_is_lost_once_and_back_once_however_many_questions_meet_its_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    planner = PeerStatus("the planner", clock)
    planner.answers()
    for _ in range(3):
        planner.is_silent("no answer on plan within 1 s", 1.0)
        clock.now += 2.0
    assert planner.silent_s == 7.0
    planner.answers()
    planner.answers()
    planner.is_silent("nobody listens")
    planner.answers()
    assert [record.getMessage() for record in caplog.records] == [
        "the planner does not answer: no answer on plan within 1 s",
        "the planner answers again after 7.0 s; 3 attempts failed",
        "the planner does not answer: nobody listens",
        "the planner answers again after 0.0 s",
    ]
    assert planner.lost_count == 2
