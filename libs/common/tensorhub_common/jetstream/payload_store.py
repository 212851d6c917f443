"""The payloads of rollouts: prompts and tokens as bytes under their digest, which entries of the rollout log name.

They are blobs in a stream of their own. A payload is written before the entry that names it, and removed once nothing
names it any more. A payload is therefore written anew also where it is there already: to remove what was written up to
a sequence of the stream then leaves what was written since, for an entry that is yet to come. Chunks are compressed
like those of blobs.

The stream gives single chunks by its leader alone, through a request that agents have no permission for. It also has
the snapshots of the rollout log (`snapshot_store.ROLLOUT_SNAPSHOTS`).
"""

import asyncio
import contextlib
import json
from typing import Final

import msgspec

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import LogMissing, NoAnswer, StreamFailure
from tensorhub_common.bus.message import Message
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.blob_store import ATTEMPT_S, CACHE_BYTES_MAX, BlobPlace, BlobStore
from tensorhub_common.jetstream.stream_log import LogExtent, extent_of
from tensorhub_common.protocol.rollout.entries import PAYLOAD_BYTES_MAX
from tensorhub_common.protocol.subjects import (
    chunks_of_payload,
    first_chunks_of_payloads,
    payload,
    payload_stream,
    payloads_of,
    rollout_snapshots_of,
)

PAYLOAD_STORE_BYTES_MAX: Final = 4 * 1024 * 1024 * 1024
"""A payload stream that is full refuses payloads (`LogFull`); an operator may raise the limit."""
LIST_MAX: Final = 512
"""Limit of the payloads that one request lists."""
LISTER_IDLE_S: Final = 5.0
"""The server drops the consumer of a list after this time."""

PAYLOADS: Final = BlobPlace(
    what="payload",
    stream=payload_stream,
    subjects=lambda job: [payloads_of(job), rollout_snapshots_of(job)],
    chunk=payload,
    bytes_max=PAYLOAD_BYTES_MAX,
    store_bytes_max=PAYLOAD_STORE_BYTES_MAX,
    is_direct=False,
)

_DIGEST_TOKEN: Final = -2


class PayloadRecord(msgspec.Struct, frozen=True):
    """One whole payload in the stream."""

    digest: str
    seq: int
    """Of its last message: pass it to `drop`."""
    age_s: float
    """How long ago it was written, by NATS's clock alone."""


class PayloadStore(BlobStore):
    """The payloads of all jobs, with a cache of what was read or written last."""

    def __init__(self, bus: Bus, cache_bytes_max: int = CACHE_BYTES_MAX) -> None:
        super().__init__(bus, cache_bytes_max, PAYLOADS)

    async def put(self, job: str, data: bytes) -> str:
        """Store bytes, also where they are stored already, and return their digest.

        Raises `BlobTooLarge`, `LogFull`, `BlobMissing` without a stream, or `NoBus` when NATS doesn't answer.
        """
        digest = await self._digest_of(data)
        await self._write_all(job, digest, data)
        return digest

    async def drop(self, job: str, digest: str, seq: int | None = None) -> None:
        """Remove a payload; where there is none, nothing is done.

        With `seq` only what was written up to that sequence goes. Without it, what is being written for an entry that
        is yet to come goes as well, so take it only where no one else writes the same bytes.
        """
        purge: dict[str, str | int] = {"filter": chunks_of_payload(job, digest)}
        if seq is not None:
            purge["seq"] = seq + 1
        self._forget(job, digest)
        verb = f"STREAM.PURGE.{payload_stream(job)}"
        try:
            await api.insist(lambda: api.api(self._bus, verb, purge, ATTEMPT_S))
        except StreamFailure as failure:
            if failure.err_code != api.STREAM_NOT_FOUND:
                raise

    async def listed(self, job: str, after_seq: int = 0, limit: int = LIST_MAX) -> list[PayloadRecord]:
        """Return the whole payloads behind a sequence of the stream, the oldest first, and at most `limit` of them.

        Pass the sequence of the last one to go on; fewer than `limit` are all that there are. Raises `LogMissing`
        without a stream.
        """
        return await api.insist(lambda: self._list(job, after_seq, min(limit, LIST_MAX)))

    async def extent(self, job: str) -> LogExtent:
        """Return how full the stream of payloads is. Raises `LogMissing` without one."""
        try:
            return extent_of(await api.insist(lambda: api.stream_info(self._bus, payload_stream(job))))
        except StreamFailure as failure:
            raise _missing(job, failure) from None

    async def _list(self, job: str, after_seq: int, limit: int) -> list[PayloadRecord]:
        """Read the headers of first chunks, each of which is the last message of its payload."""
        stream, replies = payload_stream(job), self._bus.new_inbox()
        name = replies.rpartition(".")[2]
        arrived: asyncio.Queue[Message] = asyncio.Queue()
        # `limit` messages at most, and one word of their end.
        inbox = await self._bus.subscribe(replies, arrived.put_nowait)
        try:
            now_ns, pending = await self._consume(job, name, after_seq)
            wanted = min(limit, pending)
            found: list[PayloadRecord] = []
            if wanted:
                pull = json.dumps({"batch": wanted, "no_wait": True}).encode()
                await self._bus.publish(f"{api.API}.CONSUMER.MSG.NEXT.{stream}.{name}", pull, reply=replies)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ATTEMPT_S):
                    while len(found) < wanted:
                        message = await arrived.get()
                        if message.status is not None:
                            # Some were removed meanwhile.
                            return found
                        found.append(_record(message, now_ns))
                    return found
            raise NoAnswer(f"stream {stream} listed {len(found)} of {wanted} payloads within {ATTEMPT_S:g} s")
        finally:
            await inbox.close()

    async def _consume(self, job: str, name: str, after_seq: int) -> tuple[int, int]:
        """Make a consumer of first chunks. Return the server's time, and how many there are behind `after_seq`."""
        subject = first_chunks_of_payloads(job)
        config = {
            "name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": after_seq + 1,
            "ack_policy": "none",
            "replay_policy": "instant",
            "filter_subject": subject,
            "headers_only": True,
            "inactive_threshold": int(LISTER_IDLE_S * api.NS_PER_S),
            "mem_storage": True,
            "num_replicas": 1,
        }
        stream = payload_stream(job)
        wish = {"stream_name": stream, "config": config}
        try:
            made = await api.api(self._bus, f"CONSUMER.CREATE.{stream}.{name}.{subject}", wish, ATTEMPT_S)
        except StreamFailure as failure:
            raise _missing(job, failure) from None
        return api.time_ns_of(made["ts"]), int(made["num_pending"])


def _record(message: Message, now_ns: int) -> PayloadRecord:
    seq, _, time_ns = api.delivery_of(message.reply)
    return PayloadRecord(message.subject.split(".")[_DIGEST_TOKEN], seq, max(0, now_ns - time_ns) / api.NS_PER_S)


def _missing(job: str, failure: StreamFailure) -> Exception:
    if failure.err_code != api.STREAM_NOT_FOUND:
        return failure
    return LogMissing(f"job {job!r} has no payload store: a registry must open the job first")
