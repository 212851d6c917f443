"""What the tests of a session begin with: shards at a fake agent, and faults at a chosen frame."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import torch
from tests.unit.client.fake_agent import FakeAgent, FakeWorker

import tensorhub
from tensorhub import AsyncHub, AsyncShard, TensorSpec
from tensorhub_common.protocol import worker as w

WAIT_S = 60.0


async def trainer(hub: AsyncHub, **tensors: torch.Tensor) -> AsyncShard:
    return await hub.register("policy", tensors or {"w": torch.ones(4)}, replica="trainer")


async def engine(hub: AsyncHub) -> AsyncShard:
    return await hub.register("policy", {"w": TensorSpec((4,), "float32")}, replica="rollout")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (the other side is a thread, and has no event to wait for)
            await asyncio.sleep(0.005)


def wait(condition: Callable[[], bool]) -> None:
    """Wait as `until` does, in a thread that has no event loop."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@asynccontextmanager
async def restarted(agent: FakeAgent, hub: AsyncHub) -> AsyncIterator[AsyncHub]:
    """End a worker without a release, and yield its successor's hub."""
    await hub._session.close()
    again = await tensorhub.connect_async(agent=agent.path)
    await until(lambda: all(shard.owner is None for shard in agent.shards.values()))
    try:
        yield again
    finally:
        agent.hook = None
        await again._session.close()


class Held:
    """Frames of one kind, kept from the agent until `let_go`."""

    def __init__(self, agent: FakeAgent, kind: type[w.Frame]) -> None:
        self._agent, self._kind = agent, kind
        self.frames: list[tuple[FakeWorker, Any]] = []
        agent.hook = self._hook

    def _hook(self, worker: FakeWorker, frame: Any) -> bool:
        if isinstance(frame, self._kind):
            self.frames.append((worker, frame))
            return True
        return False

    async def first(self) -> None:
        """Wait until there is one."""
        await until(lambda: bool(self.frames))

    def let_go(self) -> None:
        """Let the agent have them now, and all later ones."""
        self._agent.hook = None
        for worker, frame in self.frames:
            self._agent.answer(worker, frame)


def breaking(agent: FakeAgent, kind: type[w.Frame], *, after: bool) -> None:
    """Let the connection break at the first frame of this kind: `after` the agent did what it asks, or before."""

    def hook(worker: FakeWorker, frame: Any) -> bool:
        if not isinstance(frame, kind):
            return False
        agent.hook = None
        if after:
            worker.muted = True
            agent.answer(worker, frame)
        agent.drop()
        return True

    agent.hook = hook


def refusing(agent: FakeAgent, kind: type[w.Frame], error: type[Exception], times: int) -> None:
    """Let the agent refuse so many frames of this kind."""
    left = times

    def hook(worker: FakeWorker, frame: Any) -> bool:
        nonlocal left
        if not isinstance(frame, kind) or not left:
            return False
        left -= 1
        worker.tell(w.Failed(call=frame.call, error=error.__name__, message="not now"))  # type: ignore[attr-defined]
        return True

    agent.hook = hook
