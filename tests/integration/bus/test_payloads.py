"""Payloads of rollouts: put, got, listed and dropped, beside the snapshots of their log."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from tests.kit.waiting import until

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import BlobMissing, BlobTooLarge, LogFull, LogMissing, NoResponder
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.blob_store import BlobStore, blob_digest, chunks_of
from tensorhub_common.jetstream.payload_store import LIST_MAX, PayloadStore
from tensorhub_common.jetstream.rollout_log import open_rollout_log
from tensorhub_common.jetstream.snapshot_store import (
    PART_BYTES_MAX,
    ROLLOUT_SNAPSHOTS,
    PackedSnapshot,
    SnapshotStore,
)
from tensorhub_common.protocol.rollout.entries import PAYLOAD_BYTES_MAX
from tensorhub_common.protocol.subjects import payload, payload_stream


@pytest.fixture
async def store(bus: Bus, job: str) -> PayloadStore:
    opened = PayloadStore(bus)
    await opened.open(job)
    await opened.open(job)
    return opened


def tokens(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


async def messages(bus: Bus, job: str) -> int:
    return int((await api.api(bus, f"STREAM.INFO.{payload_stream(job)}"))["state"]["messages"])


@pytest.mark.parametrize("length", [1, 100, 2_000_000])
async def test_what_was_put_is_got_until_it_is_dropped(store: PayloadStore, bus: Bus, job: str, length: int) -> None:
    data, other = tokens(1, length), tokens(2, length)
    digest, kept = await store.put(job, data), await store.put(job, other)
    assert digest == blob_digest(data)
    assert await PayloadStore(bus).get(job, digest) == data
    assert await messages(bus, job) == 2 * chunks_of(length)
    await store.drop(job, digest)
    await store.drop(job, digest)
    assert await messages(bus, job) == chunks_of(length)
    for each in (store, PayloadStore(bus)):
        with pytest.raises(BlobMissing, match="no payload"):
            await each.get(job, digest)
        assert await each.get(job, kept) == other


async def test_what_was_written_since_stays(store: PayloadStore, bus: Bus, job: str) -> None:
    """An entry that is yet to come names the same bytes: what was listed before may go, and these stay whole."""
    data = tokens(3, 2_000_000)
    digest = await store.put(job, data)
    [old] = await store.listed(job)
    assert await store.put(job, data) == digest
    await store.drop(job, digest, old.seq)
    assert await PayloadStore(bus).get(job, digest) == data
    [new] = await store.listed(job)
    assert new.seq > old.seq
    await store.drop(job, digest, new.seq)
    assert await messages(bus, job) == 0


async def test_payloads_are_listed_in_pages_the_oldest_first(store: PayloadStore, bus: Bus, job: str) -> None:
    """A payload counts from its last message on; one that was broken off is none."""
    assert await store.listed(job) == []
    digests = [await store.put(job, tokens(seed, 10 if seed else 1_500_000)) for seed in range(7)]
    await api.store(bus, payload(job, "f" * 64, 1), b"the first chunk is missing")
    first = await store.listed(job, limit=4)
    assert [each.digest for each in first] == digests[:4]
    rest = await store.listed(job, first[-1].seq, limit=4)
    assert [each.digest for each in [*first, *rest]] == digests
    assert [each.seq for each in [*first, *rest]] == list(range(chunks_of(1_500_000), chunks_of(1_500_000) + 7))
    assert await store.listed(job, rest[-1].seq) == []
    assert first[0].age_s > 0
    ages = [each.age_s for each in await store.listed(job)]
    assert ages == sorted(ages, reverse=True)

    async def is_older() -> bool:
        return (await store.listed(job, limit=1))[0].age_s > ages[0]

    await until(is_older)


async def test_a_page_has_a_limit(store: PayloadStore, job: str) -> None:
    number = LIST_MAX + 3
    await asyncio.gather(*(store.put(job, index.to_bytes(4)) for index in range(number)))
    page = await store.listed(job, limit=10 * LIST_MAX)
    assert len(page) == LIST_MAX
    assert len(await store.listed(job, page[-1].seq)) == 3


async def test_how_full_the_store_is(store: PayloadStore, bus: Bus, job: str) -> None:
    """Beyond its limit a payload is refused, and what is there stays."""
    assert (await store.extent(job)).fullness == 0
    config = (await api.api(bus, f"STREAM.INFO.{payload_stream(job)}"))["config"]
    await api.api(bus, f"STREAM.UPDATE.{payload_stream(job)}", config | {"max_bytes": 1_000_000})
    digest = await store.put(job, tokens(1, 500_000))
    assert 0.5 < (await store.extent(job)).fullness < 0.6
    with pytest.raises(LogFull):
        await store.put(job, tokens(2, 500_000))
    assert await PayloadStore(bus).get(job, digest) == tokens(1, 500_000)
    with pytest.raises(BlobTooLarge, match="a payload may have"):
        await store.put(job, bytes(PAYLOAD_BYTES_MAX + 1))


async def test_without_a_stream_it_is_told(bus: Bus, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "RETRY_WAIT_S", 0.01)
    store = PayloadStore(bus)
    await store.drop(job, "0" * 64)
    for call in (store.put(job, b"x"), store.get(job, "0" * 64)):
        with pytest.raises(BlobMissing, match="no payload store"):
            await call
    for listing in (store.listed(job), store.extent(job)):
        with pytest.raises(LogMissing, match="no payload store"):
            await listing


async def test_no_stream_of_rollouts_answers_directly(store: PayloadStore, bus: Bus, job: str) -> None:
    """Agents may ask every stream so."""
    await store.put(job, b"x")
    log = await open_rollout_log(bus, job)
    for stream in (payload_stream(job), log.stream):
        with pytest.raises(NoResponder):
            await api.number(bus, stream, 1)


@pytest.fixture
async def snapshots(store: PayloadStore, bus: Bus, job: str) -> AsyncIterator[SnapshotStore]:
    await store.put(job, b"a payload before them")
    yield SnapshotStore(bus, job, place=ROLLOUT_SNAPSHOTS)
    assert len(await store.listed(job)) == 1, "snapshots are none of the payloads, and take none with them"


async def test_snapshots_of_the_rollout_log_stand_beside_payloads(snapshots: SnapshotStore, bus: Bus, job: str) -> None:
    """The last two are kept, and removing older ones leaves payloads."""
    assert await snapshots.index("log") is None
    index, bodies = None, [tokens(seed, PART_BYTES_MAX + 1) for seed in range(4)]
    for seq, body in enumerate(bodies, 1):
        index = await snapshots.write(PackedSnapshot.of(body), seq, float(seq), index, "log")
        await snapshots.drop_older(index)
    again = SnapshotStore(bus, job, place=ROLLOUT_SNAPSHOTS)
    assert await again.index("log") == index
    assert index is not None
    assert [await again.read(record) for record in index.records] == [bodies[3], bodies[2]]
    assert await messages(bus, job) == 1 + 2 * 2 + 1, "a payload, two snapshots of two parts, and their index"
    assert await again.index("another log") is None
    await again.remove()
    assert await messages(bus, job) == 1


async def test_the_blobs_of_a_job_are_none_of_its_payloads(store: PayloadStore, bus: Bus, job: str) -> None:
    blobs = BlobStore(bus)
    await blobs.open(job)
    digest = await blobs.put(job, b"a layout")
    with pytest.raises(BlobMissing):
        await store.get(job, digest)
    await store.put(job, b"a layout")
    await store.drop(job, digest)
    assert await BlobStore(bus).get(job, digest) == b"a layout"
