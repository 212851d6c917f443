"""Watching a model: its events, in the order of the job's log, each exactly once.

Always true: `seq` rises from event to event, and resuming after any `seq` that was yielded continues without a gap and
without a repeat, or raises `LogGap`.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from typing import Final

import msgspec

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import LogGap, LogMissing, StreamFailure
from tensorhub_common.errors import gone
from tensorhub_common.jetstream import api
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.jetstream.log_entry import StoredEntry
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.log.codec import read_event
from tensorhub_common.protocol.log.events import JobDeleted, kind_of

VERSION_KINDS: Final = frozenset({"version.published", "version.available", "version.unavailable", "version.retired"})
"""What is watched by default: how the versions of a model come and go."""

GONE: Final = str(JobDeleted.__struct_config__.tag)
"""Ends the watching of every model of the job."""


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a model. `seq` is its place in the job's log; what an event of this kind doesn't tell is None."""

    seq: int
    time: float
    """When it happened, in seconds since the epoch."""
    kind: str
    """"version.published", "version.unavailable", "replica.ready", …"""
    model: str
    version: int | None = None
    replica: str | None = None
    shard: int | None = None
    round: int | None = None
    agent: str | None = None
    reason: str | None = None
    error: str | None = None
    message: str | None = None


_TOLD: Final = ("version", "replica", "shard", "round", "agent", "reason", "error", "message")


async def watch(
    bus: Callable[[], Awaitable[Bus]], job: str, model: str, after: int | None, kinds: Collection[str] | None
) -> AsyncGenerator[Watched, None]:
    """Yield the model's events of these kinds (None: `VERSION_KINDS`; empty: all) after a `seq`, or from the first."""
    wanted = VERSION_KINDS if kinds is None else frozenset(kinds)
    joblog = JobLog(await bus(), job)
    try:
        start = await _start(await bus(), joblog, after)
        async with aclosing(joblog.follow(start, subjects.events_of(job, model), _end_of(job))) as entries:
            async for entry in entries:
                event = _watched(entry, model)
                if event is None:
                    continue
                if event.kind == GONE:
                    raise gone(job)
                if not wanted or event.kind in wanted:
                    yield event
    except LogGap:
        # What is deleted is trimmed at once, also under those who were about to read it.
        connected = await bus()
        if await api.insist(lambda: api.last_of(connected, joblog.stream, _end_of(job))) is not None:
            raise gone(job) from None
        raise


def _end_of(job: str) -> str:
    noun, _, what = GONE.partition(".")
    return subjects.event(job, subjects.HUB, noun, what)


async def _start(bus: Bus, joblog: JobLog, after: int | None) -> int:
    """Return the first entry to read. Raises `LogGap` when it is no longer there."""
    try:
        # In a cluster that has just lost a node there is no answer until the log has a leader again, which takes
        # seconds.
        info = await api.insist(lambda: api.stream_info(bus, joblog.stream))
    except StreamFailure as failure:
        if failure.err_code != api.STREAM_NOT_FOUND:
            raise
        raise LogMissing(
            f"there is no job {joblog.job!r} in this hub: its first connect() or 'tensorhub publish' makes it"
        ) from None
    first = int(info["state"]["first_seq"])
    if after is None:
        return first
    if after + 1 < first:
        raise LogGap(
            f"the log of job {joblog.job!r} begins at {first} now, so the events after {after} are gone: "
            "ask for the versions, and watch with after=None"
        )
    return after + 1


def _watched(entry: StoredEntry, model: str) -> Watched | None:
    """Read an entry; None for what is no event (see docs/operate/security.md, "JetStream answers").

    A kind of event that a later release has added is given by its name and the fields that are known here.
    """
    try:
        event = read_event(entry.data)
    except MALFORMED:
        return _later(entry, model)
    if event is None:
        return None
    told = {name: getattr(event, name, None) for name in _TOLD}
    return Watched(seq=entry.seq, time=event.time, kind=kind_of(event), model=model, **told)


def _later(entry: StoredEntry, model: str) -> Watched | None:
    try:
        said = msgspec.json.decode(entry.data, type=dict[str, msgspec.Raw])
        known = {name: said[name] for name in ("time", "kind", *_TOLD) if name in said}
        place = {"seq": entry.seq, "model": model}
        return msgspec.json.decode(msgspec.json.encode(known | place), type=Watched)
    except MALFORMED:
        return None
