"""What every process of the hub does just now: the question to all of them, and the answering side.

A process answers for itself, so one that does not answer is the finding: it is gone, stopped or cut off from NATS.
"""

import logging
import time
from collections.abc import Callable, Collection
from typing import Final

import msgspec

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import NotPermitted
from tensorhub_common.bus.message import Message
from tensorhub_common.errors import BadCommand
from tensorhub_common.introspection.gather import GATHER_S_MAX, gather_answers
from tensorhub_common.protocol.activity import Activity
from tensorhub_common.protocol.subjects import AskSubject, asks_of_all_jobs, parse_subject, query_subject
from tensorhub_common.runtime.supervision import fault_counts

ACTIVITY: Final = "activity"
QUESTIONS_PENDING_MAX: Final = 64

OfJob = Callable[[str, Activity], Activity]
"""Adds what the process does in a job to what it says of itself."""

_began: Final = time.monotonic()
_log: Final = logging.getLogger(__name__)


async def answer_activity(bus: Bus, process: str, role: str, of_job: OfJob | None = None) -> None:
    """Answer what this process does, from now on."""

    async def answer(question: Message) -> bytes:
        subject = parse_subject(question.subject)
        if not isinstance(subject, AskSubject) or subject.job is None:
            raise BadCommand(f"what a process does is asked for by job, so not on {question.subject}")
        now = time.monotonic()
        about = Activity(
            process=process,
            role=role,
            up_s=round(now - _began, 3),
            nats_s=round(now - (bus.connected_since or now), 3),
            nats_lost=bus.lost_count,
            faults=sum(fault_counts().values()),
        )
        return msgspec.json.encode(about if of_job is None else of_job(subject.job, about))

    try:
        await bus.serve(asks_of_all_jobs(ACTIVITY), answer, concurrent_max=1, pending_max=QUESTIONS_PENDING_MAX)
    except NotPermitted:
        # Users of NATS that were made by an earlier release; the bus has logged what to do. All else goes on.
        _log.info("%s does not tell 'tensorhub status' what it does: NATS does not let it answer", process)


async def gather_activity(
    bus: Bus, job: str, known: Collection[str] = (), timeout_s: float = GATHER_S_MAX
) -> tuple[Activity, ...]:
    """Ask every process what it does in a job. `known` are processes that should answer.

    Raises `NoBus` without a connection. A process that does not answer within the bound is left out.
    """
    return await gather_answers(bus, query_subject(job, ACTIVITY), b"", Activity, known, timeout_s)
