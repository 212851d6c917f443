"""What a finished read tells its caller. Pure."""

from collections.abc import Sequence

from msgspec import structs

from tensorhub_agent.transfer.source import Source
from tensorhub_agent.transfer.transfer import Transfer
from tensorhub_common.programs.program import TransferProgram
from tensorhub_common.protocol.plans import Plan
from tensorhub_common.protocol.worker import EncodedBytes, ReadReport, ReadStages, SourceReport


def report_of(
    transfer: Transfer,
    nbytes: Sequence[int],
    total_s: float,
    retried: int | None = None,
    *,
    program: TransferProgram | None = None,
    turned_by: Plan | None = None,
) -> ReadReport:
    """Sum up a read that is done, or how far it came. `retried` counts earlier transfers of it too.

    `program` is what it went by, unless it went piece by piece, and `turned_by` the plan that named it.
    """
    sources = transfer.sources.values()
    return ReadReport(
        nbytes=sum(nbytes),
        wire_s=max(transfer.ended - transfer.started, 0.0),
        total_s=total_s,
        pieces=len(nbytes),
        retried=sum(reading.retried for reading in sources) if retried is None else retried,
        kept=transfer.verification.kept,
        got_bytes=sum(reading.got_bytes for reading in sources),
        wasted_bytes=sum(reading.wasted_bytes for reading in sources),
        plans=transfer.plan_requests.count,
        base=transfer.base.version
        if transfer.base is not None and any("delta" in each.encoded for each in sources)
        else None,
        sources=tuple(_source(reading) for reading in sources),
        unread=() if program is None else program.unread,
        unread_count=0 if program is None else program.unread_count,
        unregistered=() if turned_by is None else turned_by.unregistered,
        unregistered_count=0 if turned_by is None else turned_by.unregistered_count,
    )


def report_of_failure(why: str, total_s: float, far: ReadReport | None = None) -> ReadReport:
    """Say why an update has brought nothing. `far` is how far it came."""
    nothing = ReadReport(nbytes=0, wire_s=0.0, total_s=total_s, pieces=0, retried=0, kept=0, sources=(), failure=why)
    if far is None:
        return nothing
    return structs.replace(
        nothing, retried=far.retried, wasted_bytes=far.wasted_bytes, plans=far.plans, sources=far.sources
    )


def encoded_of(reading: Source) -> tuple[EncodedBytes, ...]:
    """Return what came of a source otherwise than as it is."""
    return tuple(each for _, each in sorted(reading.encoded.items()))


def _source(reading: Source) -> SourceReport:
    return SourceReport(
        agent=reading.share.source.agent,
        replica=reading.share.source.replica,
        transport=reading.share.transport,
        nbytes=reading.got_bytes,
        pieces=reading.got_pieces,
        retried=reading.retried,
        wasted_bytes=reading.wasted_bytes,
        lost=reading.lost,
        encoded=encoded_of(reading),
        why=reading.share.why,
    )


def stages_of(transfer: Transfer, began: float, waited_s: float, now: float) -> ReadStages:
    """Say what of a read that began then, and is over now, took how long.

    `waited_s` is for how long nothing was decided. `transfer` is the last one: what earlier ones took, which came to
    nothing, counts until its plan.
    """
    return ReadStages(
        round_s=waited_s,
        plan_s=transfer.planned_at - began - waited_s,
        lease_s=transfer.leased_at - transfer.planned_at,
        start_s=transfer.started - transfer.leased_at,
        first_s=transfer.first_at - transfer.started,
        wire_s=transfer.last_at - transfer.first_at,
        verify_s=transfer.ended - transfer.last_at,
        ready_s=now - transfer.ended,
    )


def transfer_s(report: ReadReport) -> float:
    """Return for how long a read was under way, however often it was planned: all but the wait for a decision."""
    if report.stages is None:
        return report.total_s
    seconds: float = sum(structs.astuple(report.stages))
    return seconds - report.stages.round_s
