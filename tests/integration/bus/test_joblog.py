"""A job's log: opened and written once, and read in order, through whatever becomes of the server."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable
from contextlib import aclosing
from typing import Any

import pytest
from tests.bounds import WAIT_S
from tests.integration.bus.conftest import fill, following_of, reading, seqs, take
from tests.kit.nats import RunningNats
from tests.kit.waiting import until

from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.bus.errors import (
    LogFull,
    LogGap,
    LogMissing,
    LogShorter,
    MessageTooLarge,
    NoBus,
    StreamFailure,
    StreamMismatch,
    WrongLastSequence,
)
from tensorhub_common.bus.message import Message, parse_headers
from tensorhub_common.jetstream import api, job_log, log_reader
from tensorhub_common.jetstream.job_log import JobLog, list_jobs, open_job
from tensorhub_common.protocol.subjects import command_subject, commands_of, event, events_of, log_stream


async def tried(work: Awaitable[int]) -> int | Exception:
    (result,) = await asyncio.gather(work, return_exceptions=True)
    assert isinstance(result, int | Exception)
    return result


async def test_opening_twice_is_opening_once_and_logs_alone_are_listed(bus: Bus, job: str) -> None:
    other = f"OTHER_{job}"
    await api.api(bus, f"STREAM.CREATE.{other}", {"name": other, "subjects": [f"x.{job}.cmd.>"]})
    assert {other, job}.isdisjoint(await list_jobs(bus))
    await api.api(bus, f"STREAM.DELETE.{other}")
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


async def test_old_and_new_entries_come_in_order(log: JobLog) -> None:
    """More than one batch, so that several pulls are needed."""
    number = log_reader.BATCH + 10
    await asyncio.gather(
        *(log.append(command_subject(log.job, "publish"), b"", f"m{index}") for index in range(number))
    )
    async with following_of(log) as entries:
        read = await take(entries, number)
        assert [each.seq for each in read] == list(range(1, number + 1))
        assert [await log.entry(each.seq) for each in read[:2]] == read[:2], "time is the same in each way of reading"
        late = await log.append(event(log.job, "m", "version", "published"), b"body", "late", {"traceparent": "x"})
        (entry,) = await take(entries, 1)
    assert (entry.seq, entry.data, entry.headers["traceparent"]) == (late, b"body", "x")


async def test_from_the_middle_and_from_the_end(log: JobLog) -> None:
    last = await fill(log, 5)
    assert await seqs(log, 2, 4) == [4, 5]
    async with following_of(log, last + 1) as entries:
        waiting = asyncio.create_task(anext(entries))
        await fill(log, 1, "late")
        assert (await asyncio.wait_for(waiting, WAIT_S)).seq == last + 1


async def test_a_filter_lets_its_subjects_through(log: JobLog) -> None:
    await fill(log, 2)
    await log.append(event(log.job, "a", "version", "published"), b"", "e1")
    await log.append(event(log.job, "b", "version", "published"), b"", "e2")
    await fill(log, 1, "late")
    assert await seqs(log, 2, 1, events_of(log.job)) == [3, 4]
    assert await seqs(log, 1, 1, events_of(log.job, "b")) == [4]
    assert await seqs(log, 1, 3, commands_of(log.job)) == [5]


async def test_what_was_purged_is_a_gap_and_not_silently_skipped(log: JobLog, bus: Bus) -> None:
    """Before what is left, in its middle, and to the log's end, behind which it goes on."""
    await fill(log, 5)
    await api.api(bus, f"STREAM.PURGE.{log.stream}", {"seq": 4})
    for start in (1, 3):
        with pytest.raises(LogGap, match=f"no entry {start}"):
            await anext(log.follow(start))
    assert await seqs(log, 2, 4) == [4, 5]
    await log.append(event(log.job, "m", "version", "published"), b"", "e")
    last = await fill(log, 1, "late")
    await api.api(bus, f"STREAM.PURGE.{log.stream}", {"filter": events_of(log.job)})
    async with following_of(log, 4) as entries:
        assert [each.seq for each in await take(entries, 2)] == [4, 5]
        with pytest.raises(LogGap, match="no entry 6"):
            await take(entries, 1)
    await api.api(bus, f"STREAM.PURGE.{log.stream}", {})
    with pytest.raises(LogGap):
        await anext(log.follow(last))
    async with following_of(log, last + 1) as entries:
        assert await fill(log, 1, "later") == last + 1
        assert [each.seq for each in await take(entries, 1)] == [last + 1]


