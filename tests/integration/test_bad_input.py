"""What a caller gets wrong is refused with one line that says what to do, and nothing changes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
import torch
from tests.kit.hubs import Pair, RunningHub
from tests.kit.tensors import assert_same_bytes
from tests.kit.waiting import until_answer

from tensorhub import (
    AsyncShard,
    LayoutMismatch,
    NotPublished,
    RoundTimeout,
    TensorSpec,
    VersionConflict,
    VersionUnavailable,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")
WEIGHTS = {"w": torch.arange(100.0), "b": torch.ones(3)}
PART = TensorSpec((50,), torch.float32, (100,), (0,))
CLASH = TensorSpec((50,), torch.float32, (101,), (50,))


@dataclass(frozen=True)
class Scene(Pair):
    """A model with version 5 published by "trainer" and held by "engine"; "other" has other bytes."""

    hub: RunningHub
    other: AsyncShard

    @asynccontextmanager
    async def refused(self, error: type[Exception], *words: str) -> AsyncIterator[None]:
        before = await self.hub.catalog(self.job)
        with pytest.raises(error) as raised:
            yield
        message = str(raised.value)
        assert "\n" not in message
        for word in words:
            assert word in message, message
        # A shard that its siblings refuse is released after its caller got the error.
        await until_answer(lambda: self.hub.catalog(self.job), lambda found: found == before)
        assert_same_bytes(self.trainer.tensors, WEIGHTS)
        assert_same_bytes(self.engine.tensors, WEIGHTS)


@pytest_asyncio.fixture(loop_scope="session")
async def scene(hub: RunningHub) -> AsyncIterator[Scene]:
    """The scene; at the end the next version goes its way."""
    async with hub.pair(WEIGHTS) as it:
        await it.trainer.publish(5)
        await it.engine.replicate()
        other = await it.there.register("m", {"w": torch.zeros(100), "b": torch.ones(3)}, replica="other")
        yield Scene(it.job, it.here, it.there, it.trainer, it.engine, hub, other)
        last = max(each.version for each in await it.here.versions("m"))
        assert await it.step(WEIGHTS) == last + 1
        assert await it.engine.update() == last + 1


Call = Callable[[Scene], Awaitable[object]]


def registers(given: Any, *, model: Any = "m", replica: Any = "r", **options: Any) -> Call:
    return lambda it: it.here.register(model, given, replica=replica, **options)


REFUSED: list[tuple[str, type[Exception], tuple[str, ...], Call]] = [
    (
        "a version without a holder",
        VersionUnavailable,
        ("version 6", "'m'"),
        lambda it: it.engine.replicate(6, timeout_s=0.3),
    ),
    ("a negative version", VersionUnavailable, ("out of range",), lambda it: it.engine.replicate(-1)),
    ("a second version at once", VersionConflict, ("unpublish 5 first",), lambda it: it.trainer.publish(6)),
    ("a version past the range", VersionConflict, ("out of range",), lambda it: it.trainer.publish(2**53)),
    (
        "an older version",
        VersionConflict,
        ("not newer than the last published one, 5", "6 or"),
        lambda it: it.other.publish(4),
    ),
    ("other bytes of a version", VersionConflict, ("with other bytes",), lambda it: it.other.publish(5)),
    ("an unpublish of nothing", NotPublished, (), lambda it: it.other.unpublish()),
    ("shard 2 of 2", LayoutMismatch, ("give",), registers(WEIGHTS, shard=2, shards=2)),
    ("a list as a tensor", LayoutMismatch, ("'t'",), registers({"t": [1, 2, 3]})),
]


@pytest.mark.parametrize(
    ("error", "words", "call"), [row[1:] for row in REFUSED], ids=[row[0].replace(" ", "-") for row in REFUSED]
)
async def test_a_call_is_refused(scene: Scene, error: type[Exception], words: tuple[str, ...], call: Call) -> None:
    async with scene.refused(error, *words):
        await call(scene)


async def test_layouts_that_do_not_fit(scene: Scene) -> None:
    async with scene.hub.connected(scene.job, agents=1) as (again,):
        half = await again.register("m", {"w": PART}, replica="halves", shard=0, shards=2)
        async with scene.refused(LayoutMismatch, "'w'"):
            await scene.there.register("m", {"w": CLASH}, replica="halves", shard=1, shards=2)
        async with scene.refused(LayoutMismatch, "shards=2"):
            await scene.there.register("m", {"w": PART}, replica="halves", shard=1, shards=3)
        await half.release()
    bytes_before = {"w": torch.full((99,), 3.0), "b": torch.ones(3)}
    short = await scene.there.register("m", bytes_before, replica="short")
    async with scene.refused(LayoutMismatch, "'w'"):
        await short.replicate()
    assert_same_bytes(short.tensors, bytes_before)


async def test_a_shard_that_never_comes_is_named(scene: Scene) -> None:
    three = [await scene.here.register("n", {"w": torch.ones(4)}, replica="four", shard=n, shards=4) for n in range(3)]
    for call in (AsyncShard.publish, AsyncShard.replicate):
        failed = await asyncio.gather(*(call(shard, timeout_s=1) for shard in three), return_exceptions=True)
        assert [type(error) for error in failed] == [RoundTimeout] * 3, failed
        assert all("shards [3]" in str(error) for error in failed), failed
