"""Answers questions about recent spans out of what this process keeps."""

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.message import Message
from tensorhub_common.errors import BadCommand, TensorHubError
from tensorhub_common.observability.deferred_spans import flush_deferred_spans
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.queries import QueryError
from tensorhub_common.protocol.spans import (
    QUESTIONS_PENDING_MAX,
    SPANS,
    TRANSFERS,
    TRANSFERS_MAX,
    FinishedSpan,
    Spans,
    SpansAsk,
    TransfersAsk,
)
from tensorhub_common.protocol.subjects import AskSubject, asks_of_all_jobs, parse_subject
from tensorhub_common.telemetry import process_spans
from tensorhub_common.telemetry.span_store import SpanStore


async def answer_traces(bus: Bus, process: str) -> None:
    """Answer questions about the spans that this process keeps, from now on; with telemetry off there is nothing."""
    keeper = process_spans.span_store()
    if keeper is None:
        return
    for what, look in ((TRANSFERS, _transfers), (SPANS, _spans)):
        answer = _Answer(keeper, process, look)
        await bus.serve(asks_of_all_jobs(what), answer, concurrent_max=1, pending_max=QUESTIONS_PENDING_MAX)


SPANS_MAX: Final = 10_000
"""The limit of spans in one process's answer; the bytes of an answer are bounded besides."""


class _Answer:
    """Answers one kind of question."""

    def __init__(self, keeper: SpanStore, process: str, look: "_Look") -> None:
        self._keeper, self._process, self._look = keeper, process, look

    async def __call__(self, question: Message) -> bytes:
        try:
            subject = parse_subject(question.subject)
            if not isinstance(subject, AskSubject) or subject.job is None:
                raise BadCommand(f"spans belong to a job, so they can't be asked for on {question.subject}")
            flush_deferred_spans()
            found, left_out = await asyncio.to_thread(self._look, self._keeper, subject.job, question.data)
        except MALFORMED as why:
            return msgspec.json.encode(
                QueryError(error=BadCommand.__name__, message=f"the question can't be read: {why}")
            )
        except TensorHubError as why:
            return msgspec.json.encode(QueryError(error=why.code, message=str(why)))
        return msgspec.json.encode(Spans(process=self._process, spans=tuple(found), left_out=left_out))


_Look = Callable[[SpanStore, str, bytes], tuple[list[FinishedSpan], int]]


def _transfers(keeper: SpanStore, job: str, question: bytes) -> tuple[list[FinishedSpan], int]:
    wanted = msgspec.json.decode(question, type=TransfersAsk) if question else TransfersAsk()
    if not 1 <= wanted.limit <= TRANSFERS_MAX:
        raise BadCommand(f"limit {wanted.limit} is out of range: ask for 1 to {TRANSFERS_MAX} {wanted.kind}s")
    same = {"tensorhub.job": job, "tensorhub.model": wanted.model, "tensorhub.version": wanted.version}
    same |= {"tensorhub.replica": wanted.replica, "tensorhub.group": wanted.group, "tensorhub.index": wanted.index}

    def fits(span: FinishedSpan) -> bool:
        return (
            span.name == wanted.kind
            and span.span.startswith(wanted.begins)
            and all(value is None or span.attributes.get(key) == value for key, value in same.items())
        )

    return keeper.newest(f'"{wanted.kind}"'.encode(), fits, wanted.limit)


def _spans(keeper: SpanStore, _: str, question: bytes) -> tuple[list[FinishedSpan], int]:
    """The id of a trace is enough to see it; not all of its spans name their job."""
    wanted = msgspec.json.decode(question, type=SpansAsk)
    return keeper.newest(wanted.trace.encode(), lambda _: True, SPANS_MAX)
