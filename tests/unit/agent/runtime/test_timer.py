"""An alarm under both event loops: it rings at the earliest moment, once, and takes moments that have come already."""

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from tensorhub_agent.runtime.timer import CoalescingTimer
from tensorhub_common.runtime.supervision import Supervisor

RING_S = 60.0


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize(
    ("moments", "earliest_s"), [((3000.0, None, 0.05, 2000.0), 0.05), ((0.0, 0.0001, -1.0, 1.0), -1.0)]
)
def test_it_rings_once_at_the_earliest_moment(
    new_loop: Callable[[], asyncio.AbstractEventLoop], moments: tuple[float | None, ...], earliest_s: float
) -> None:
    """It can be asked again while a moment that has come has not rung."""

    async def play() -> None:
        loop = asyncio.get_running_loop()
        rung, rang = list[float](), asyncio.Event()

        def ring() -> None:
            rung.append(loop.time())
            rang.set()

        alarm = CoalescingTimer(Supervisor("test"), ring)
        begin = loop.time()
        for after in moments:
            alarm.set(None if after is None else begin + after)
        async with asyncio.timeout(RING_S):
            await rang.wait()
        assert len(rung) == 1
        # A loop may count whole milliseconds.
        assert rung[0] >= begin + earliest_s - 0.001
        alarm.set(loop.time() + 0.01)
        alarm.cancel()
        await asyncio.sleep(0.03)
        assert len(rung) == 1

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(play())