@pytest.mark.parametrize("lies", [3, 1_000])
async def test_a_leader_that_slept_is_asked_again(log: JobLog, monkeypatch: pytest.MonkeyPatch, lies: int) -> None:
    """Of a log on three nodes, one that was replaced and has not noticed yet knows an end that was passed."""
    await fill(log, 5)
    asked = 0
    real = api.api

    async def old_word(bus: Bus, verb: str, *rest: Any) -> dict[str, Any]:
        nonlocal asked
        answer = await real(bus, verb, *rest)
        if verb.startswith("STREAM.INFO"):
            asked += 1
            answer["config"]["num_replicas"] = 3
            if asked <= lies:
                answer["state"]["last_seq"] = 2
        return answer

    monkeypatch.setattr(api, "api", old_word)
    monkeypatch.setattr(log_reader, "LOOKS_MAX", 4)
    async with following_of(log, 5) as entries:
        if lies == 3:
            assert [each.seq for each in await take(entries, 1)] == [5]
        else:
            with pytest.raises(LogShorter):
                await take(entries, 1)
    assert asked == min(lies, 4) + 1


@pytest.mark.parametrize("is_anew", [False, True])
async def test_a_log_that_was_deleted_is_told(
    own_nats_server: RunningNats, own_bus: Bus, own_log: JobLog, *, is_anew: bool
) -> None:
    """Also where it was made anew, with as many entries as the one that was read; and one that is shorter."""
    await fill(own_log, 3)
    with pytest.raises(LogShorter):
        await anext(own_log.follow(5))
    async with following_of(own_log) as entries:
        await take(entries, 3)
        await api.api(own_bus, f"STREAM.DELETE.{own_log.stream}")
        if is_anew:
            await open_job(own_bus, own_log.job)
            await fill(own_log, 5, "other")
            own_nats_server.restart()
        with pytest.raises(LogShorter, match=None if is_anew else "deleted"):
            await take(entries, 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_nothing_is_skipped_or_repeated_through_restarts(
    own_nats_server: RunningNats, job: str, number: int
) -> None:
    """A writer and a reader on connections of their own, and a server that is killed again and again."""
    async with (
        await connect(own_nats_server.url, name="writer") as writer,
        await connect(own_nats_server.url, name="reader") as reader,
    ):
        log = await open_job(writer, job)
        stop = asyncio.Event()

        async def write() -> int:
            seq = 0
            while not stop.is_set():
                seq = await log.append(command_subject(job, "publish"), str(seq + 1).encode(), f"m{seq}")
            return seq

        writing = asyncio.create_task(write())
        async with following_of(JobLog(reader, job)) as entries:
            read = await take(entries, 20)
            for _ in range(3):
                own_nats_server.signal(number)
                await asyncio.to_thread(own_nats_server.restart)
                read += await take(entries, 50)
            stop.set()
            last = await writing
            read += await take(entries, last - read[-1].seq)
    assert [(each.seq, each.data) for each in read] == [(seq, str(seq).encode()) for seq in range(1, last + 1)]


async def test_it_resumes_when_its_consumer_is_gone_or_a_message_was_lost(log: JobLog, bus: Bus) -> None:
    await fill(log, 10)
    async with reading(log) as (reader, entries):
        await take(entries, 2)
        await until(lambda: len(reader._arrived) >= 8)
        del reader._arrived[3]
        assert [each.seq for each in await take(entries, 8)] == list(range(3, 11))
        listed = await api.api(bus, f"CONSUMER.NAMES.{log.stream}", {})
        for name in listed["consumers"]:
            await api.api(bus, f"CONSUMER.DELETE.{log.stream}.{name}")
        await fill(log, 2, "late")
        assert [each.seq for each in await take(entries, 2)] == [11, 12]


async def test_a_stream_that_is_refused_is_told_once_and_so_is_its_end(
    log: JobLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However often it is tried; the callback gets each failure."""
    monkeypatch.setattr(log_reader, "OPEN_WAIT_S", 0.0)
    last = await fill(log, 1)
    states: list[Exception | None] = []
    reader = log_reader.LogReader(log._bus, log.job, log.stream, 1, (), on_read_state=states.append)
    begin, failures = reader._begin, [StreamFailure("JetStream refused", 1) for _ in range(20)]

    async def refused() -> None:
        if failures:
            raise failures.pop()
        await begin()

    monkeypatch.setattr(reader, "_begin", refused)
    async with aclosing(reader.entries()) as entries:
        assert (await anext(entries)).seq == last
    assert len(states) == 21
    lost, back = (record.getMessage() for record in caplog.records)
    assert lost == f"stream {log.stream} can't be followed, so that is tried again: JetStream refused"
    assert back.startswith(f"stream {log.stream} is followed again after ")
    assert back.endswith(" s; 20 attempts failed")


def is_wanted(body: bytes) -> bool:
    return body.startswith(b"wanted")


async def test_what_is_not_wanted_passes_by(log: JobLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wake the reader, and more is pulled all the same."""
    monkeypatch.setattr(log_reader, "BATCH", 8)
    async with reading(log, (), is_wanted) as (reader, entries):
        first = asyncio.create_task(anext(entries))
        await until(lambda: reader._wake is not None)
        last, consumer = await fill(log, 5), reader._consumer
        await until(lambda: reader._next_seq > last)
        assert not first.done()
        last = await fill(log, 1, "wanted")
        assert (await asyncio.wait_for(first, WAIT_S)).seq == last
        await fill(log, 30, "more")
        last, woken = await fill(log, 1, "wanted too"), 1
        while (await take(entries, 1))[0].seq < last:
            woken += 1
        assert woken < 31, "the reader is woken by what is wanted, and where more is to be pulled"
        assert reader._consumer == consumer


async def test_what_was_wanted_and_lost_is_read_again(log: JobLog) -> None:
    """What passes by shows the gap, too."""
    async with reading(log, (commands_of(log.job),), is_wanted) as (reader, entries):
        heard, hear = 0, reader._on_message

        def lossy(message: Message) -> None:
            nonlocal heard
            heard += is_wanted(message.data)
            if heard != 1 or not is_wanted(message.data):
                hear(message)

        reader._on_message = lossy  # type: ignore[method-assign]
        waiting = asyncio.create_task(take(entries, 1))
        lost = await fill(log, 1, "wanted")
        await fill(log, 3)
        [entry] = await waiting
        while not is_wanted(entry.data):
            [entry] = await take(entries, 1)
        assert entry.seq == lost


async def test_a_pull_that_expires_is_renewed(log: JobLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "PULL_EXPIRES_S", 0.2)
    monkeypatch.setattr(log_reader, "HEARTBEAT_S", 0.1)
    async with reading(log) as (reader, entries):
        waiting = asyncio.create_task(anext(entries))
        await until(lambda: reader._pull_no >= 3)
        consumer = reader._consumer
        await fill(log, 1)
        assert (await asyncio.wait_for(waiting, WAIT_S)).seq == 1
        assert reader._consumer == consumer


async def test_a_log_with_poison_in_it_is_followed(bus: Bus, log: JobLog) -> None:
    """A subject that is no UTF-8 and a header block that is none are entries like others; one reads on behind them."""
    prefix = f"tensorhub.v1.{log.job}.cmd.".encode()
    garbage = b"garbage!!!"
    await _raw(
        bus.url,
        b"PUB " + prefix + b"\xff\xfe 2\r\n{}\r\n",
        b"HPUB " + prefix + b"publish %d %d\r\n" % (len(garbage), len(garbage) + 2) + garbage + b"{}\r\n",
        b"HPUB " + prefix + b"publish 16 16\r\nNATS/1.0 503\r\n\r\n\r\n",
    )
    last = await fill(log, 1, "after")
    assert await seqs(log, last) == list(range(1, last + 1))
    assert last >= 2
    assert await log.entry(last - 1) is not None


async def _raw(url: str, *lines: bytes) -> None:
    """Say these bytes to the server as a client that keeps no rule but the protocol's lengths."""
    login, _, address = url.removeprefix("nats://").partition("@")
    (host, _, port), (user, _, password) = address.partition(":"), login.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    await reader.readline()
    login = f'"user":"{user}","pass":"{password}"'
    writer.write(f'CONNECT {{{login},"verbose":false,"headers":true}}\r\n'.encode())
    writer.write(b"".join(lines) + b"PING\r\n")
    await writer.drain()
    while (await reader.readline()).strip() != b"PONG":
        pass
    writer.close()


def test_headers_that_are_none_are_left_out() -> None:
    """What can be read of a header block is read; nothing in it raises."""
    assert parse_headers(b"NATS/1.0\r\nA: 1\r\nno colon\r\n: empty\r\nB:2\r\n\r\n") == {"A": "1", "B": "2"}
    assert parse_headers(b"NATS/1.0 503\r\n\r\n") == {"Status": "503"}
    assert parse_headers(b"NATS/1.0 100 Idle Heartbeat\r\nX: y\r\n\r\n")["Status"] == "100"
    assert parse_headers(b"\xff\xfe") == {}
