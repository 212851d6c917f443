"""Deltas at the publisher: made after the publication, from memory that was published all the while, and never else."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.compute.spans import Spans
from tensorhub_agent.deltas.builder import DeltaBuilder, PublishedMemory
from tensorhub_agent.encodings.patch import apply, make
from tensorhub_agent.leases.delta_store import DeltaStore
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_agent.storage.segments import Segment, SegmentStore, segment_prefix
from tensorhub_common.layout.layout import PieceTable, TensorEntry, layout_of, pieces, segment_bytes

MIB = 1024 * 1024
SHARD = "shard"


@dataclass
class Publisher:
    """One shard that publishes, and the maker that follows it."""

    store: SegmentStore
    pool: CopyPool
    table: PieceTable
    segment: Segment
    made: int = 0
    versions: dict[str, bytes] = field(default_factory=dict)
    maker: DeltaBuilder = field(init=False)
    book: DeltaStore = field(default_factory=lambda: DeltaStore(3, 64 * MIB))

    def __post_init__(self) -> None:
        self.chance = np.random.default_rng(1)
        self.maker = DeltaBuilder(self.pool, self.store, self.book, self._count)
        self.segment.view[:] = self.chance.bytes(self.segment.nbytes)

    def _count(self) -> None:
        self.made += 1

    def change(self, share: float, first: int = 0) -> None:
        values = np.frombuffer(self.segment.view, np.uint16)[first:]
        which = self.chance.random(len(values)) < share
        values[which] ^= self.chance.integers(1, 2**16, int(which.sum()), dtype=np.uint16)

    async def publish(self) -> str:
        digests = await self.pool.digest(self.segment.view, Spans.of(self.table)).result()
        root = root_digest(digests)
        self.versions[root] = bytes(self.segment.view)
        self.maker.published(SHARD, PublishedMemory(self.segment, self.table, root, digests))
        return root

    async def publish_and_settle(self) -> str:
        root = await self.publish()
        await self.maker.settled()
        return root

    async def next(self, share: float = 0.01, first: int = 0) -> str:
        """Take the memory back, change some of it, and publish that."""
        self.unpublish()
        self.change(share, first)
        return await self.publish_and_settle()

    def unpublish(self) -> None:
        self.maker.withdrawn(SHARD)

    @contextmanager
    def meddled(self, at: int) -> Iterator[None]:
        """Within this the trainer takes its memory back, and writes, when the maker's chore of this number begins."""
        background, numbers = self.pool.background, itertools.count(1)

        async def meddling(work: Callable[[], None]) -> None:
            if next(numbers) == at:
                self.unpublish()
                self.change(0.5)
            await background(work)

        self.pool.background = meddling  # type: ignore[method-assign]
        yield
        self.pool.background = background  # type: ignore[method-assign]

    def brought(self, base: str, root: str) -> tuple[int, int]:
        """Apply what is offered to the older bytes; return how many pieces had no patch, and the patches' bytes."""
        offer = self.book.offer(SHARD, base, root, self.table.nbytes)
        assert offer is not None
        memory, new = bytearray(self.versions[base]), self.versions[root]
        without = nbytes = 0
        for piece, steps in enumerate(offer.patches):
            at, size = self.table.at[piece], self.table.nbytes[piece]
            unit = PublishedMemory(self.segment, self.table, "", b"").unit(piece)
            if steps is None:
                without += 1
                memory[at : at + size] = new[at : at + size]
            else:
                nbytes += sum(map(len, steps))
                apply(b"".join(steps), memoryview(memory)[at : at + size], unit)
        for at, size in zip(self.table.at, self.table.nbytes, strict=True):
            assert memory[at : at + size] == new[at : at + size]
        return without, nbytes


@pytest.fixture
async def publisher(tmp_path: Path) -> AsyncIterator[Publisher]:
    layout = layout_of(
        [
            TensorEntry("large", "bfloat16", 2, (5 * MIB,), (5 * MIB,), (0,)),
            TensorEntry("norm", "float32", 4, (100,), (100,), (0,)),
            *(TensorEntry(f"tiny.{n}", "bfloat16", 2, (3,), (3,), (0,)) for n in range(600)),
        ]
    )
    store, pool = SegmentStore(tmp_path, segment_prefix("hub1", "a"), 1 << 30), CopyPool(2)
    publisher = Publisher(store, pool, pieces(layout), store.create(segment_bytes(layout)))
    yield publisher
    await publisher.maker.stop()
    assert store.total_bytes == publisher.segment.file_bytes, "a shadow was left behind"
    publisher.book.check()
    pool.close()
    store.close()


