"""Looks up a log's last event, which other entries on events' subjects may follow.

JetStream puts its answers wherever a request's reply subject points, also on events' subjects, and publishing compares
with the last entry there, whatever it is. Only reading the entries in their order tells which are events. So where the
last entry is no event, all entries that are not folded yet are read.
"""

import asyncio
from contextlib import aclosing
from typing import Final

from tensorhub_common.bus.errors import LogGap, NoAnswer
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.jetstream.log_entry import StoredEntry
from tensorhub_common.protocol.log.codec import read_event
from tensorhub_common.protocol.subjects import events_of
from tensorhub_registry.core.job_fold import JobFold, LastEvent

LOOK_S_MAX: Final = 5.0
"""Bound of reading what is not folded yet, a million entries in that time. After it the lookup is tried again later."""


async def last_event(log: JobLog, fold: JobFold) -> LastEvent | None:
    """Return the log's last event, and the last entry on an event's subject; None: there is no such entry.

    Raises `NoAnswer` when it could not be looked up now, and whatever else the log raises.
    """
    last = await log.last_event()
    if last is None:
        return None
    if read_event(last.data) is not None:
        return LastEvent(last)
    if last.seq <= fold.seq:
        return LastEvent(None, last.seq)
    try:
        async with asyncio.timeout(LOOK_S_MAX):
            return LastEvent(await _last_before(log, fold.seq + 1, last.seq), last.seq)
    except (TimeoutError, LogGap):
        raise NoAnswer(f"the last event of job {log.job!r} could not be found: try again") from None


async def _last_before(log: JobLog, first: int, end: int) -> StoredEntry | None:
    found = None
    async with aclosing(log.follow(first, events_of(log.job))) as entries:
        async for entry in entries:
            if entry.seq < end and read_event(entry.data) is not None:
                found = entry
            if entry.seq >= end:
                break
    return found
