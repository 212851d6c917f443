"""One job's deltas: made of what is digested and then published, kept of what is applied, and of nothing else."""

import asyncio
import ctypes
import gc
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
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
from tensorhub_agent.deltas.shadow import Patches, PublishedMemory, Shadow, follow, patches_to
from tensorhub_agent.encodings.patch import apply
from tensorhub_agent.leases.delta_store import DeltaStore, PatchOffer
from tensorhub_agent.primitives.digests import root_digest
from tensorhub_agent.primitives.ids import BaseVersion, ShardKey
from tensorhub_agent.storage.device_segments import DeviceStores
from tensorhub_agent.storage.segments import SegmentStore, segment_prefix
from tensorhub_agent.storage.shard_store import JobShardStore, StoredShard
from tensorhub_common.devices.device import DeviceMemoryExhausted
from tensorhub_common.devices.fake import FakeEvent, FakeMemory, fake_device
from tensorhub_common.layout.layout import TensorEntry, layout_of

MIB = 1024 * 1024
KEY: Final = ShardKey("policy", "trainer", 0)
LAYOUT: Final = layout_of(
    [
        TensorEntry("large", "bfloat16", 2, (5 * MIB,), (5 * MIB,), (0,)),
        TensorEntry("norm", "float32", 4, (100,), (100,), (0,)),
        *(TensorEntry(f"tiny.{n}", "bfloat16", 2, (3,), (3,), (0,)) for n in range(600)),
    ]
)


@dataclass
class Agent:
    """One job of an agent, with one shard that publishes."""

    pool: CopyPool
    place: StoredShard
    store: SegmentStore
    made: int = 0
    versions: dict[str, bytes] = field(default_factory=dict)
    book: DeltaStore = field(default_factory=lambda: DeltaStore(3, 64 * MIB))
    deltas: JobDeltas = field(init=False)

    def __post_init__(self) -> None:
        self.chance = np.random.default_rng(1)
        self.deltas = self.job("run-7")
        self.memory[:] = self.chance.bytes(self.place.segment.nbytes)

    @property
    def memory(self) -> memoryview:
        """What the trainer writes: the shard's memory, of a fake GPU too."""
        view = self.place.segment.view
        if isinstance(view, memoryview):
            return view
        return memoryview((ctypes.c_ubyte * len(view)).from_address(view.address)).cast("B")

    def job(self, name: str, *, is_making: bool = True) -> JobDeltas:
        return JobDeltas(name, self.book, self.pool, self.store, self._count, is_making=is_making)

    def _count(self) -> None:
        self.made += 1

    def change(self, share: float, first: int = 0) -> None:
        values = np.frombuffer(self.memory, np.uint16)[first:]
        flipped = self.chance.integers(1, 2**16, len(values), dtype=np.uint16)
        # Small integers are drawn ten times as fast as what `random` draws.
        flipped[self.chance.integers(0, 2**16, len(values), dtype=np.uint16) >= share * 2**16] = 0
        values ^= flipped

    async def digest(self) -> bytes:
        return await self.pool.digest(self.place.segment.view, Spans.of(self.place.table)).result()

    def save(self, state: str, digests: bytes = b"") -> None:
        root = root_digest(digests) if digests else None
        saved = SaveManifest(
            key=KEY, state=state, partial=False, version=1 if digests else None, root=root, digests=digests
        )
        self.deltas.saved(saved, self.place)

    def applied(self, root: str, patches: dict[int, bytes]) -> None:
        self.deltas.applied(KEY, BaseVersion(1, "old"), root, len(self.place.table), patches)

    def offer(self, base: str, root: str) -> PatchOffer | None:
        return self.deltas.offer(KEY, base, root, self.place)

    async def publish(self) -> str:
        digests = await self.digest()
        root = root_digest(digests)
        self.versions[root] = bytes(self.memory)
        self.deltas.digested(KEY, digests)
        self.save("ready", digests)
        return root

    async def publish_and_settle(self) -> str:
        root = await self.publish()
        await self.deltas._maker.settled()
        return root

    async def next(self, share: float = 0.01, first: int = 0) -> str:
        """Take the memory back, change some of it, and publish that."""
        self.save("empty")
        self.change(share, first)
        return await self.publish_and_settle()

    @contextmanager
    def meddled(self, at: int, share: float = 0.5) -> Iterator[None]:
        """Within this the trainer takes its memory back, and writes, when the maker's chore of this number begins."""
        background, numbers = self.pool.background, itertools.count(1)

        async def meddling(work: Callable[[], None]) -> None:
            if next(numbers) == at:
                self.save("empty")
                self.change(share)
            await background(work)

        self.pool.background = meddling  # type: ignore[method-assign]
        yield
        self.pool.background = background  # type: ignore[method-assign]

    def brought(self, base: str, root: str) -> tuple[int, int]:
        """Apply what is offered to the older bytes; return how many pieces had no patch, and the patches' bytes."""
        table, offer = self.place.table, self.offer(base, root)
        assert offer is not None
        memory, new = bytearray(self.versions[base]), self.versions[root]
        without = nbytes = 0
        for piece, steps in enumerate(offer.patches):
            at, size = table.at[piece], table.nbytes[piece]
            if steps is None:
                without += 1
                memory[at : at + size] = new[at : at + size]
            else:
                nbytes += sum(map(len, steps))
                apply(b"".join(steps), memoryview(memory)[at : at + size], LAYOUT.tensors[table.tensor[piece]].itemsize)
        # Not compared in an assertion: pytest would look for minutes for how the bytes of a planted bug differ.
        wrong = [
            at for at, size in zip(table.at, table.nbytes, strict=True) if memory[at : at + size] != new[at : at + size]
        ]
        assert not wrong
        return without, nbytes


