"""The thread of UCX: it looks only at connections on which something happens, and its errors end unnoticed nowhere."""

import asyncio
import gc
import threading

import pytest
from tests.kit.fakes import GIVE_UP_S, Lost
from tests.unit.agent.transports.hubs import MIB, Hub, cut

from tensorhub_agent.transports.base import TransportUnavailable
from tensorhub_agent.transports.ucxx import engine as ucxx_engine
from tensorhub_agent.transports.ucxx import library
from tensorhub_agent.transports.ucxx.engine import UcxxEngine
from tensorhub_agent.transports.ucxx.transport import UcxxTransport


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than the connections below, so that UCX has to be asked more than once."""
    monkeypatch.setattr(library, "READY_MAX", 2)


async def until_none_is_looked_at(transport: UcxxTransport) -> None:
    async with asyncio.timeout(GIVE_UP_S):
        while transport._engine._busy:  # noqa: ASYNC110 (the thread tells nobody)
            await asyncio.sleep(0.005)


async def test_nobody_looks_at_connections_that_wait(ucxx: Hub) -> None:
    segment = ucxx.segment(MIB)
    sessions = [await ucxx.open(segment, lease=f"lease-{number}") for number in range(5)]
    await until_none_is_looked_at(ucxx.reader)
    await until_none_is_looked_at(ucxx.source)
    assert await asyncio.gather(*(session.still_holds() for session in sessions)) == [True] * 5
    memory = memoryview(bytearray(segment.nbytes))
    await sessions[3].read(memory, cut(segment.nbytes, MIB), digests=True)
    assert memory == segment.view
    for session in sessions:
        await session.close()
    await until_none_is_looked_at(ucxx.reader)
    await until_none_is_looked_at(ucxx.source)
    await ucxx.until_links(5, 5)


async def test_the_end_of_connections_that_wait_is_heard(ucxx: Hub) -> None:
    losses = [Lost() for _ in range(5)]
    sessions = [await ucxx.open(ucxx.segment(MIB), lost, f"lease-{number}") for number, lost in enumerate(losses)]
    await until_none_is_looked_at(ucxx.reader)
    await ucxx.source.stop()
    for lost in losses:
        assert "connection" in await lost.wait()
    for session in sessions:
        await session.close()
    await until_none_is_looked_at(ucxx.reader)


# Errors in the thread, and its end.


@pytest.fixture
def faults() -> list[str]:
    return []


async def test_news_that_fails_takes_no_other_with_it(faults: list[str]) -> None:
    engine = UcxxEngine("127.0.0.1", lambda _: None, faults.append)
    taken: list[int] = []

    def fails() -> None:
        raise ArithmeticError("planted")

    engine._deliver([(taken.append, (1,)), (fails, ()), (taken.append, (2,))])
    assert taken == [1, 2]
    assert [("UCX" in each, "planted" in each) for each in faults] == [(True, True)]


async def test_a_start_that_fails_when_nobody_waits_any_more_is_no_fault(
    faults: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent has gone on without UCX, and has said so. The garbage collector has nothing to add."""
    goes_on, reached_the_loop = threading.Event(), list[dict[str, object]]()
    monkeypatch.setattr(ucxx_engine, "START_S_MAX", 0.05)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reached_the_loop.append(context))
    engine = UcxxEngine("127.0.0.1", lambda _: None, faults.append)

    def slow() -> int:
        assert goes_on.wait(GIVE_UP_S)
        raise RuntimeError("no device")

    engine._open = slow  # type: ignore[method-assign]  # The test has no device either.
    with pytest.raises(TransportUnavailable, match="did not start"):
        await engine.start()
    goes_on.set()
    await engine.stop()
    told = asyncio.Event()
    asyncio.get_running_loop().call_soon(told.set)  # Behind what the thread has said.
    await told.wait()
    del engine, slow
    gc.collect()
    assert (reached_the_loop, faults) == ([], [])


async def test_what_comes_when_the_thread_ends_is_taken_by_one_of_both(
    faults: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thread and event loop answer the commands that are left, and tell the news, one after the other."""
    engine = UcxxEngine("127.0.0.1", lambda _: None, faults.append)
    alone: list[bool] = []

    class Ended:
        def progress(self) -> None: ...
        def close(self) -> None: ...

    monkeypatch.setattr(engine, "_worker", Ended())
    monkeypatch.setattr(engine, "_poll", Ended(), raising=False)
    engine.do(lambda: alone.append(engine._over_lock.locked()))
    await asyncio.to_thread(engine._shut)
    engine.do(lambda: alone.append(engine._over_lock.locked()))
    assert alone == [True, True]


async def test_a_start_that_takes_too_long_leaves_no_thread(faults: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, shut = threading.Event(), threading.Event()
    monkeypatch.setattr(ucxx_engine, "START_S_MAX", 0.05)
    engine = UcxxEngine("127.0.0.1", lambda _: None, faults.append)

    def slow() -> int:
        assert goes_on.wait(GIVE_UP_S)
        return 1

    def turns() -> None:
        assert engine._ending, "it serves although the agent has gone on without it"

    monkeypatch.setattr(engine, "_open", slow)
    monkeypatch.setattr(engine, "_turn", turns)
    monkeypatch.setattr(engine, "_shut", shut.set)
    with pytest.raises(TransportUnavailable, match="did not start"):
        await engine.start()
    goes_on.set()
    await engine.stop()
    assert shut.is_set()
    assert engine._thread is not None
    assert not engine._thread.is_alive()
    assert faults == []


async def test_a_thread_that_fails_is_a_fault_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    came, told = asyncio.Event(), list[str]()

    def fault(why: str) -> None:
        told.append(why)
        came.set()

    engine = UcxxEngine("127.0.0.1", lambda _: None, fault)

    def fails() -> None:
        raise ArithmeticError("planted")

    monkeypatch.setattr(engine, "_open", lambda: 1)
    monkeypatch.setattr(engine, "_turn", fails)
    monkeypatch.setattr(engine, "_shut", lambda: None)
    assert await engine.start() == 1
    async with asyncio.timeout(GIVE_UP_S):
        await came.wait()
    assert "planted" in told[0]
    await engine.stop()
