"""A job's log: written once, read in order, each entry exactly once, through whatever becomes of the server."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import Any

import pytest
from tests.integration.conftest import RunningNats

from tensorhub_common.bus import following, jetstream, joblog
from tensorhub_common.bus.connection import Bus, connect
from tensorhub_common.bus.entry import Entry
from tensorhub_common.bus.failures import (
    LogFull,
    LogGap,
    LogMissing,
    LogShorter,
    MessageTooLarge,
    NoBus,
    StreamMismatch,
    WrongLastSequence,
)
from tensorhub_common.bus.joblog import JobLog, jobs, open_job
from tensorhub_common.bus.message import Message
from tensorhub_common.subjects import cmd, commands_of, event, events_of, log_stream


@pytest.fixture
async def log(bus: Bus, job: str) -> JobLog:
    return await open_job(bus, job)


@pytest.fixture
async def own_log(own_bus: Bus, job: str) -> JobLog:
    return await open_job(own_bus, job)


@contextlib.asynccontextmanager
async def following_of(log: JobLog, *args: Any) -> AsyncIterator[AsyncGenerator[Entry, None]]:
    entries = log.follow(*args)
    try:
        yield entries
    finally:
        await entries.aclose()


async def take(entries: AsyncGenerator[Entry, None], number: int, timeout_s: float = 10.0) -> list[Entry]:
    """Return the next entries."""
    async with asyncio.timeout(timeout_s):
        return [await anext(entries) for _ in range(number)]


async def _until(entries: AsyncGenerator[Entry, None], last: int) -> AsyncIterator[Entry]:
    async for entry in entries:
        yield entry
        if entry.seq == last:
            return


async def tried(work: Awaitable[int]) -> int | Exception:
    """Return what came of it, an error too."""
    (result,) = await asyncio.gather(work, return_exceptions=True)
    assert isinstance(result, int | Exception)
    return result


async def fill(log: JobLog, number: int, mark: str = "m") -> int:
    seq = 0
    for index in range(number):
        seq = await log.append(cmd(log.job, "publish"), f"{mark}{index}".encode(), f"{mark}{index}")
    return seq


class TestOpening:
    async def test_opening_twice_is_opening_once(self, bus: Bus, job: str) -> None:
        log = await open_job(bus, job)
        assert await fill(log, 1) == 1
        again = await open_job(bus, job)
        assert await again.last_seq() == 1
        assert job in await jobs(bus)

    async def test_an_operator_may_change_limits_and_nothing_that_the_log_rests_on(self, bus: Bus, job: str) -> None:
        await open_job(bus, job)
        config = joblog._config(job, 1)
        await jetstream.api(bus, f"STREAM.UPDATE.{log_stream(job)}", config | {"max_bytes": 5_000_000})
        await open_job(bus, job)
        await jetstream.api(bus, f"STREAM.UPDATE.{log_stream(job)}", config | {"discard": "old"})
        with pytest.raises(StreamMismatch, match="discard is 'old'"):
            await open_job(bus, job)

    async def test_jobs_lists_logs_only(self, bus: Bus, job: str) -> None:
        other = f"OTHER_{job}"
        await jetstream.api(bus, f"STREAM.CREATE.{other}", {"name": other, "subjects": [f"x.{job}.cmd.>"]})
        assert other not in await jobs(bus)
        assert job not in await jobs(bus)

    async def test_a_job_that_nobody_opened_is_told(self, bus: Bus, job: str) -> None:
        log = JobLog(bus, job)
        with pytest.raises(LogMissing):
            await log.append(cmd(job, "publish"), b"", "m")
        with pytest.raises(LogMissing):
            await log.last_seq()
        with pytest.raises(LogMissing):
            await log.last_event()
        with pytest.raises(LogMissing):
            await log.entry(1)
        with pytest.raises(LogMissing):
            await anext(log.follow())


class TestAppending:
    async def test_the_same_id_is_written_once(self, log: JobLog) -> None:
        subject = cmd(log.job, "publish")
        assert await log.append(subject, b"a", "one") == 1
        assert await log.append(subject, b"b", "two") == 2
        assert await log.append(subject, b"a", "one") == 1
        assert await log.last_seq() == 2

    async def test_events_are_written_against_the_last_event_and_commands_do_not_count(self, log: JobLog) -> None:
        published = event(log.job, "policy", "version", "published")
        retired = event(log.job, "other", "version", "retired")
        await log.append(cmd(log.job, "publish"), b"", "c1")
        assert await log.append(published, b"", "e1", expected_last_event_seq=0) == 2
        await log.append(cmd(log.job, "publish"), b"", "c2")
        assert await log.append(retired, b"", "e2", expected_last_event_seq=2) == 4
        for stale in (0, 2, 3, 5):
            with pytest.raises(WrongLastSequence) as refusal:
                await log.append(published, b"", f"stale{stale}", expected_last_event_seq=stale)
            assert refusal.value.last_seq == 4
        assert await log.last_seq() == 4

    async def test_of_two_leaders_one_is_refused(self, log: JobLog) -> None:
        subject = event(log.job, "policy", "version", "published")
        both = (log.append(subject, b"", leader, expected_last_event_seq=0) for leader in ("one", "two"))
        results = await asyncio.gather(*both, return_exceptions=True)
        assert [type(each) for each in results if not isinstance(each, int)] == [WrongLastSequence]
        assert await log.last_seq() == 1

    async def test_an_event_whose_acknowledgement_was_lost_is_recognised(self, log: JobLog) -> None:
        """The server compares sequences before it looks for duplicates, and so refuses our own repeat."""
        subject = event(log.job, "policy", "version", "published")
        first = await log.append(subject, b"", "e1", expected_last_event_seq=0)
        assert await log.append(subject, b"", "e1", expected_last_event_seq=0) == first
        await log.append(subject, b"", "e2", expected_last_event_seq=first)
        with pytest.raises(WrongLastSequence):
            await log.append(subject, b"", "e1", expected_last_event_seq=0)

    async def test_a_full_log_refuses_and_says_so(self, log: JobLog, bus: Bus) -> None:
        config = joblog._config(log.job, 1) | {"max_bytes": 10_000}
        await jetstream.api(bus, f"STREAM.UPDATE.{log.stream}", config)
        results = [await tried(log.append(cmd(log.job, "publish"), b"x" * 1000, f"m{index}")) for index in range(20)]
        written = [each for each in results if isinstance(each, int)]
        assert written == list(range(1, len(written) + 1))
        assert 0 < len(written) < 10
        assert all(isinstance(each, LogFull) and "maximum bytes" in str(each) for each in results[len(written) :])
        assert await log.last_seq() == len(written)

    async def test_a_message_over_the_limit_is_refused(self, log: JobLog) -> None:
        with pytest.raises(MessageTooLarge):
            await log.append(cmd(log.job, "publish"), b"x" * (1 << 20), "m")

    async def test_append_waits_for_the_server_and_writes_once(
        self, own_nats_server: RunningNats, own_log: JobLog
    ) -> None:
        """Entries are appended all the time while the server is killed: each stands there exactly once."""
        subject, written = cmd(own_log.job, "publish"), list[int]()
        stop = asyncio.Event()

        async def write() -> int:
            number = 0
            while not stop.is_set():
                written.append(await own_log.append(subject, b"", f"m{number}"))
                number += 1
            return number

        writing = asyncio.create_task(write())
        for _ in range(3):
            before = len(written)
            own_nats_server.kill()
            await asyncio.to_thread(own_nats_server.start)
            async with asyncio.timeout(10.0):
                while len(written) < before + 20:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        stop.set()
        number = await writing
        assert written == list(range(1, number + 1))
        assert await own_log.last_seq() == number

    async def test_append_gives_up_at_its_bound(self, own_nats_server: RunningNats, own_log: JobLog) -> None:
        own_nats_server.kill()
        with pytest.raises(NoBus, match="unknown"):
            await own_log.append(cmd(own_log.job, "publish"), b"", "m", timeout_s=0.3)


class TestLooking:
    async def test_the_last_event_and_command(self, log: JobLog) -> None:
        assert await log.last_event() is None
        assert await log.last_command() is None
        subject = event(log.job, "policy", "version", "published")
        await log.append(subject, b"first", "e1", {"traceparent": "00-ab"})
        await log.append(cmd(log.job, "publish"), b"command", "c1")
        last, command = await log.last_event(), await log.last_command()
        assert last is not None
        assert (last.seq, last.subject, last.data, last.headers["traceparent"]) == (1, subject, b"first", "00-ab")
        assert command is not None
        assert command.seq == 2
        assert await log.entry(1) == last
        assert await log.entry(3) is None

    async def test_time_is_the_same_for_every_way_of_reading(self, log: JobLog) -> None:
        await fill(log, 3)
        async with following_of(log) as entries:
            read = await take(entries, 3)
        assert [await log.entry(each.seq) for each in read] == read
        assert read[0].time < read[1].time < read[2].time


class TestFollowing:
    async def test_old_and_new_entries_come_in_order(self, log: JobLog) -> None:
        """More than one batch, so that several pulls are needed."""
        number = following.BATCH + 10
        await asyncio.gather(*(log.append(cmd(log.job, "publish"), b"", f"m{index}") for index in range(number)))
        async with following_of(log) as entries:
            assert [each.seq for each in await take(entries, number)] == list(range(1, number + 1))
            late = await log.append(event(log.job, "m", "version", "published"), b"body", "late", {"traceparent": "x"})
            (entry,) = await take(entries, 1)
        assert (entry.seq, entry.data, entry.headers["traceparent"]) == (late, b"body", "x")

    async def test_from_the_middle_and_from_the_end(self, log: JobLog) -> None:
        last = await fill(log, 5)
        async with following_of(log, 4) as entries:
            assert [each.seq for each in await take(entries, 2)] == [4, 5]
        async with following_of(log, last + 1) as entries:
            waiting = asyncio.create_task(anext(entries))
            await fill(log, 1, "late")
            assert (await asyncio.wait_for(waiting, 5.0)).seq == last + 1

    async def test_a_filter_lets_its_subjects_through(self, log: JobLog) -> None:
        await fill(log, 2)
        await log.append(event(log.job, "a", "version", "published"), b"", "e1")
        await log.append(event(log.job, "b", "version", "published"), b"", "e2")
        await fill(log, 1, "late")
        async with following_of(log, 1, events_of(log.job)) as entries:
            assert [each.seq for each in await take(entries, 2)] == [3, 4]
        async with following_of(log, 1, events_of(log.job, "b")) as entries:
            assert [each.seq for each in await take(entries, 1)] == [4]
        async with following_of(log, 3, commands_of(log.job)) as entries:
            assert [each.seq for each in await take(entries, 1)] == [5]

    async def test_what_was_purged_is_a_gap_and_not_silently_skipped(self, log: JobLog, bus: Bus) -> None:
        await fill(log, 5)
        await jetstream.api(bus, f"STREAM.PURGE.{log.stream}", {"seq": 4})
        for start in (1, 3):
            with pytest.raises(LogGap, match=f"no entry {start}"):
                await anext(log.follow(start))
        async with following_of(log, 4) as entries:
            assert [each.seq for each in await take(entries, 2)] == [4, 5]

    async def test_a_hole_in_the_middle_is_a_gap(self, log: JobLog, bus: Bus) -> None:
        await fill(log, 2)
        await log.append(event(log.job, "m", "version", "published"), b"", "e")
        await fill(log, 1, "late")
        await jetstream.api(bus, f"STREAM.PURGE.{log.stream}", {"filter": events_of(log.job)})
        async with following_of(log) as entries:
            assert [each.seq for each in await take(entries, 2)] == [1, 2]
            with pytest.raises(LogGap, match="no entry 3"):
                await take(entries, 1)

    async def test_a_log_that_is_purged_to_the_end_goes_on_from_there(self, log: JobLog, bus: Bus) -> None:
        last = await fill(log, 3)
        await jetstream.api(bus, f"STREAM.PURGE.{log.stream}", {})
        with pytest.raises(LogGap):
            await anext(log.follow(last))
        async with following_of(log, last + 1) as entries:
            await fill(log, 1, "late")
            assert [each.seq for each in await take(entries, 1)] == [last + 1]

    async def test_a_log_that_ends_before_what_was_read_is_told(self, log: JobLog) -> None:
        await fill(log, 3)
        with pytest.raises(LogShorter):
            await anext(log.follow(5))

    @pytest.mark.parametrize("lies", [3, 1_000])
    async def test_a_leader_that_slept_is_asked_again(
        self, log: JobLog, monkeypatch: pytest.MonkeyPatch, lies: int
    ) -> None:
        """Of a log on three nodes, one that was replaced and has not noticed yet knows an end that was passed."""
        await fill(log, 5)
        asked = 0
        real = jetstream.api

        async def old_word(bus: Bus, verb: str, *rest: Any) -> dict[str, Any]:
            nonlocal asked
            answer = await real(bus, verb, *rest)
            if verb.startswith("STREAM.INFO"):
                asked += 1
                answer["config"]["num_replicas"] = 3
                if asked <= lies:
                    answer["state"]["last_seq"] = 2
            return answer

        monkeypatch.setattr(jetstream, "api", old_word)
        monkeypatch.setattr(following, "LOOKS_MAX", 4)
        async with following_of(log, 5) as entries:
            if lies == 3:
                assert [each.seq for each in await take(entries, 1)] == [5]
            else:
                with pytest.raises(LogShorter):
                    await take(entries, 1)
        assert asked == min(lies, 4) + 1

    async def test_a_log_that_was_made_anew_is_told(self, own_nats_server: RunningNats, own_bus: Bus, job: str) -> None:
        """Even when it has as many entries as the one that was read."""
        log = await open_job(own_bus, job)
        await fill(log, 3)
        async with following_of(log) as entries:
            await take(entries, 3)
            await jetstream.api(own_bus, f"STREAM.DELETE.{log.stream}")
            await open_job(own_bus, job)
            await fill(log, 5, "other")
            own_nats_server.kill()
            own_nats_server.start()
            with pytest.raises(LogShorter):
                await take(entries, 1)

    async def test_a_log_that_was_deleted_is_told(self, log: JobLog, bus: Bus) -> None:
        await fill(log, 3)
        async with following_of(log) as entries:
            await take(entries, 3)
            await jetstream.api(bus, f"STREAM.DELETE.{log.stream}")
            with pytest.raises(LogShorter, match="deleted"):
                await take(entries, 1)

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    async def test_nothing_is_skipped_or_repeated_through_restarts(
        self, own_nats_server: RunningNats, job: str, number: int
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
                    seq = await log.append(cmd(job, "publish"), str(seq + 1).encode(), f"m{seq}")
                return seq

            writing = asyncio.create_task(write())
            async with following_of(JobLog(reader, job)) as entries:
                read = await take(entries, 20)
                for _ in range(3):
                    own_nats_server.signal(number)
                    own_nats_server.kill()
                    await asyncio.to_thread(own_nats_server.start)
                    read += await take(entries, 50)
                stop.set()
                last = await writing
                read += await take(entries, last - read[-1].seq)
        assert [(each.seq, each.data) for each in read] == [(seq, str(seq).encode()) for seq in range(1, last + 1)]

    async def test_it_resumes_when_its_consumer_is_gone(self, log: JobLog, bus: Bus) -> None:
        await fill(log, 2)
        async with following_of(log) as entries:
            await take(entries, 2)
            listed = await jetstream.api(bus, f"CONSUMER.NAMES.{log.stream}", {})
            for name in listed["consumers"]:
                await jetstream.api(bus, f"CONSUMER.DELETE.{log.stream}.{name}")
            await fill(log, 2, "late")
            assert [each.seq for each in await take(entries, 2)] == [3, 4]

    async def test_it_resumes_when_a_message_was_lost_on_the_way(self, log: JobLog) -> None:
        await fill(log, 10)
        reader = following.Following(log._bus, log.job, 1, ())
        entries = reader.entries()
        await take(entries, 2)
        async with asyncio.timeout(5.0):
            while len(reader._arrived) < 8:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        del reader._arrived[3]
        assert [each.seq for each in await take(entries, 8)] == list(range(3, 11))
        await entries.aclose()

    async def test_what_is_not_wanted_passes_by(self, log: JobLog, monkeypatch: pytest.MonkeyPatch) -> None:
        """It wakes nobody, and more is pulled all the same."""
        monkeypatch.setattr(following, "BATCH", 8)
        reader = following.Following(log._bus, log.job, 1, (), lambda body: body.startswith(b"wanted"))
        entries = reader.entries()
        first = asyncio.create_task(anext(entries))
        async with asyncio.timeout(5.0):
            while reader._wake is None:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        last, consumer = await fill(log, 5), reader._consumer
        async with asyncio.timeout(5.0):
            while reader._next_seq <= last:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert not first.done()
        last = await fill(log, 1, "wanted")
        assert (await asyncio.wait_for(first, 5.0)).seq == last
        await fill(log, 30, "more")
        last = await fill(log, 1, "wanted too")
        async with asyncio.timeout(10.0):
            seen = [each.seq async for each in _until(entries, last)]
        assert len(seen) < 31, "whoever waits is woken by what is wanted, and where more is to be pulled"
        assert reader._consumer == consumer
        await entries.aclose()

    async def test_what_was_wanted_and_lost_is_read_again(self, log: JobLog) -> None:
        """What passes by shows the gap, too."""
        reader = following.Following(
            log._bus, log.job, 1, (commands_of(log.job),), lambda body: body.startswith(b"wanted")
        )
        heard, hear = 0, reader._on_message

        def lossy(message: Message) -> None:
            nonlocal heard
            heard += message.data.startswith(b"wanted")
            if heard != 1 or not message.data.startswith(b"wanted"):
                hear(message)

        reader._on_message = lossy  # type: ignore[method-assign]
        entries = reader.entries()
        waiting = asyncio.create_task(anext(entries))
        lost = await fill(log, 1, "wanted")
        await fill(log, 3)
        async with asyncio.timeout(5.0):
            entry = await waiting
            while not entry.data.startswith(b"wanted"):
                entry = await anext(entries)
        assert entry.seq == lost
        await entries.aclose()

    async def test_a_pull_that_expires_is_renewed(self, log: JobLog, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(following, "PULL_EXPIRES_S", 0.2)
        monkeypatch.setattr(following, "HEARTBEAT_S", 0.1)
        reader = following.Following(log._bus, log.job, 1, ())
        entries = reader.entries()
        waiting = asyncio.create_task(anext(entries))
        async with asyncio.timeout(5.0):
            while reader._pull_no < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        consumer = reader._consumer
        await fill(log, 1)
        assert (await asyncio.wait_for(waiting, 5.0)).seq == 1
        assert reader._consumer == consumer
        await entries.aclose()
