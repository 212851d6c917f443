"""A job's log on the shared server or on one of the test's own, filled and followed."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, TypeVar

import pytest

from tensorhub_common.bus.connection import Bus
from tensorhub_common.jetstream.job_log import JobLog, open_job
from tensorhub_common.jetstream.log_entry import StoredEntry
from tensorhub_common.jetstream.log_reader import LogReader
from tensorhub_common.protocol.subjects import command_subject

Entry = TypeVar("Entry")


@pytest.fixture
async def log(bus: Bus, job: str) -> JobLog:
    return await open_job(bus, job)


@pytest.fixture
async def own_log(own_bus: Bus, job: str) -> JobLog:
    return await open_job(own_bus, job)


@contextlib.asynccontextmanager
async def following_of(log: JobLog, *args: Any) -> AsyncIterator[AsyncGenerator[StoredEntry, None]]:
    entries = log.follow(*args)
    try:
        yield entries
    finally:
        await entries.aclose()


@contextlib.asynccontextmanager
async def reading(
    log: JobLog, subjects: tuple[str, ...] = (), is_wanted: Callable[[bytes], bool] | None = None
) -> AsyncIterator[tuple[LogReader, AsyncGenerator[StoredEntry, None]]]:
    """Follow a log from its beginning with a reader that is looked into."""
    reader = LogReader(log._bus, log.job, log.stream, 1, subjects, is_wanted)
    entries = reader.entries()
    try:
        yield reader, entries
    finally:
        await entries.aclose()


async def take(entries: AsyncGenerator[Entry, None], number: int, timeout_s: float = 10.0) -> list[Entry]:
    async with asyncio.timeout(timeout_s):
        return [await anext(entries) for _ in range(number)]


async def seqs(log: JobLog, number: int, *args: Any) -> list[int]:
    async with following_of(log, *args) as entries:
        return [each.seq for each in await take(entries, number)]


async def fill(log: JobLog, number: int, mark: str = "m") -> int:
    seq = 0
    for index in range(number):
        seq = await log.append(command_subject(log.job, "publish"), f"{mark}{index}".encode(), f"{mark}{index}")
    return seq
