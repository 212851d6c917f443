"""A job's log: opened once, written once, and what stands in it, through whatever becomes of the server."""

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any

import pytest
from tests.integration.bus.conftest import fill, following_of, take
from tests.kit.nats import RunningNats
from tests.kit.waiting import until

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import (
    LogFull,
    LogMissing,
    MessageTooLarge,
    NoBus,
    StreamFailure,
    StreamMismatch,
    WrongLastSequence,
)
from tensorhub_common.jetstream import api, job_log
from tensorhub_common.jetstream.job_log import JobLog, list_jobs, open_job
from tensorhub_common.protocol.subjects import command_subject, event, log_stream


async def tried(work: Awaitable[int]) -> int | Exception:
    (result,) = await asyncio.gather(work, return_exceptions=True)
    assert isinstance(result, int | Exception)
    return result


async def test_opening_twice_is_opening_once(bus: Bus, job: str) -> None:
    log = await open_job(bus, job)
    assert await fill(log, 1) == 1
    again = await open_job(bus, job)
    assert await again.last_seq() == 1
    assert job in await list_jobs(bus)


async def test_an_operator_may_change_limits_and_nothing_that_the_log_rests_on(bus: Bus, job: str) -> None:
    await open_job(bus, job)
    config = job_log._config(job, 1)
    await api.api(bus, f"STREAM.UPDATE.{log_stream(job)}", config | {"max_bytes": 5_000_000})
    await open_job(bus, job)
    await api.api(bus, f"STREAM.UPDATE.{log_stream(job)}", config | {"discard": "old"})
    with pytest.raises(StreamMismatch, match="discard is 'old'"):
        await open_job(bus, job)


async def test_jobs_lists_logs_only(bus: Bus, job: str) -> None:
    other = f"OTHER_{job}"
    await api.api(bus, f"STREAM.CREATE.{other}", {"name": other, "subjects": [f"x.{job}.cmd.>"]})
    assert other not in await list_jobs(bus)
    assert job not in await list_jobs(bus)


async def test_a_job_that_nobody_opened_is_told(bus: Bus, job: str) -> None:
    log = JobLog(bus, job)
    append = log.append(command_subject(job, "publish"), b"", "m")
    for call in (append, log.last_seq(), log.last_event(), log.entry(1), anext(log.follow())):
        with pytest.raises(LogMissing):
            await call


@pytest.mark.parametrize("lies", [api.MISSING_LOOKS_MAX - 1, api.MISSING_LOOKS_MAX])
async def test_in_a_cluster_one_node_that_does_not_know_a_log_is_no_fact(
    log: JobLog, monkeypatch: pytest.MonkeyPatch, lies: int
) -> None:
    """It may have become the leader a moment ago, and not have come to the log's making yet: it is asked again."""
    await fill(log, 1)
    left, real = lies, api.api

    async def forgetful(bus: Bus, verb: str, *rest: Any) -> dict[str, Any]:
        nonlocal left
        if verb.startswith(("STREAM.INFO", "CONSUMER.CREATE")) and left:
            left -= 1
            raise StreamFailure("stream not found", api.STREAM_NOT_FOUND)
        return await real(bus, verb, *rest)

    monkeypatch.setattr(api, "api", forgetful)
    monkeypatch.setattr(api, "is_clustered", lambda _bus: True)
    monkeypatch.setattr(api, "MISSING_WAIT_S", 0.0)
    refused = pytest.raises(LogMissing) if lies == api.MISSING_LOOKS_MAX else contextlib.nullcontext()
    with refused:
        assert await log.last_seq() == 1
    # One more: the first one is said to who makes the consumer.
    left = lies + 1
    async with following_of(log) as entries:
        with refused:
            assert (await anext(entries)).seq == 1


async def test_the_same_id_is_written_once(log: JobLog) -> None:
    subject = command_subject(log.job, "publish")
    assert await log.append(subject, b"a", "one") == 1
    assert await log.append(subject, b"b", "two") == 2
    assert await log.append(subject, b"a", "one") == 1
    assert await log.last_seq() == 2
    with pytest.raises(MessageTooLarge):
        await log.append(subject, b"x" * (1 << 20), "three")


