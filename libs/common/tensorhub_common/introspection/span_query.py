"""Asking all processes of the hub for the spans that they keep, and answering.

A question goes out once, and each registry, planner and agent answers for itself; no disk is shared. Always true: the
asker waits for a bounded time and takes a bounded number of answers; an answering process looks through its files in a
thread, for one question at a time, and answers what it can't read with an error.
"""

from collections.abc import Collection

import msgspec

from tensorhub_common.bus.connection import Bus
from tensorhub_common.introspection.gather import GATHER_S_MAX, gather_answers
from tensorhub_common.protocol.spans import (
    SPANS,
    TRANSFERS,
    FinishedSpan,
    Spans,
    SpansAsk,
    TransfersAsk,
)
from tensorhub_common.protocol.subjects import query_subject


class CollectedSpans(msgspec.Struct, frozen=True, kw_only=True):
    """What all processes together know."""

    spans: tuple[FinishedSpan, ...]
    processes: frozenset[str]
    """Who answered."""
    left_out: int
    """How many spans did not fit into the answers."""


# ------------------------------------------------------------------------------------------------------- answering


# ---------------------------------------------------------------------------------------------------------- asking


async def collect_spans(
    bus: Bus, job: str, question: TransfersAsk | SpansAsk, known: Collection[str] = (), timeout_s: float = GATHER_S_MAX
) -> CollectedSpans:
    """Ask every process, and return what came within the bound. `known` are processes that should answer.

    Raises the error of a process that refuses the question, and `NoBus` without a connection.
    """
    what = TRANSFERS if isinstance(question, TransfersAsk) else SPANS
    came = await gather_answers(bus, query_subject(job, what), msgspec.json.encode(question), Spans, known, timeout_s)
    # A span that two processes keep counts once.
    spans = {(span.trace, span.span): span for answer in came for span in answer.spans}
    return CollectedSpans(
        spans=tuple(sorted(spans.values(), key=lambda span: (span.start_ns, span.end_ns))),
        processes=frozenset(answer.process for answer in came),
        left_out=sum(answer.left_out for answer in came),
    )
