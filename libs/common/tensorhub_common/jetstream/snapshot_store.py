"""A log's snapshots: where they are stored, and which of them exist.

They are stored in a JetStream stream, compressed and cut into parts, since the object store reads at 13 MiB/s: those of
a job's log in a stream of their own, those of its rollout log in the stream of payloads (`SnapshotPlace`). The last two
are kept, and one word, the index, names both: it is written last, against the index that was read before, so that a
snapshot which is half written, or another leader's, is never taken for a whole one.

Invariants: `read` returns exactly the bytes whose BLAKE2b-256 digest is in the index, or raises; the index only
goes forward in the log; what the index names is not removed.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Self, TypeVar

import msgspec
import zstandard

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import NoResponder, SnapshotBroken, StreamFailure, WrongLastSequence
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.blob_store import blob_digest
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.subjects import (
    payload_stream,
    rollout_snapshot,
    rollout_snapshot_index,
    rollout_snapshots_of,
    snapshot,
    snapshot_index,
    snapshot_stream,
    snapshots_of,
)
from tensorhub_common.runtime.gather_bounded import gather_bounded

SNAPSHOT_BYTES_MAX: Final = 512 * 1024 * 1024
"""A job whose state is larger is never trimmed: 8,000 agents and a hundred thousand shards take a tenth of it."""
PART_BYTES_MAX: Final = 512 * 1024
STREAM_BYTES_MAX: Final = 512 * 1024 * 1024
ATTEMPT_S: Final = 5.0
ZSTD_LEVEL: Final = 3

INDEX_FORMAT: Final = 1

Result = TypeVar("Result")


class SnapshotRecord(msgspec.Struct, frozen=True):
    """One whole snapshot: what it says of the log, and what its bytes must be."""

    seq: int
    """The last entry of the log that is folded in it."""
    time: float
    """JetStream's time of that entry."""
    digest: str
    nbytes: int
    packed: int
    first: int
    """The first of its parts in the stream; everything before it belongs to older snapshots."""

    @property
    def parts(self) -> int:
        """How many parts it has."""
        return max(1, -(-self.packed // PART_BYTES_MAX))


class SnapshotIndex(msgspec.Struct, frozen=True):
    """The snapshots of one log. `log` is when the stream was made: a log that was made anew has none of them."""

    log: str
    newer: SnapshotRecord
    older: SnapshotRecord | None = None
    format: int = INDEX_FORMAT

    @property
    def records(self) -> tuple[SnapshotRecord, ...]:
        """The newer one first."""
        return (self.newer,) if self.older is None else (self.newer, self.older)


class PackedSnapshot(msgspec.Struct, frozen=True):
    """A snapshot's bytes as they go into the stream."""

    digest: str
    nbytes: int
    data: bytes

    @classmethod
    def of(cls, body: bytes) -> Self:
        """Compress and digest; takes its time, so give it a thread."""
        data = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(body)
        return cls(blob_digest(data), len(body), data)


class SnapshotPlace(msgspec.Struct, frozen=True):
    """Where the snapshots of a job's log of one kind are stored."""

    what: str
    """How an error calls the log."""
    stream: Callable[[str], str]
    part: Callable[[str, str, int], str]
    """The subject of a part, by job, digest and number."""
    index: Callable[[str], str]
    """The subject of the index."""
    subjects: Callable[[str], str]
    """The wildcard over all of these."""
    is_shared: bool = False
    """The stream has other messages too, is made by another, and its leader alone answers for a single message."""


JOB_SNAPSHOTS: Final = SnapshotPlace("job", snapshot_stream, snapshot, snapshot_index, snapshots_of)
ROLLOUT_SNAPSHOTS: Final = SnapshotPlace(
    "the rollouts of job",
    payload_stream,
    rollout_snapshot,
    rollout_snapshot_index,
    rollout_snapshots_of,
    is_shared=True,
)


class SnapshotStore:
    """The snapshots of one job's log. Making it asks nothing of NATS."""

    def __init__(self, bus: Bus, job: str, replicas: int = 1, place: SnapshotPlace = JOB_SNAPSHOTS) -> None:
        self._bus = bus
        self._job = job
        self._replicas = replicas
        self._place = place
        self._name = f"{place.what} {job!r}"
        self._stream = place.stream(job)
        self._is_open = False
        self._seen = 0
        """The place of the index that was read last; the next one is written against it."""

    async def index(self, log: str) -> SnapshotIndex | None:
        """Return what there is of this log, or None. `log` is when the log was made."""
        try:
            stored = await self._last_of(self._place.index(self._job))
        except NoResponder:
            self._seen = 0
            return None
        self._seen = 0 if stored is None else stored.seq
        if stored is None:
            return None
        try:
            found = msgspec.json.decode(stored.data, type=SnapshotIndex)
        except MALFORMED as why:
            raise SnapshotBroken(f"the index of the snapshots of {self._name} can't be read: {why}") from None
        if found.format > INDEX_FORMAT:
            raise SnapshotBroken(
                f"the index of the snapshots of {self._name} was written by a newer release (format "
                f"{found.format}, and this one reads {INDEX_FORMAT}): run that one"
            )
        return found if found.log == log else None

    async def write(
        self, packed: PackedSnapshot, seq: int, time: float, before: SnapshotIndex | None, log: str
    ) -> SnapshotIndex:
        """Write a snapshot, and name it beside the one that was the newest until now. `before`: what `index` returned.

        Raises `WrongLastSequence` when another registry has written the index since, and `LogFull`.
        """
        await self._open()
        parts = max(1, -(-len(packed.data) // PART_BYTES_MAX))
        places: dict[int, int] = {}

        async def put(part: int) -> None:
            body = packed.data[part * PART_BYTES_MAX : (part + 1) * PART_BYTES_MAX]
            subject = self._place.part(self._job, packed.digest, part)
            places[part] = (await self._store(subject, body)).seq

        await gather_bounded(range(parts), put)
        record = SnapshotRecord(seq, time, packed.digest, packed.nbytes, len(packed.data), min(places.values()))
        index = SnapshotIndex(log, record, None if before is None else before.newer)
        await self._store_index(msgspec.json.encode(index))
        return index

    async def read(self, record: SnapshotRecord) -> bytes:
        """Return a snapshot's bytes. Raises `SnapshotBroken` when they are not whole or not what the index says."""
        if not 0 <= record.packed <= SNAPSHOT_BYTES_MAX or not 0 <= record.nbytes <= SNAPSHOT_BYTES_MAX:
            raise self._broken(record, "its length is out of range")
        parts = [b""] * record.parts

        async def get(part: int) -> None:
            stored = await self._last_of(self._place.part(self._job, record.digest, part))
            if stored is None:
                raise self._broken(record, f"part {part} of {record.parts} is missing")
            parts[part] = stored.data

        await gather_bounded(range(record.parts), get)
        return await asyncio.to_thread(self._unpack, record, b"".join(parts))

    async def drop_older(self, index: SnapshotIndex) -> None:
        """Remove all snapshots before what the index names."""
        first = min(record.first for record in index.records)
        purge = {"seq": first, **self._only_snapshots()}
        await self._insist(lambda: api.api(self._bus, f"STREAM.PURGE.{self._stream}", purge, ATTEMPT_S))

    async def remove(self) -> None:
        """Delete all snapshots; where there are none, nothing is done."""
        if not self._place.is_shared:
            await api.delete_stream(self._bus, self._stream)
        elif not await api.is_missing(self._bus, self._stream):
            purge = self._only_snapshots()
            await self._insist(lambda: api.api(self._bus, f"STREAM.PURGE.{self._stream}", purge, ATTEMPT_S))

    def _only_snapshots(self) -> dict[str, Any]:
        return {"filter": self._place.subjects(self._job)} if self._place.is_shared else {}

    def _unpack(self, record: SnapshotRecord, data: bytes) -> bytes:
        if len(data) != record.packed or blob_digest(data) != record.digest:
            raise self._broken(record, "its bytes have another digest")
        try:
            return zstandard.ZstdDecompressor().decompress(data, max_output_size=record.nbytes)
        except zstandard.ZstdError as why:
            raise self._broken(record, str(why)) from None

    def _broken(self, record: SnapshotRecord, why: str) -> SnapshotBroken:
        return SnapshotBroken(f"the snapshot of {self._name} at {record.seq} is broken: {why}")

    async def _open(self) -> None:
        if self._is_open or self._place.is_shared:
            return
        config: dict[str, Any] = {
            "name": self._stream,
            "description": f"TensorHub's snapshots of job {self._job}",
            "subjects": [self._place.subjects(self._job)],
            "retention": "limits",
            "discard": "new",
            "max_age": 0,
            "max_msgs": -1,
            "max_msgs_per_subject": 1,
            "max_bytes": STREAM_BYTES_MAX,
            "max_msg_size": PART_BYTES_MAX + 4096,
            "storage": "file",
            "num_replicas": self._replicas,
            "allow_direct": True,
        }
        fixed = ("subjects", "retention", "discard", "max_age", "max_msgs", "max_msgs_per_subject", "allow_direct")
        await api.ensure_stream(self._bus, config, fixed)
        self._is_open = True

    async def _store(self, subject: str, body: bytes) -> api.Ack:
        """Write one part; the same bytes under the same name are harmless to write again."""
        return await self._insist(
            lambda: api.store(self._bus, subject, body, timeout_s=ATTEMPT_S), on_no_responder=True
        )

    async def _store_index(self, body: bytes) -> None:
        headers = {api.EXPECTED_LAST: str(self._seen)}
        subject = self._place.index(self._job)
        try:
            ack = await self._insist(
                lambda: api.store(self._bus, subject, body, headers, ATTEMPT_S), on_no_responder=True
            )
            self._seen = ack.seq
        except WrongLastSequence:
            # Perhaps it is our own, whose acknowledgement was lost.
            stored = await self._last_of(subject)
            if stored is None or stored.data != body:
                raise
            self._seen = stored.seq

    async def _last_of(self, subject: str) -> api.Stored | None:
        last_of = api.last_at_leader if self._place.is_shared else api.last_of
        return await self._insist(lambda: last_of(self._bus, self._stream, subject, ATTEMPT_S))

    async def _insist(self, attempt: Callable[[], Awaitable[Result]], *, on_no_responder: bool = False) -> Result:
        try:
            return await api.insist(attempt, on_no_responder=on_no_responder)
        except NoResponder:
            # Without a stream there is no answer. The same is so while its leader is elected, or it was made just now.
            if await api.is_missing(self._bus, self._stream, ATTEMPT_S):
                raise
        try:
            return await api.insist(attempt, on_no_responder=True)
        except NoResponder:
            why = f"the snapshots of {self._name} have no leader now: try again later"
            raise StreamFailure(why) from None
