"""Large things by digest: what is got is what was put, or an error."""

import asyncio
import random
from typing import Any

import msgspec
import pytest
import zstandard
from tests.kit.nats import RunningNats
from tests.kit.waiting import until

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import BlobMissing, BlobTooLarge
from tensorhub_common.errors import IntegrityError, InvalidName
from tensorhub_common.jetstream import api, blob_store
from tensorhub_common.jetstream.blob_store import (
    BLOBS,
    CHUNK_BYTES_MAX,
    CHUNK_INFLATED_BYTES,
    LENGTH,
    BlobStore,
    blob_digest,
    chunks_of,
)
from tensorhub_common.protocol.subjects import blob, blob_stream


@pytest.fixture
async def store(bus: Bus, job: str) -> BlobStore:
    opened = BlobStore(bus)
    await opened.open(job)
    await opened.open(job)
    return opened


async def messages(bus: Bus, job: str) -> int:
    info = await api.api(bus, f"STREAM.INFO.{blob_stream(job)}")
    return int(info["state"]["last_seq"])


@pytest.mark.parametrize(
    "length", [0, 1, CHUNK_INFLATED_BYTES - 1, CHUNK_INFLATED_BYTES, CHUNK_INFLATED_BYTES + 1, 5_000_000]
)
async def test_what_was_put_is_got(store: BlobStore, bus: Bus, job: str, length: int) -> None:
    """Incompressible bytes, which grow a little in zstd's frame."""
    data = random.Random(length).randbytes(length)
    digest = await store.put(job, data)
    assert digest == blob_digest(data)
    assert await BlobStore(bus).get(job, digest) == data
    assert await messages(bus, job) == chunks_of(length)


async def test_putting_again_sends_nothing_and_puts_that_cross_each_other_agree(
    store: BlobStore, bus: Bus, job: str
) -> None:
    """What was removed with its job, and whose job has begun anew, is put there again."""
    data = random.Random(1).randbytes(2_000_000)
    digests = await asyncio.gather(*(BlobStore(bus).put(job, data) for _ in range(4)))
    assert set(digests) == {blob_digest(data)}
    digest = await store.put(job, data)
    before = await messages(bus, job)
    for again in (store, BlobStore(bus)):
        assert await again.put(job, data) == digest
    assert await messages(bus, job) == before
    await store.remove(job)
    await store.open(job)
    assert await store.put(job, data) == digest
    assert await BlobStore(bus).get(job, digest) == data


