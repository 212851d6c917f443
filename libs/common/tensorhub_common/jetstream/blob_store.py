"""Large things by digest: a content-addressed store in a JetStream stream.

What is too large for a message (a layout of many thousand tensors) is stored here, and messages carry its digest. A
blob is cut into chunks of a fixed length and each is compressed for itself, so all writers of a blob write equal
chunks, and puts of one blob that cross each other can't spoil it. Chunk 0 is written last: where it exists, the whole
blob does. `BlobPlace` says in which stream blobs of one kind are: layouts and transfer programs here, payloads of
rollouts in `payload_store`.

Invariants: `get` returns exactly the bytes whose BLAKE2b-256 digest was asked for, or raises; no message is longer
than `CHUNK_BYTES_MAX` and nothing inflates beyond its stated length, whatever was written.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import msgspec
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


class BlobPlace(msgspec.Struct, frozen=True):
    """Where blobs of one kind are stored, and within which limits."""

    what: str
    """How an error calls one."""
    stream: Callable[[str], str]
    """By job."""
    subjects: Callable[[str], list[str]]
    """All subjects of the stream, by job."""
    chunk: Callable[[str, str, int], str]
    """The subject of a chunk, by job, digest and index."""
    bytes_max: int
    """Limit of one blob."""
    store_bytes_max: int
    """Limit of the stream."""
    is_direct: bool = True
    """Any server of a cluster may answer for a chunk, and not the stream's leader alone."""


BLOBS: Final = BlobPlace(
    what="blob",
    stream=blob_stream,
    subjects=lambda job: [blobs_of(job)],
    chunk=blob,
    bytes_max=BLOB_BYTES_MAX,
    store_bytes_max=STORE_BYTES_MAX,
)


class BlobStore:
    """The blobs of all jobs, with a cache of what was read or written last."""

    def __init__(self, bus: Bus, cache_bytes_max: int = CACHE_BYTES_MAX, place: BlobPlace = BLOBS) -> None:
        self._bus = bus
        self._place = place
        self._cache_bytes_max = cache_bytes_max
        self._cache_bytes = 0
        self._cache: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    async def open(self, job: str, replicas: int = 1) -> None:
        """Make the job's stream, or check the existing one. Called when a job is opened."""
        config: dict[str, Any] = {
            "name": self._place.stream(job),
            "description": f"TensorHub's {self._place.what}s of job {job}",
            "subjects": self._place.subjects(job),
            "retention": "limits",
            "discard": "new",
            "max_age": 0,
            "max_msgs": -1,
            "max_msgs_per_subject": 1,
            "max_bytes": self._place.store_bytes_max,
            "max_msg_size": CHUNK_BYTES_MAX + 4096,
            "storage": "file",
            "num_replicas": replicas,
            "allow_direct": self._place.is_direct,
        }
        fixed = ("subjects", "retention", "discard", "max_age", "max_msgs", "max_msgs_per_subject", "allow_direct")
        await api.ensure_stream(self._bus, config, fixed)

    async def remove(self, job: str) -> None:
        """Delete all blobs of a job; where there are none, nothing is done."""
        await api.delete_stream(self._bus, self._place.stream(job))

    async def put(self, job: str, data: bytes) -> str:
        """Store bytes and return their digest; what is stored already is not sent again.

        Raises `BlobTooLarge`, `LogFull`, or `NoBus` when NATS doesn't answer.
        """
        digest = await self._digest_of(data)
        # It is looked for in the store, and not in the cache: with a deleted job its store goes, and its name
        # may be used anew while this process goes on.
        if await self._chunk(job, digest, 0) is not None:
            self._keep(job, digest, data)
            return digest
        await self._write_all(job, digest, data)
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
            raise BlobMissing(f"job {job} has no {self._place.what} {digest}: put it there before a message names it")
        length = self._length(first.headers.get(LENGTH, ""), digest)
        parts = [b""] * chunks_of(length)
        parts[0] = self._inflate(first.data, digest, min(length, CHUNK_INFLATED_BYTES))

        async def read(index: int) -> None:
            chunk = await self._patiently(job, digest, index)
            if chunk is None:
                raise BlobMissing(f"job {job} has only a part of {self._place.what} {digest}: put it there again")
            parts[index] = self._inflate(
                chunk.data, digest, min(length - index * CHUNK_INFLATED_BYTES, CHUNK_INFLATED_BYTES)
            )

        await gather_bounded(range(1, len(parts)), read)
        data = b"".join(parts)
        if await _maybe_in_thread(blob_digest, data) != digest:
            raise self._spoilt(digest, "its bytes have another digest")
        self._keep(job, digest, data)
        return data

    async def _digest_of(self, data: bytes) -> str:
        if len(data) > self._place.bytes_max:
            what, bytes_max = self._place.what, self._place.bytes_max
            raise BlobTooLarge(f"{len(data)} bytes are more than a {what} may have ({bytes_max}): split them up")
        return await _maybe_in_thread(blob_digest, data)

    async def _write_all(self, job: str, digest: str, data: bytes) -> None:
        await gather_bounded(range(1, chunks_of(len(data))), lambda index: self._write(job, digest, index, data))
        await self._write(job, digest, 0, data)
        self._keep(job, digest, data)

    async def _write(self, job: str, digest: str, index: int, data: bytes) -> None:
        start = index * CHUNK_INFLATED_BYTES
        part = memoryview(data)[start : start + CHUNK_INFLATED_BYTES]
        body = await _maybe_in_thread(zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress, part)
        subject, headers = self._place.chunk(job, digest, index), {LENGTH: str(len(data))}
        await self._insist(lambda: api.store(self._bus, subject, body, headers, ATTEMPT_S), job)

    async def _chunk(self, job: str, digest: str, index: int) -> api.Stored | None:
        stream, subject = self._place.stream(job), self._place.chunk(job, digest, index)
        last_of = api.last_of if self._place.is_direct else api.last_at_leader
        return await self._insist(lambda: last_of(self._bus, stream, subject, ATTEMPT_S), job)

    async def _patiently(self, job: str, digest: str, index: int) -> api.Stored | None:
        """Look again for what is not there, where any node of a cluster may answer, also one that has it not yet."""
        may_lack = self._place.is_direct and api.is_clustered(self._bus)
        for _ in range(LOOKS_MAX - 1 if may_lack else 0):
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
            raise BlobMissing(
                f"job {job} has no {self._place.what} store: a registry must open the job first"
            ) from None

    def _inflate(self, chunk: bytes, digest: str, length: int) -> bytes:
        try:
            # The frame's own word for its length is what zstd would allocate, so it is compared before.
            if zstandard.get_frame_parameters(chunk).content_size != length:
                raise self._spoilt(digest, "a chunk has another length")
            return zstandard.ZstdDecompressor().decompress(chunk, max_output_size=length)
        except zstandard.ZstdError as error:
            raise self._spoilt(digest, str(error)) from None

    def _length(self, text: str, digest: str) -> int:
        bytes_max = self._place.bytes_max
        length = int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(bytes_max)) else -1
        if not 0 <= length <= bytes_max:
            raise self._spoilt(digest, f"it says that it is {text!r:.40} bytes long")
        return length

    def _spoilt(self, digest: str, why: str) -> IntegrityError:
        return IntegrityError(
            f"{self._place.what} {digest} is not what its name says ({why}): put it there again from a process that "
            "has it"
        )

    def _forget(self, job: str, digest: str) -> None:
        self._cache_bytes -= len(self._cache.pop((job, digest), b""))

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
