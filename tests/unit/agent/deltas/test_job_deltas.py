"""One job's deltas: made of what is digested and then published, kept of what is applied, and of nothing else."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from msgspec.structs import replace

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.core.effects import SaveManifest
from tensorhub_agent.deltas.job_deltas import JobDeltas
from tensorhub_agent.leases.delta_store import DeltaStore
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_agent.primitives.ids import BaseVersion, ShardKey
from tensorhub_agent.storage.segments import SegmentStore, segment_prefix
from tensorhub_agent.storage.shard_store import JobShardStore, StoredShard
from tensorhub_common.layout.layout import TensorEntry, layout_of

KEY: Final = ShardKey("policy", "trainer", 0)
LAYOUT: Final = layout_of([TensorEntry(f"t{n}", "bfloat16", 2, (50_000,), (50_000,), (0,)) for n in range(3)])


@dataclass
class Agent:
    """One job of an agent, with one shard."""

    pool: CopyPool
    place: StoredShard
    store: SegmentStore
    book: DeltaStore = field(default_factory=lambda: DeltaStore(4, 1 << 20))
    deltas: JobDeltas = field(init=False)

    def __post_init__(self) -> None:
        self.deltas = self.job("run-7", is_making=True)

    def job(self, name: str, *, is_making: bool) -> JobDeltas:
        return JobDeltas(name, self.book, self.pool, self.store, lambda: None, is_making=is_making)

    def change(self, seed: int) -> None:
        values = np.frombuffer(self.place.segment.view, np.uint16)
        values[np.random.default_rng(seed).random(len(values)) < 0.01] ^= seed

    async def digest(self) -> bytes:
        return await self.pool.digest(self.place.segment.view, Spans.of(self.place.table)).result()

    def save(self, state: str, digests: bytes = b"", version: int | None = None) -> None:
        root = root_digest(digests) if digests else None
        saved = SaveManifest(key=KEY, state=state, partial=False, version=version, root=root, digests=digests)
        self.deltas.saved(saved, self.place)

    async def publish(self, seed: int) -> str:
        self.save("empty")
        self.change(seed)
        digests = await self.digest()
        self.deltas.digested(KEY, digests)
        self.save("ready", digests, seed)
        await self.deltas._maker.settled()
        return root_digest(digests)


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Agent]:
    store, pool = SegmentStore(tmp_path, segment_prefix("hub1", "a"), 1 << 30), CopyPool(1)
    place = await JobShardStore("run-7", store).make(KEY, 1, LAYOUT, "0" * 64, spot=False, incarnation=1)
    agent = Agent(pool, place, store)
    yield agent
    await agent.deltas.stop()
    pool.close()
    store.close()


async def test_a_reader_is_offered_what_leads_from_what_it_holds_and_of_a_shard_that_is_gone_nothing(
    agent: Agent,
) -> None:
    before = agent.store.total_bytes
    first, second = await agent.publish(1), await agent.publish(2)
    offer = agent.deltas.offer(KEY, first, second, agent.place)
    assert offer is not None
    assert all(offer.patches)
    assert agent.deltas.offer(KEY, second, first, agent.place) is None
    assert agent.deltas.offer(replace(KEY, shard=1), first, second, agent.place) is None
    assert agent.job("run-8", is_making=True).offer(KEY, first, second, agent.place) is None
    agent.deltas.freed(KEY)
    await agent.deltas.stop()
    assert agent.deltas.offer(KEY, first, second, agent.place) is None
    assert agent.store.total_bytes == before


async def test_a_delta_is_coming_as_soon_as_the_publication_is_digested(agent: Agent) -> None:
    """A reader may hear of the version before this agent does."""
    first = await agent.publish(1)
    agent.save("empty")
    agent.change(2)
    digests = await agent.digest()
    second = root_digest(digests)
    assert not agent.deltas.is_coming(KEY, first, second)
    agent.deltas.digested(KEY, digests)
    assert agent.deltas.is_coming(KEY, first, second)
    agent.save("ready", digests, 2)
    assert agent.deltas.is_coming(KEY, first, second)
    await agent.deltas._maker.settled()
    assert not agent.deltas.is_coming(KEY, first, second)


async def test_a_publication_that_fails_is_compared_with_nothing(agent: Agent) -> None:
    first = await agent.publish(1)
    agent.save("empty")
    agent.change(2)
    agent.deltas.digested(KEY, await agent.digest())
    agent.save("empty")
    third = await agent.publish(3)
    assert agent.deltas.offer(KEY, first, third, agent.place) is not None


async def test_what_was_read_and_not_published_here_is_no_reason_for_a_shadow_nor_is_it_where_none_are_made(
    agent: Agent,
) -> None:
    before = agent.store.total_bytes
    agent.save("filling")
    agent.save("ready", await agent.digest(), 1)
    await agent.deltas._maker.settled()
    assert agent.store.total_bytes == before
    agent.deltas = agent.job("run-7", is_making=False)
    await agent.publish(1)
    await agent.publish(2)
    assert (agent.store.total_bytes, agent.book.nbytes) == (before, 0)


async def test_what_was_applied_is_offered_once_the_read_has_ended(agent: Agent) -> None:
    digests = await agent.digest()
    root = root_digest(digests)
    agent.save("filling")
    agent.deltas.applied(KEY, BaseVersion(1, "old"), root, 3, {0: b"a", 2: b"c"})
    agent.deltas.applied(KEY, BaseVersion(1, "old"), root, 3, {1: b""})
    assert agent.deltas.is_coming(KEY, "old", root)
    agent.save("ready", digests, 2)
    assert not agent.deltas.is_coming(KEY, "old", root)
    offer = agent.deltas.offer(KEY, "old", root, agent.place)
    assert offer is not None
    assert list(offer.patches) == [(b"a",), (), (b"c",)]


async def test_of_a_read_that_was_given_up_nothing_more_comes(agent: Agent) -> None:
    """A staged shard keeps its old version: it reads from that again, and the first read brings no more."""
    agent.deltas.applied(KEY, BaseVersion(1, "old"), "second", 3, {0: b"a"})
    agent.deltas.applied(KEY, BaseVersion(1, "old"), "third", 3, {0: b"b"})
    assert not agent.deltas.is_coming(KEY, "old", "second")
    assert agent.deltas.is_coming(KEY, "old", "third")
