"""What a finished read tells its caller. Pure."""

from collections.abc import Sequence

from tensorhub_agent.transfer import Transfer
from tensorhub_common.wire.worker import ReadReport, SourceReport


def report_of(transfer: Transfer, nbytes: Sequence[int], total_s: float) -> ReadReport:
    """Sum up a read that is done."""
    sources = tuple(
        SourceReport(
            agent=reading.share.source.agent,
            replica=reading.share.source.replica,
            transport=reading.share.transport,
            nbytes=reading.got_bytes,
            why=reading.share.why,
        )
        for reading in transfer.sources.values()
    )
    return ReadReport(
        nbytes=sum(nbytes),
        wire_s=max(transfer.ended - transfer.started, 0.0),
        total_s=total_s,
        pieces=len(nbytes),
        retried=transfer.retried,
        kept=transfer.proof.kept,
        sources=sources,
    )
