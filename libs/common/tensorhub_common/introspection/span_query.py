"""Asking all processes of the hub for the spans that they keep, and answering.

A question goes out once, and each registry, planner and agent answers for itself; no disk is shared. Always true: the
asker waits for a bounded time and takes a bounded number of answers; an answering process looks through its files in a
thread, for one question at a time, and answers what it can't read with an error.
"""

import asyncio
from collections.abc import Callable, Collection
from typing import Final

import msgspec

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.message import Message
from tensorhub_common.errors import BadCommand, TensorHubError
from tensorhub_common.introspection.gather import GATHER_S_MAX, gather_answers
from tensorhub_common.protocol.decoding import MALFORMED
from tensorhub_common.protocol.queries import Error
from tensorhub_common.protocol.spans import TRANSFER, TRANSFERS_MAX, Span, Spans, SpansAsk, TransfersAsk
from tensorhub_common.protocol.subjects import AskSubject, ask, asks_of_all_jobs, parse
from tensorhub_common.telemetry import process as telemetry_process
from tensorhub_common.telemetry.span_maker import flush_waiting
from tensorhub_common.telemetry.span_store import SpanKeeper

TRANSFERS: Final = "transfers"
SPANS: Final = "spans"

QUESTIONS_PENDING_MAX: Final = 16
SPANS_MAX: Final = 10_000
"""One process answers with at most so many spans; the bytes of an answer are bounded besides."""


class Gathered(msgspec.Struct, frozen=True, kw_only=True):
    """What all processes together know."""

    spans: tuple[Span, ...]
    processes: frozenset[str]
    """Who answered."""
    left_out: int
    """How many spans did not fit into the answers."""


# ------------------------------------------------------------------------------------------------------- answering


async def answer_traces(bus: Bus, process: str) -> None:
    """Answer questions about the spans that this process keeps, from now on; with telemetry off there is nothing."""
    keeper = telemetry_process.keeper()
    if keeper is None:
        return
    for what, look in ((TRANSFERS, _transfers), (SPANS, _spans)):
        answer = _Answer(keeper, process, look)
        await bus.serve(asks_of_all_jobs(what), answer, concurrent_max=1, pending_max=QUESTIONS_PENDING_MAX)


class _Answer:
    """Answers one kind of question."""

    def __init__(self, keeper: SpanKeeper, process: str, look: "_Look") -> None:
        self._keeper, self._process, self._look = keeper, process, look

    async def __call__(self, question: Message) -> bytes:
        try:
            subject = parse(question.subject)
            if not isinstance(subject, AskSubject) or subject.job is None:
                raise BadCommand(f"spans belong to a job, so they can't be asked for on {question.subject}")
            flush_waiting()
            found, left_out = await asyncio.to_thread(self._look, self._keeper, subject.job, question.data)
        except MALFORMED as why:
            return msgspec.json.encode(Error(error=BadCommand.__name__, message=f"the question can't be read: {why}"))
        except TensorHubError as why:
            return msgspec.json.encode(Error(error=why.code, message=str(why)))
        return msgspec.json.encode(Spans(process=self._process, spans=tuple(found), left_out=left_out))


_Look = Callable[[SpanKeeper, str, bytes], tuple[list[Span], int]]


def _transfers(keeper: SpanKeeper, job: str, question: bytes) -> tuple[list[Span], int]:
    wanted = msgspec.json.decode(question, type=TransfersAsk) if question else TransfersAsk()
    if not 1 <= wanted.limit <= TRANSFERS_MAX:
        raise BadCommand(f"limit {wanted.limit} is out of range: ask for 1 to {TRANSFERS_MAX} transfers")
    same = {"tensorhub.job": job, "tensorhub.model": wanted.model, "tensorhub.version": wanted.version}
    same |= {"tensorhub.replica": wanted.replica}

    def fits(span: Span) -> bool:
        return (
            span.name == TRANSFER
            and span.span.startswith(wanted.begins)
            and all(value is None or span.attributes.get(key) == value for key, value in same.items())
        )

    return keeper.newest(f'"{TRANSFER}"'.encode(), fits, wanted.limit)


def _spans(keeper: SpanKeeper, _: str, question: bytes) -> tuple[list[Span], int]:
    """Whoever knows the id of a trace may see it; not all of its spans name their job."""
    wanted = msgspec.json.decode(question, type=SpansAsk)
    return keeper.newest(wanted.trace.encode(), lambda _: True, SPANS_MAX)


# ---------------------------------------------------------------------------------------------------------- asking


async def gather(
    bus: Bus, job: str, question: TransfersAsk | SpansAsk, known: Collection[str] = (), timeout_s: float = GATHER_S_MAX
) -> Gathered:
    """Ask every process, and return what came within the bound. `known` are processes that should answer.

    Raises the error of a process that refuses the question, and `NoBus` without a connection.
    """
    what = TRANSFERS if isinstance(question, TransfersAsk) else SPANS
    came = await gather_answers(bus, ask(job, what), msgspec.json.encode(question), Spans, known, timeout_s)
    # A span that two processes keep counts once.
    spans = {(span.trace, span.span): span for answer in came for span in answer.spans}
    return Gathered(
        spans=tuple(sorted(spans.values(), key=lambda span: (span.start_ns, span.end_ns))),
        processes=frozenset(answer.process for answer in came),
        left_out=sum(answer.left_out for answer in came),
    )
