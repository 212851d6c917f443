"""Digests of what is still being copied: right where the publication goes by them, and not used in any other case."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.bounds import WAIT_S

from tensorhub_agent.compute.pool import CopyPool, CopyPoolFull
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.jobs.early_digests import CopyName, EarlyDigests
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.layout.layout import TensorEntry, layout_of, pieces, segment_bytes
from tensorhub_common.runtime.supervision import Supervisor

KEY, OTHER = ShardKey("policy", "trainer", 0), ShardKey("policy", "trainer", 1)
SIZES = (3000, 0, 9 << 20, 257, 1)
LAYOUT = layout_of([TensorEntry(f"t{n}", "uint8", 1, (size,), (size,), (0,)) for n, size in enumerate(SIZES)])
TABLE, NBYTES = pieces(LAYOUT), segment_bytes(LAYOUT)
MINE = CopyName(session=1, copy=1)


class Publishing:
    """A shard into which a worker copies, piece by piece of what it will publish."""

    def __init__(self) -> None:
        self.given = bytes(range(256)) * (NBYTES // 256 + 1)
        self.stored = SimpleNamespace(segment=self._segment(), table=TABLE)
        self.pool = CopyPool(2)
        self.work = Supervisor("test")
        store: Any = SimpleNamespace(shards={KEY: self.stored})
        self.early = EarlyDigests(store, self.pool, self.work)

    def _segment(self) -> Any:
        return SimpleNamespace(view=memoryview(bytearray(NBYTES)))

    def copy(self, nbytes: int, name: CopyName = MINE, key: ShardKey = KEY) -> None:
        """Have the first bytes there, and say it."""
        self.stored.segment.view[:nbytes] = self.given[:nbytes]
        self.early.came(key, name, nbytes)

    def replace(self) -> None:
        """Have the shard in other memory."""
        self.stored.segment = self._segment()

    async def hashed(self) -> bytes:
        """Return what is right."""
        return await self.pool.digest(self.stored.segment.view, Spans.of(TABLE)).result()

    async def published(self, name: CopyName | None = MINE) -> bytes | None:
        self.early.called(KEY, name)
        async with asyncio.timeout(WAIT_S):
            return await self.early.of(KEY)

    async def settle(self) -> None:
        """Wait until nothing is hashed."""
        async with asyncio.timeout(WAIT_S):
            while tasks := [copy.hashing for copy in self.early._copies.values() if copy.hashing is not None]:
                await asyncio.wait(tasks)

    async def close(self) -> None:
        await self.work.close()
        self.pool.close()


@given(st.lists(st.tuples(st.integers(0, NBYTES + 5), st.booleans()), max_size=6))
def test_however_a_copy_is_told_the_digests_are_those_of_the_whole(told: list[tuple[int, bool]]) -> None:
    """Frames may be few, equal or out of order, with pauses between them; the last one tells of all."""

    async def run() -> None:
        scene = Publishing()
        try:
            for nbytes, pauses in told:
                scene.copy(min(nbytes, NBYTES))
                if pauses:
                    await scene.settle()
            scene.copy(NBYTES)
            assert await scene.published() == await scene.hashed()
            assert await scene.published() is None, "they count once"
        finally:
            await scene.close()

    asyncio.run(run())


@pytest.mark.parametrize("case", ["another copy", "another connection", "no copy", "a part", "other memory", "a read"])
async def test_in_any_other_case_there_are_none(case: str) -> None:
    scene = Publishing()
    try:
        scene.copy(NBYTES // 2 if case == "a part" else NBYTES)
        await scene.settle()
        name: CopyName | None = MINE
        match case:
            case "another copy":
                name = CopyName(session=1, copy=2)
            case "another connection":
                name = CopyName(session=2, copy=1)
            case "no copy":
                name = None
            case "other memory":
                scene.replace()
            case "a read":
                scene.early.called(KEY, None)
        assert await scene.published(name) is None
    finally:
        await scene.close()


async def test_a_copy_that_was_given_up_leaves_nothing_to_the_next() -> None:
    scene = Publishing()
    try:
        scene.copy(NBYTES)
        await scene.settle()
        scene.given = bytes(reversed(scene.given))
        again = CopyName(session=1, copy=2)
        scene.copy(5 << 20, again)
        scene.copy(NBYTES, again)
        assert await scene.published(again) == await scene.hashed()
        scene.copy(NBYTES, again)
        scene.early.came(KEY, MINE, NBYTES)
        assert await scene.published(again) is None, "a late word of the first has come between"
    finally:
        await scene.close()


async def test_a_publication_waits_for_what_is_being_hashed_and_a_dropped_copy_is_hashed_no_further() -> None:
    scene = Publishing()
    try:
        scene.copy(NBYTES)
        assert await scene.published() == await scene.hashed()
        scene.copy(4 << 20)
        hashing = scene.early._copies[KEY].hashing
        assert hashing is not None
        scene.copy(NBYTES)
        copy = scene.early._copies[KEY]
        scene.early.drop(KEY)
        await asyncio.wait_for(hashing, WAIT_S)
        assert copy.hashed < len(TABLE)
    finally:
        await scene.close()


async def test_where_the_pool_is_full_the_memory_is_hashed_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Publishing()

    def full(*_: object) -> None:
        raise CopyPoolFull("4096 copies are under way already")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(scene.pool, "digest", full)
            scene.copy(NBYTES)
            await scene.settle()
        assert await scene.published() is None
    finally:
        await scene.close()


async def test_what_is_told_of_a_shard_that_is_gone_is_left_alone() -> None:
    scene = Publishing()
    try:
        scene.copy(NBYTES, key=OTHER)
        assert scene.early._copies == {}
        scene.copy(NBYTES)
        scene.early.drop(KEY)
        assert await scene.published() is None
    finally:
        await scene.close()