async def test_a_put_that_broke_off_is_not_there_and_can_be_done_again(
    store: BlobStore, bus: Bus, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random.Random(2).randbytes(2_000_000)
    write = store._write

    async def breaks_off(job: str, digest: str, index: int, data: bytes) -> None:
        if index == 0:
            raise OSError("killed")
        await write(job, digest, index, data)

    monkeypatch.setattr(store, "_write", breaks_off)
    with pytest.raises(OSError, match="killed"):
        await store.put(job, data)
    with pytest.raises(BlobMissing):
        await store.get(job, blob_digest(data))
    monkeypatch.undo()
    assert await BlobStore(bus).get(job, await store.put(job, data)) == data


async def test_what_is_not_there_is_told(store: BlobStore, bus: Bus, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BlobMissing, match="has no blob"):
        await store.get(job, "0" * 64)
    with pytest.raises(InvalidName):
        await store.get(job, "../../x")
    digest = await store.put(job, random.Random(3).randbytes(2_000_000))
    await api.api(bus, f"STREAM.PURGE.{blob_stream(job)}", {"filter": blob(job, digest, 2)})
    with pytest.raises(BlobMissing, match="only a part"):
        await BlobStore(bus).get(job, digest)
    monkeypatch.setattr(api, "RETRY_WAIT_S", 0.01)
    with pytest.raises(BlobMissing, match="must open the job"):
        await store.get("nobody-opened-it", "0" * 64)


@pytest.mark.long
@pytest.mark.parametrize("is_cluster", [True, False])
async def test_what_one_node_does_not_have_yet_is_asked_for_again(
    store: BlobStore, bus: Bus, job: str, monkeypatch: pytest.MonkeyPatch, *, is_cluster: bool
) -> None:
    """Of a cluster any node may answer a look-up, also one that slept and lacks it for seconds; one server is right."""
    digest = await store.put(job, b"weights" * 100_000)
    looks: list[int] = []
    real = api.last_of

    async def behind(*asked: Any) -> api.Stored | None:
        looks.append(1)
        is_there = len(looks) == blob_store.LOOKS_MAX or len(looks) > blob_store.LOOKS_MAX + 1
        return await real(*asked) if is_there else None

    monkeypatch.setattr(api, "last_of", behind)
    monkeypatch.setattr(api, "is_clustered", lambda _: is_cluster)
    if not is_cluster:
        with pytest.raises(BlobMissing):
            await BlobStore(bus).get(job, digest)
        assert len(looks) == 1
        return
    assert await BlobStore(bus).get(job, digest) == b"weights" * 100_000
    assert len(looks) == blob_store.LOOKS_MAX + 2, "one chunk is asked for to the end, the other twice"


@pytest.mark.parametrize(
    ("chunk", "length"),
    [
        (zstandard.compress(b"other bytes"), "11"),
        (zstandard.compress(b"longer than it says"), "3"),
        (zstandard.compress(b"\0" * 100_000_000), "100"),
        (b"no zstd at all", "14"),
        (b"", "1"),
        (zstandard.compress(b"abc"), "999999999999"),
        (zstandard.compress(b"abc"), "-3"),
        (zstandard.compress(b"abc"), "three"),
    ],
)
async def test_what_somebody_else_put_there_is_refused(
    store: BlobStore, bus: Bus, job: str, chunk: bytes, length: str
) -> None:
    """Whatever stands under a digest, it is that digest's bytes or an error, and nothing inflates without bound."""
    digest = blob_digest(b"the right bytes")
    await api.store(bus, blob(job, digest, 0), chunk, {LENGTH: length})
    with pytest.raises(IntegrityError, match=digest):
        await store.get(job, digest)


async def test_too_large_is_refused(store: BlobStore, bus: Bus, job: str) -> None:
    """Also where somebody else has put it."""
    small = BlobStore(bus, place=msgspec.structs.replace(BLOBS, bytes_max=100))
    assert await small.put(job, b"x" * 100) == blob_digest(b"x" * 100)
    with pytest.raises(BlobTooLarge):
        await small.put(job, b"x" * 101)
    with pytest.raises(IntegrityError):
        await small.get(job, await store.put(job, b"x" * 101))


def test_an_incompressible_chunk_stays_within_the_limit() -> None:
    data = random.Random(4).randbytes(CHUNK_INFLATED_BYTES)
    assert len(zstandard.ZstdCompressor(level=blob_store.ZSTD_LEVEL).compress(data)) <= CHUNK_BYTES_MAX


async def test_the_cache_is_bounded_and_drops_the_oldest(bus: Bus, store: BlobStore, job: str) -> None:
    small = BlobStore(bus, cache_bytes_max=250)
    one, two, three = [await small.put(job, bytes([index]) * 100) for index in range(3)]
    assert [digest for _, digest in small._cache] == [two, three]
    assert await small.get(job, two) == b"\1" * 100
    await small.get(job, one)
    assert [digest for _, digest in small._cache] == [two, one]
    assert small._cache_bytes == 200
    await small.put(job, b"x" * 251)
    assert small._cache_bytes == 200


async def test_a_put_goes_on_through_a_restart(own_nats_server: RunningNats, own_bus: Bus, job: str) -> None:
    store = BlobStore(own_bus)
    await store.open(job)
    data = random.Random(5).randbytes(20_000_000)
    putting = asyncio.create_task(store.put(job, data))
    await until(lambda: messages(own_bus, job))
    await asyncio.to_thread(own_nats_server.restart)
    digest = await putting
    assert await BlobStore(own_bus).get(job, digest) == data