@pytest.fixture(params=["", "GPU-fake-0"], ids=["host", "device"])
async def agent(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Agent]:
    store, pool = SegmentStore(tmp_path, segment_prefix("hub1", "a"), 1 << 30), CopyPool(2)
    devices = DeviceStores("hub1.a.", 1 << 30)
    shards = JobShardStore("run-7", store, devices=devices)
    place = await shards.make(KEY, 1, LAYOUT, "0" * 64, spot=False, incarnation=1, device=request.param)
    before, agent = store.account.total_bytes, Agent(pool, place, store)
    yield agent
    await agent.deltas.stop()
    assert store.account.total_bytes == before, "a shadow was left behind"
    agent.book.check()
    pool.close()
    store.close()
    devices.close()


async def test_a_delta_leads_from_each_publication_to_the_next_and_a_chain_further(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    roots = [await agent.publish_and_settle(), *[await agent.next() for _ in range(3)]]
    payload = sum(agent.place.table.nbytes)
    for base, root in itertools.pairwise(roots):
        without, nbytes = agent.brought(base, root)
        # Of tensors of three values the patch would be longer than they are.
        assert without <= 600 * 0.05
        assert nbytes <= 0.016 * payload
    assert agent.brought(roots[0], roots[3])[1] <= 3 * 0.016 * payload
    assert agent.made == 3
    assert caplog.records == [], "what goes well is no line for an operator"


@pytest.mark.parametrize(("share", "at"), [(0.01, 3), (1.0, 2)])
async def test_what_is_taken_back_meanwhile_does_not_count_and_does_no_harm_later(
    agent: Agent, share: float, at: int
) -> None:
    """The trainer writes while a piece is compared or copied: the delta has a hole, and the next ones are right."""
    first = await agent.publish_and_settle()
    agent.save("empty")
    agent.change(share)
    with agent.meddled(at=at):
        second = await agent.publish_and_settle()
    if share < 1:
        assert agent.brought(first, second)[0] > 0
    third = await agent.publish_and_settle()
    assert agent.brought(second, third)[0] > 0
    fourth = await agent.next()
    assert agent.brought(second, fourth)[0] > 0
    assert agent.brought(third, fourth)[0] <= 600 * 0.05


@pytest.mark.parametrize("agent", [""], indirect=True)
async def test_what_was_compared_before_the_memory_was_taken_back_is_known_in_the_shadow(agent: Agent) -> None:
    """Its patch leads there, whatever stands in the memory when the shadow follows."""
    await agent.publish_and_settle()
    agent.save("empty")
    agent.change(0.01)
    with agent.meddled(at=2, share=0.01):
        second = await agent.publish_and_settle()
    third = await agent.publish_and_settle()
    offer = agent.offer(second, third)
    assert offer is not None
    assert offer.patches[0] is not None
    assert offer.patches[1] is None
    agent.brought(second, third)


async def test_what_did_not_change_costs_nothing(agent: Agent) -> None:
    first = await agent.publish_and_settle()
    assert agent.offer("before", first) is None
    assert await agent.next(0) == first
    assert agent.made == 0
    second = await agent.next(first=4 * MIB)
    offer = agent.offer(first, second)
    assert offer is not None
    assert offer.patches[:2] == [(), ()]


async def test_publications_that_follow_fast_are_worked_on_one_after_another(agent: Agent) -> None:
    roots = []
    for _ in range(5):
        roots.append(await agent.publish())
        await asyncio.sleep(0)
        agent.save("empty")
        agent.change(0.01)
    roots.append(await agent.publish_and_settle())
    roots.append(await agent.next())
    assert agent.brought(roots[-2], roots[-1])[0] <= 600 * 0.05


async def test_without_room_for_a_shadow_nothing_is_made_and_once_there_is_room_deltas_are(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    room, agent.store.account.bytes_max = agent.store.account.bytes_max, agent.store.account.total_bytes
    for _ in range(3):
        await agent.next()
    assert agent.made == 0
    assert len([line for line in caplog.messages if "no deltas are made" in line]) == 1
    agent.deltas.freed(KEY)
    agent.store.account.bytes_max = room
    roots = [await agent.next() for _ in range(2)]
    assert agent.brought(roots[0], roots[1])[0] <= 600 * 0.05


async def test_a_delta_that_has_no_room_is_not_made_to_its_end_and_the_next_is_right(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compared: list[int] = []

    def counted(publication: PublishedMemory, shadow: Shadow, pieces: Sequence[int]) -> Patches:
        compared.extend(pieces)
        return patches_to(publication, shadow, pieces)

    monkeypatch.setattr("tensorhub_agent.deltas.builder.patches_to", counted)
    agent.book = DeltaStore(3, 100_000)
    agent.deltas = agent.job("run-7")
    first = await agent.publish_and_settle()
    second = await agent.next(0.1)
    assert compared
    assert agent.offer(first, second) is None
    assert len(compared) < len(agent.place.table) / 2
    assert len([line for line in caplog.messages if "TENSORHUB_DELTA_BYTES" in line]) == 1
    third = await agent.next(0.001)
    assert agent.brought(second, third)[0] <= 600 * 0.05


async def test_a_reader_is_offered_what_leads_from_what_it_holds_and_of_a_shard_that_is_gone_nothing(
    agent: Agent,
) -> None:
    before = agent.store.account.total_bytes
    first, second = await agent.publish_and_settle(), await agent.next()
    assert agent.offer(first, second) is not None
    assert agent.offer(second, first) is None
    assert agent.deltas.offer(replace(KEY, shard=1), first, second, agent.place) is None
    assert agent.job("run-8").offer(KEY, first, second, agent.place) is None
    agent.save("empty")
    agent.change(0.01)
    third = await agent.publish()
    agent.deltas.freed(KEY)
    assert agent.offer(first, second) is None
    await agent.deltas.stop()
    assert (agent.offer(first, second), agent.offer(second, third)) == (None, None)
    assert (agent.book.nbytes, agent.store.account.total_bytes) == (0, before)


async def test_a_delta_is_coming_as_soon_as_the_publication_is_digested(agent: Agent) -> None:
    """A reader may hear of the version before this agent does."""
    first = await agent.publish_and_settle()
    agent.save("empty")
    agent.change(0.01)
    digests = await agent.digest()
    second = root_digest(digests)
    assert not agent.deltas.is_coming(KEY, first, second)
    agent.deltas.digested(KEY, digests)
    assert agent.deltas.is_coming(KEY, first, second)
    agent.save("ready", digests)
    assert agent.deltas.is_coming(KEY, first, second)
    await agent.deltas._maker.settled()
    assert not agent.deltas.is_coming(KEY, first, second)


async def test_a_publication_that_fails_is_compared_with_nothing(agent: Agent) -> None:
    first = await agent.publish_and_settle()
    agent.save("empty")
    agent.change(0.01)
    agent.deltas.digested(KEY, await agent.digest())
    assert agent.offer(first, await agent.next()) is not None


async def test_what_was_read_and_not_published_here_is_no_reason_for_a_shadow_nor_is_it_where_none_are_made(
    agent: Agent,
) -> None:
    before = agent.store.account.total_bytes
    agent.save("filling")
    agent.deltas.digested(KEY, bytes(16))
    agent.save("ready", await agent.digest())
    await agent.deltas._maker.settled()
    assert agent.store.account.total_bytes == before
    agent.deltas = agent.job("run-7", is_making=False)
    await agent.publish_and_settle()
    await agent.next()
    assert (agent.store.account.total_bytes, agent.book.nbytes) == (before, 0)


async def test_what_was_applied_is_offered_once_the_read_has_ended(agent: Agent) -> None:
    digests = await agent.digest()
    root = root_digest(digests)
    agent.save("filling")
    agent.applied(root, {0: b"a", 2: b"c"})
    agent.applied(root, {1: b""})
    assert agent.deltas.is_coming(KEY, "old", root)
    agent.save("ready", digests)
    assert not agent.deltas.is_coming(KEY, "old", root)
    offer = agent.offer("old", root)
    assert offer is not None
    assert list(offer.patches[:3]) == [(b"a",), (), (b"c",)]


async def test_of_a_read_that_was_given_up_nothing_more_comes(agent: Agent) -> None:
    """A staged shard keeps its old version: it reads from that again, and the first read brings no more."""
    agent.applied("second", {0: b"a"})
    agent.applied("third", {0: b"b"})
    assert not agent.deltas.is_coming(KEY, "old", "second")
    assert agent.deltas.is_coming(KEY, "old", "third")


@pytest.mark.long
@pytest.mark.parametrize("agent", ["GPU-fake-0"], indirect=True)
async def test_without_memory_of_the_gpu_to_compare_in_pieces_are_read_and_later_deltas_are_right(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def exhausted(*_: object) -> None:
        raise DeviceMemoryExhausted("67108864 bytes do not fit on GPU-fake-0")

    first = await agent.publish_and_settle()
    with monkeypatch.context() as patch:
        patch.setattr(fake_device(0), "allocate", exhausted)
        second = await agent.next()
        third = await agent.next()
    assert agent.brought(first, second)[0] == agent.brought(second, third)[0] == len(agent.place.table)
    assert len([line for line in caplog.messages if "no memory to compare in" in line]) == 1
    fourth = await agent.next()
    assert agent.brought(third, fourth)[0] > 0
    assert agent.brought(fourth, await agent.next())[0] <= 600 * 0.05


@pytest.mark.parametrize("agent", ["GPU-fake-0"], indirect=True)
async def test_the_copy_in_the_hosts_memory_is_pinned_until_it_goes(agent: Agent) -> None:
    """Otherwise it would go to the GPU and back at a fifth of the bus's speed."""
    before, pinned = agent.store.account.total_bytes, fake_device(0).pinned_bytes
    await agent.publish_and_settle()
    assert (
        fake_device(0).pinned_bytes - pinned == agent.store.account.total_bytes - before >= agent.place.segment.nbytes
    )
    agent.deltas.freed(KEY)
    await agent.deltas.stop()
    gc.collect()
    assert fake_device(0).pinned_bytes == pinned


# Planted bugs: a reader compares the digests of what it has patched with those of the version, and these show each.


async def test_a_shadow_that_is_overwritten_before_it_was_compared_is_found(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_early(publication: PublishedMemory, shadow: Shadow, pieces: Sequence[int]) -> Patches:
        follow(publication, shadow, pieces, {})
        return patches_to(publication, shadow, pieces)

    monkeypatch.setattr("tensorhub_agent.deltas.builder.patches_to", too_early)
    first = await agent.publish_and_settle()
    second = await agent.next()
    with pytest.raises(AssertionError):
        agent.brought(first, second)


@pytest.mark.parametrize("agent", ["GPU-fake-0"], indirect=True)
async def test_a_comparison_that_is_not_waited_for_is_found(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_device(0), "_schedule", "lazy")
    first = await agent.publish_and_settle()

    kept: list[FakeMemory] = []

    def unfinished(publication: PublishedMemory, shadow: Shadow, pieces: Sequence[int]) -> Patches:
        with monkeypatch.context() as patch:
            patch.setattr(FakeEvent, "wait", lambda _: None)
            patch.setattr(FakeMemory, "close", lambda memory: kept.append(memory))  # noqa: PLW0108 (as a method)
            found = patches_to(publication, shadow, pieces)
        fake_device(0).finish()
        return found

    monkeypatch.setattr("tensorhub_agent.deltas.builder.patches_to", unfinished)
    second = await agent.next()
    with pytest.raises(AssertionError):
        agent.brought(first, second)
