"""What an agent's reads are doing just now, as `tensorhub status` shows it. Pure.

Always true: at most `READS_TOLD_MAX` reads and `SOURCES_TOLD_MAX` sources of each are told; looking changes nothing.
"""

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from tensorhub_agent.core.operations.read import ReadOperation, read_of
from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.transfer.source import Source
from tensorhub_agent.transfer.transfer import Transfer, TransferPhase
from tensorhub_common.protocol.activity import READS_TOLD_MAX, SOURCES_TOLD_MAX, ActiveRead, ReadSource


def reads_under_way(
    shards: Iterable[ShardCore], now: float, trace_of: Callable[[int], str | None]
) -> tuple[tuple[ActiveRead, ...], int]:
    """Return the reads that are under way, oldest first, and how many more there are.

    `trace_of` returns the trace of a call, by its number.
    """
    reads = [read for core in shards if (read := read_of(core)) is not None]
    reads.sort(key=lambda read: read.began)
    told = reads[:READS_TOLD_MAX]
    return tuple(_told(read, now, trace_of(read.call.call)) for read in told), len(reads) - len(told)


def _told(read: ReadOperation, now: float, trace: str | None) -> ActiveRead:
    key, transfer = read.core.key, read.transfer
    done = 0 if transfer is None else transfer.done_bytes()
    filling = transfer is not None and transfer.phase is TransferPhase.RUNNING and now > transfer.started
    return ActiveRead(
        model=key.model,
        replica=key.replica,
        shard=key.shard,
        want=str(read.call.want),
        version=None if transfer is None else transfer.version,
        stage=str(read.stage),
        done_bytes=done,
        total_bytes=sum(read.core.spec.nbytes),
        bytes_per_s=round(done / (now - transfer.started)) if transfer is not None and filling else 0.0,
        for_s=round(now - read.began, 3),
        still_s=round(still_s(transfer, now), 3) if transfer is not None and filling else 0.0,
        plan_s=None
        if transfer is None or not transfer.plan_requests.is_out
        else round(now - transfer.plan_requests.sent, 3),
        trace=trace,
        sources=() if transfer is None else _sources(transfer, now),
    )


def still_s(transfer: Transfer, now: float) -> float:
    """Return for how long nothing has come of a read that is being filled."""
    last = max((source.last_progress_at for source in transfer.sources.values() if source.in_flight), default=0.0)
    return now - max(transfer.started, transfer.last_at, last)


def _sources(transfer: Transfer, now: float) -> tuple[ReadSource, ...]:
    """Return each agent once for each transport, however often it was opened: its last session says how far it is."""
    found: dict[tuple[str, str], ReadSource] = {}
    for source in transfer.sources.values():
        told = _source(source, now)
        before = found.get((told.agent, told.transport))
        nbytes = told.nbytes + (0 if before is None else before.nbytes)
        found[told.agent, told.transport] = replace(told, nbytes=nbytes)
    return tuple(sorted(found.values(), key=lambda each: -each.nbytes)[:SOURCES_TOLD_MAX])


def _source(source: Source, now: float) -> ReadSource:
    return ReadSource(
        agent=source.share.source.agent,
        transport=str(source.share.transport),
        phase=str(source.phase),
        nbytes=source.got_bytes + source.unconfirmed_bytes,
        silent_s=round(now - source.last_progress_at, 3),
    )


def _plan_s(transfer: Transfer | None, now: float) -> float | None:
    """Return for how long an answer of the planner is awaited."""
    requests = None if transfer is None else transfer.plan_requests
    return None if requests is None or not requests.is_out else round(now - requests.sent, 3)
