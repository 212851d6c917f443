"""Large things by digest: a content-addressed store in a JetStream stream of its own.

What is too large for a message (a layout of many thousand tensors) is stored here, and messages carry its digest. A
blob is cut into chunks of a fixed length and each is compressed for itself, so all writers of a blob write equal
chunks, and puts of one blob that cross each other can't spoil it. Chunk 0 is written last: where it exists, the whole
blob does.

Invariants: `get` returns exactly the bytes whose BLAKE2b-256 digest was asked for, or raises; no message is longer
than `CHUNK_BYTES_MAX` and nothing inflates beyond its stated length, whatever was written.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import zstandard

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import BlobMissing, BlobTooLarge, NoResponder
from tensorhub_common.errors import IntegrityError
from tensorhub_common.jetstream import api
from tensorhub_common.protocol.subjects import blob, blob_stream, blobs_of, check_digest
from tensorhub_common.runtime.gather_bounded import gather_bounded

BLOB_BYTES_MAX: Final = 256 * 1024 * 1024
CHUNK_BYTES_MAX: Final = 512 * 1024
CHUNK_INFLATED_BYTES: Final = CHUNK_BYTES_MAX - 4096
"""What doesn't compress grows by some bytes a block in zstd's frame, and so stays within `CHUNK_BYTES_MAX`."""

STORE_BYTES_MAX: Final = 4 * 1024 * 1024 * 1024
CACHE_BYTES_MAX: Final = 64 * 1024 * 1024
ATTEMPT_S: Final = 5.0
LOOKS_MAX: Final = 25
LOOK_AGAIN_S: Final = 0.1
"""In a cluster a blob counts as missing once that was said for longer than the 2 s in which a node that led the store
and slept takes every third look-up, and answers as if nothing had been put since."""
ZSTD_LEVEL: Final = 3

AT_ONCE_BYTES_MAX: Final = 64 * 1024
"""What is not longer is digested and compressed where it is."""

Result = TypeVar("Result")
Bytes = TypeVar("Bytes", bytes, memoryview)

LENGTH: Final = "Tensorhub-Blob-Bytes"
"""Header on each chunk: the length of the whole blob, from which the number of chunks follows."""


def blob_digest(data: bytes) -> str:
    """Return the name under which the store keeps these bytes: 64 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def chunks_of(length: int) -> int:
    """Return how many chunks a blob of this length has; an empty one has one."""
    return max(1, -(-length // CHUNK_INFLATED_BYTES))


class BlobStore:
    """The blobs of all jobs, with a cache of what was read or written last."""

    def __init__(self, bus: Bus, cache_bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._bus = bus
        self._cache_bytes_max = cache_bytes_max
        self._cache_bytes = 0
        self._cache: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    async def open(self, job: str, replicas: int = 1) -> None:
        """Make the job's blob stream, or check the existing one. Called when a job is opened."""
        config: dict[str, Any] = {
            "name": blob_stream(job),
            "description": f"TensorHub's blobs of job {job}",
            "subjects": [blobs_of(job)],
            "retention": "limits",
            "discard": "new",
            "max_age": 0,
            "max_msgs": -1,
            "max_msgs_per_subject": 1,
            "max_bytes": STORE_BYTES_MAX,
            "max_msg_size": CHUNK_BYTES_MAX + 4096,
            "storage": "file",
            "num_replicas": replicas,
            "allow_direct": True,
        }
        fixed = ("subjects", "retention", "discard", "max_age", "max_msgs", "max_msgs_per_subject", "allow_direct")
        await api.ensure_stream(self._bus, config, fixed)

    async def remove(self, job: str) -> None:
        """Delete all blobs of a job; where there are none, nothing is done."""
        await api.delete_stream(self._bus, blob_stream(job))

    async def put(self, job: str, data: bytes) -> str:
        """Store bytes and return their digest; what is stored already is not sent again.

        Raises `BlobTooLarge`, `LogFull`, or `NoBus` when NATS doesn't answer.
        """
        if len(data) > BLOB_BYTES_MAX:
            raise BlobTooLarge(f"{len(data)} bytes are more than a blob may have ({BLOB_BYTES_MAX}): split them up")
        digest = await _maybe_in_thread(blob_digest, data)
        # It is looked for in the store, and not in the cache: with a deleted job its store goes, and its name
        # may be used anew while this process goes on.
        if await self._chunk(job, digest, 0) is not None:
            self._keep(job, digest, data)
            return digest
        await gather_bounded(range(1, chunks_of(len(data))), lambda index: self._write(job, digest, index, data))
        await self._write(job, digest, 0, data)
        self._keep(job, digest, data)
        return digest

    async def get(self, job: str, digest: str) -> bytes:
        """Return the bytes with this digest.

        Raises `BlobMissing`, `IntegrityError` when the stored bytes are others, or `NoBus`.
        """
        cached = self._cache.get((job, check_digest(digest)))
        if cached is not None:
            self._cache.move_to_end((job, digest))
            return cached
        first = await self._patiently(job, digest, 0)
        if first is None:
            raise BlobMissing(f"job {job} has no blob {digest}: put it there before a message names it")
        length = _length(first.headers.get(LENGTH, ""), digest)
        parts = [b""] * chunks_of(length)
        parts[0] = _inflate(first.data, digest, min(length, CHUNK_INFLATED_BYTES))

        async def read(index: int) -> None:
            chunk = await self._patiently(job, digest, index)
            if chunk is None:
                raise BlobMissing(f"job {job} has only a part of blob {digest}: put it there again")
            parts[index] = _inflate(
                chunk.data, digest, min(length - index * CHUNK_INFLATED_BYTES, CHUNK_INFLATED_BYTES)
            )

        await gather_bounded(range(1, len(parts)), read)
        data = b"".join(parts)
        if await _maybe_in_thread(blob_digest, data) != digest:
            raise _spoilt(digest, "its bytes have another digest")
        self._keep(job, digest, data)
        return data

    async def _write(self, job: str, digest: str, index: int, data: bytes) -> None:
        start = index * CHUNK_INFLATED_BYTES
        part = memoryview(data)[start : start + CHUNK_INFLATED_BYTES]
        body = await _maybe_in_thread(zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress, part)
        subject, headers = blob(job, digest, index), {LENGTH: str(len(data))}
        await self._insist(lambda: api.store(self._bus, subject, body, headers, ATTEMPT_S), job)

    async def _chunk(self, job: str, digest: str, index: int) -> api.Stored | None:
        stream, subject = blob_stream(job), blob(job, digest, index)
        return await self._insist(lambda: api.last_of(self._bus, stream, subject, ATTEMPT_S), job)

    async def _patiently(self, job: str, digest: str, index: int) -> api.Stored | None:
        """Look again for what is not there, where any node of a cluster may answer, also one that has it not yet."""
        for _ in range(LOOKS_MAX - 1 if api.is_clustered(self._bus) else 0):
            chunk = await self._chunk(job, digest, index)
            if chunk is not None:
                return chunk
            await asyncio.sleep(LOOK_AGAIN_S)
        return await self._chunk(job, digest, index)

    async def _insist(self, attempt: Callable[[], Awaitable[Result]], job: str) -> Result:
        """Try again what is harmless to repeat, as all of a content-addressed store is."""
        try:
            return await api.insist(attempt, on_no_responder=True)
        except NoResponder:
            raise BlobMissing(f"job {job} has no blob store: a registry must open the job first") from None

    def _keep(self, job: str, digest: str, data: bytes) -> None:
        if len(data) > self._cache_bytes_max:
            return
        if (job, digest) not in self._cache:
            self._cache[job, digest] = data
            self._cache_bytes += len(data)
        self._cache.move_to_end((job, digest))
        while self._cache_bytes > self._cache_bytes_max:
            self._cache_bytes -= len(self._cache.popitem(last=False)[1])


async def _maybe_in_thread(work: Callable[[Bytes], Result], data: Bytes) -> Result:
    """Do it here where it takes well under a millisecond, else in a thread: to hand over thousands costs more."""
    return work(data) if len(data) <= AT_ONCE_BYTES_MAX else await asyncio.to_thread(work, data)


def _inflate(chunk: bytes, digest: str, length: int) -> bytes:
    try:
        # The frame's own word for its length is what zstd would allocate, so it is compared before.
        if zstandard.get_frame_parameters(chunk).content_size != length:
            raise _spoilt(digest, "a chunk has another length")
        return zstandard.ZstdDecompressor().decompress(chunk, max_output_size=length)
    except zstandard.ZstdError as error:
        raise _spoilt(digest, str(error)) from None


def _length(text: str, digest: str) -> int:
    length = int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(BLOB_BYTES_MAX)) else -1
    if not 0 <= length <= BLOB_BYTES_MAX:
        raise _spoilt(digest, f"it says that it is {text!r:.40} bytes long")
    return length


def _spoilt(digest: str, why: str) -> IntegrityError:
    return IntegrityError(
        f"blob {digest} is not what its name says ({why}): put it there again from a process that has it"
    )