async def test_a_delta_leads_from_each_publication_to_the_next_and_a_chain_further(
    publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    roots = [await publisher.publish_and_settle(), *[await publisher.next() for _ in range(3)]]
    payload = sum(publisher.table.nbytes)
    for base, root in itertools.pairwise(roots):
        without, nbytes = publisher.brought(base, root)
        # Of tensors of three values the patch would be longer than they are.
        assert without <= 600 * 0.05
        assert nbytes <= 0.016 * payload
    assert publisher.brought(roots[0], roots[3])[1] <= 3 * 0.016 * payload
    assert publisher.made == 3
    assert caplog.records == [], "what goes well is no line for an operator"


@pytest.mark.parametrize(("share", "at"), [(0.01, 3), (1.0, 2)])
async def test_what_is_taken_back_meanwhile_does_not_count_and_does_no_harm_later(
    publisher: Publisher, share: float, at: int
) -> None:
    """The trainer writes while a piece is compared or copied: the delta has a hole, and the next ones are right."""
    first = await publisher.publish_and_settle()
    publisher.unpublish()
    publisher.change(share)
    with publisher.meddled(at=at):
        second = await publisher.publish_and_settle()
    if share < 1:
        assert publisher.brought(first, second)[0] > 0
    third = await publisher.publish_and_settle()
    assert publisher.brought(second, third)[0] > 0
    fourth = await publisher.next()
    assert publisher.brought(second, fourth)[0] > 0
    assert publisher.brought(third, fourth)[0] <= 600 * 0.05


async def test_what_did_not_change_costs_nothing(publisher: Publisher) -> None:
    first = await publisher.publish_and_settle()
    assert publisher.book.offer(SHARD, "before", first, publisher.table.nbytes) is None
    assert await publisher.next(0) == first
    assert publisher.made == 0
    second = await publisher.next(first=4 * MIB)
    offer = publisher.book.offer(SHARD, first, second, publisher.table.nbytes)
    assert offer is not None
    assert offer.patches[:2] == [(), ()]


async def test_publications_that_follow_fast_are_worked_on_one_after_another(publisher: Publisher) -> None:
    roots = []
    for _ in range(5):
        roots.append(await publisher.publish())
        await asyncio.sleep(0)
        publisher.unpublish()
        publisher.change(0.01)
    roots.append(await publisher.publish_and_settle())
    roots.append(await publisher.next())
    assert publisher.brought(roots[-2], roots[-1])[0] <= 600 * 0.05


async def test_without_room_for_a_shadow_nothing_is_made_and_once_there_is_room_deltas_are(
    publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    room, publisher.store.bytes_max = publisher.store.bytes_max, publisher.store.total_bytes
    for _ in range(3):
        await publisher.next()
    assert publisher.made == 0
    assert len([line for line in caplog.messages if "no deltas are made" in line]) == 1
    publisher.maker.freed(SHARD)
    publisher.store.bytes_max = room
    roots = [await publisher.next() for _ in range(2)]
    assert publisher.brought(roots[0], roots[1])[0] <= 600 * 0.05


async def test_a_delta_that_has_no_room_is_not_made_to_its_end_and_the_next_is_right(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compared: list[int] = []

    def counted(old: memoryview, new: memoryview, unit: int) -> bytes | None:
        compared.append(len(new))
        return make(old, new, unit)

    monkeypatch.setattr("tensorhub_agent.deltas.builder.make", counted)
    publisher.book = publisher.maker._book = DeltaStore(3, 100_000)
    first = await publisher.publish_and_settle()
    second = await publisher.next(0.1)
    assert publisher.book.offer(SHARD, first, second, publisher.table.nbytes) is None
    assert len(compared) < len(publisher.table) / 2
    assert len([line for line in caplog.messages if "TENSORHUB_DELTA_BYTES" in line]) == 1
    third = await publisher.next(0.001)
    assert publisher.brought(second, third)[0] <= 600 * 0.05


async def test_a_shard_that_is_gone_leaves_nothing(publisher: Publisher) -> None:
    first = await publisher.publish_and_settle()
    publisher.unpublish()
    publisher.change(0.01)
    second = await publisher.publish()
    publisher.maker.freed(SHARD)
    await publisher.maker.stop()
    assert publisher.book.offer(SHARD, first, second, publisher.table.nbytes) is None
    assert publisher.book.nbytes == 0