async def test_events_are_written_against_the_last_event_and_commands_do_not_count(log: JobLog) -> None:
    published = event(log.job, "policy", "version", "published")
    retired = event(log.job, "other", "version", "retired")
    await log.append(command_subject(log.job, "publish"), b"", "c1")
    assert await log.append(published, b"", "e1", expected_last_event_seq=0) == 2
    await log.append(command_subject(log.job, "publish"), b"", "c2")
    assert await log.append(retired, b"", "e2", expected_last_event_seq=2) == 4
    for stale in (0, 2, 3, 5):
        with pytest.raises(WrongLastSequence) as refusal:
            await log.append(published, b"", f"stale{stale}", expected_last_event_seq=stale)
        assert refusal.value.last_seq == 4
    assert await log.last_seq() == 4
    both = (log.append(published, b"", leader, expected_last_event_seq=4) for leader in ("one", "two"))
    results = await asyncio.gather(*both, return_exceptions=True)
    assert [type(each) for each in results if not isinstance(each, int)] == [WrongLastSequence]
    assert await log.last_seq() == 5


async def test_an_event_whose_acknowledgement_was_lost_is_recognised(log: JobLog) -> None:
    """The server compares sequences before it looks for duplicates, and so refuses our own repeat."""
    subject = event(log.job, "policy", "version", "published")
    first = await log.append(subject, b"", "e1", expected_last_event_seq=0)
    assert await log.append(subject, b"", "e1", expected_last_event_seq=0) == first
    await log.append(subject, b"", "e2", expected_last_event_seq=first)
    with pytest.raises(WrongLastSequence):
        await log.append(subject, b"", "e1", expected_last_event_seq=0)


async def test_a_full_log_refuses_and_says_so(log: JobLog, bus: Bus) -> None:
    config = job_log._config(log.job, 1) | {"max_bytes": 10_000}
    await api.api(bus, f"STREAM.UPDATE.{log.stream}", config)
    results = [
        await tried(log.append(command_subject(log.job, "publish"), b"x" * 1000, f"m{index}")) for index in range(20)
    ]
    written = [each for each in results if isinstance(each, int)]
    assert written == list(range(1, len(written) + 1))
    assert 0 < len(written) < 10
    assert all(isinstance(each, LogFull) and "maximum bytes" in str(each) for each in results[len(written) :])
    assert await log.last_seq() == len(written)


async def test_append_waits_for_the_server_and_writes_once(own_nats_server: RunningNats, own_log: JobLog) -> None:
    """Entries are appended all the time while the server is killed: each stands there exactly once."""
    subject, written = command_subject(own_log.job, "publish"), list[int]()
    stop = asyncio.Event()

    async def write() -> int:
        number = 0
        while not stop.is_set():
            written.append(await own_log.append(subject, b"", f"m{number}"))
            number += 1
        return number

    writing = asyncio.create_task(write())
    for _ in range(3):
        enough = len(written) + 20
        await asyncio.to_thread(own_nats_server.restart)
        await until(lambda enough=enough: len(written) >= enough)  # type: ignore[misc]
    stop.set()
    number = await writing
    assert written == list(range(1, number + 1))
    assert await own_log.last_seq() == number
    own_nats_server.kill()
    with pytest.raises(NoBus, match="unknown"):
        await own_log.append(subject, b"", "m", timeout_s=0.3)


async def test_the_last_event_and_command(log: JobLog) -> None:
    assert await log.last_event() is None
    assert await log.last_command() is None
    subject = event(log.job, "policy", "version", "published")
    await log.append(subject, b"first", "e1", {"traceparent": "00-ab"})
    await log.append(command_subject(log.job, "publish"), b"command", "c1")
    last, command = await log.last_event(), await log.last_command()
    assert last is not None
    assert (last.seq, last.subject, last.data, last.headers["traceparent"]) == (1, subject, b"first", "00-ab")
    assert command is not None
    assert command.seq == 2
    assert await log.entry(1) == last
    assert await log.entry(3) is None


async def test_time_is_the_same_for_every_way_of_reading(log: JobLog) -> None:
    await fill(log, 3)
    async with following_of(log) as entries:
        read = await take(entries, 3)
    assert [await log.entry(each.seq) for each in read] == read
    assert read[0].time < read[1].time < read[2].time
