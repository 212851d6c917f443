"""Who waits for a job's calls: what they are told while a call is under way."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub_agent.core.effects import CallRead
from tensorhub_agent.core.operations.read import ReadOperation
from tensorhub_agent.jobs import pending_calls
from tensorhub_agent.jobs.pending_calls import PendingCall, PendingCalls
from tensorhub_agent.jobs.read_counts import ReadCounts
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.protocol.worker import Progress
from tensorhub_common.runtime.supervision import Supervisor

KEY = ShardKey("policy", "engine", 0)
TOTAL = 100


class Read(ReadOperation):
    """A read that is as far as it is told, look after look, and then ends."""

    def __init__(self, core: Any, call: int, far: list[int]) -> None:
        self.core = core
        self.call = CallRead(call=call, session=1, deadline=1e9, want="latest", patience=1e9)
        self._far = iter(far)
        self._last = far[-1]

    @property
    def transfer(self) -> Any:
        return SimpleNamespace(done_bytes=self.done_bytes)

    def done_bytes(self) -> int:
        done = next(self._far)
        if done == self._last:
            self.core.operation = None
        return done


async def test_progress_is_told_when_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that waits is told of once, however often it is looked at."""
    monkeypatch.setattr(pending_calls, "PROGRESS_S", 0.0)
    told: list[Any] = []
    core = SimpleNamespace(operation=None, spec=SimpleNamespace(nbytes=(TOTAL,)))
    shards: Any = {KEY: core}
    store: Any = None
    worker: Any = SimpleNamespace(tell=told.append)
    work = Supervisor("test")
    waits = PendingCalls(shards, store, work, ReadCounts())
    call = waits.begin(PendingCall(worker, call=7, handle=1, about=KEY, reads=True))
    core.operation = Read(core, call, [0, 0, 0, 40, 40, 40, 40, TOTAL])
    waits.show_progress()
    assert waits._progress is not None
    async with asyncio.timeout(60):
        await waits._progress
    await work.close()
    assert told == [Progress(call=7, done_bytes=done, total_bytes=TOTAL) for done in (0, 40, TOTAL)]
