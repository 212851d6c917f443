"""Reads a job's whole log until every command in it is decided, and writes it down."""

import asyncio
import contextlib
from pathlib import Path
from typing import Final

from tests.chaos.verdict import LogVerdict

from tensorhub_common.bus.connection import Bus
from tensorhub_common.jetstream.job_log import JobLog

DECIDED_S: Final = 15.0
"""All that stands in the log is decided within this."""


async def read_whole_log(bus: Bus, job: str, story: Path) -> LogVerdict:
    joblog, verdict = JobLog(bus, job), LogVerdict()
    with story.open("w") as lines:
        try:
            async with asyncio.timeout(DECIDED_S), contextlib.aclosing(joblog.follow(1)) as entries:
                last = await joblog.last_seq()
                async for entry in entries:
                    lines.write(f"{entry.seq} {entry.time:.3f} {entry.subject} {entry.data.decode()}\n")
                    verdict.read([entry])
                    if verdict.last >= last:
                        last = await joblog.last_seq()
                    if verdict.last >= last and not verdict.undecided:
                        break
        except TimeoutError:
            verdict.wrongs.append(f"commands without a whole outcome at the end: {verdict.undecided[:20]}")
    return verdict
