"""Whoever waits for the end of writing stays until then, however often it is cancelled."""

import asyncio

import pytest

from tensorhub_agent.runtime.shield import SharedShutdown, wait_shielded


def future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


async def test_it_returns_at_the_end_and_raises_what_the_end_was() -> None:
    end, failed = future(), future()
    end.set_result(None)
    await wait_shielded(end)
    failed.set_exception(ValueError("it went wrong"))
    with pytest.raises(ValueError, match="it went wrong"):
        await wait_shielded(failed)


async def test_a_cancelled_caller_is_kept_until_the_end_and_the_end_is_not_cancelled() -> None:
    end = future()
    hastened: list[bool] = []
    waiting = asyncio.create_task(wait_shielded(end, lambda: hastened.append(True)))
    for times in range(1, 4):
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (waiting.done(), end.done(), len(hastened)) == (False, False, times)
    end.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_an_end_is_begun_once_and_everybody_waits_for_it() -> None:
    begun: list[asyncio.Future[None]] = []

    async def end() -> None:
        begun.append(future())
        await begun[0]

    ending = SharedShutdown(end)
    waiting = [asyncio.create_task(ending.reached()) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    [the_one] = begun
    the_one.set_result(None)
    await asyncio.gather(*waiting)
    await ending.reached()
    assert begun == [the_one]
