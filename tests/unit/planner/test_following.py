"""Following logs, with a log that the test writes: waiting, gaps, and logs that can't be trusted."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import cast

import pytest

from tensorhub_common import subjects
from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.entry import Entry
from tensorhub_common.bus.failures import LogGap, LogMissing, LogShorter
from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.snapshot import Snapshot
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.errors import RegistryUnavailable
from tensorhub_common.wire import codec
from tensorhub_common.wire.commands import Join, Sender
from tensorhub_common.wire.events.event import Event
from tensorhub_planner import following
from tensorhub_planner.following import Catalogs, JobUnknown, PlannerBehind

JOB = "run-7"
Step = Entry | Exception


class FakeLog:
    """What each successive `follow` yields, ending by an error or by waiting for ever."""

    def __init__(self) -> None:
        self.reads: list[list[Step]] = []
        self.starts: list[int] = []
        self.snapshots: dict[int, Snapshot | None] = {}
        """What there is after an entry."""
        self.more = asyncio.Condition()

    async def newest(self, bus: object, job: str, beyond: int) -> tuple[Snapshot | None, None]:
        assert job == JOB
        return self.snapshots.get(beyond), None

    async def add(self, *steps: Step) -> None:
        async with self.more:
            self.reads[-1].extend(steps)
            self.more.notify_all()

    async def follow(self, seq: int) -> AsyncGenerator[Entry, None]:
        self.starts.append(seq)
        steps = self.reads[min(len(self.starts), len(self.reads)) - 1]
        at = 0
        while True:
            async with self.more:
                while at >= len(steps):
                    await self.more.wait()
            step = steps[at]
            at += 1
            if isinstance(step, Exception):
                raise step
            if step.seq >= seq:
                yield step


def catalog_of(found: object) -> Catalog:
    """Return the catalog, also where it comes in a fold."""
    return found if isinstance(found, Catalog) else found.catalog  # type: ignore[attr-defined]


def entry(seq: int) -> Entry:
    command = Join(by=Sender(f"agent-{seq}", 1, 1), host="node-1", site="berlin")
    return Entry(seq, float(seq), subjects.cmd(JOB, "join", f"agent-{seq}"), {}, codec.encode(command))


Seen = tuple[str, int, Event]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> FakeLog:
    made = FakeLog()

    class JobLog:
        def __init__(self, bus: object, job: str) -> None:
            assert job == JOB

        def follow(self, seq: int) -> AsyncGenerator[Entry, None]:
            return made.follow(seq)

    monkeypatch.setattr("tensorhub_planner.following.joblog.JobLog", JobLog)
    monkeypatch.setattr("tensorhub_planner.following.restoring.newest", made.newest)
    return made


@pytest.fixture
def seen() -> list[Seen]:
    return []


@pytest.fixture
def over() -> list[str]:
    """Return the jobs of whose end was told."""
    return []


@pytest.fixture
async def catalogs(log: FakeLog, seen: list[Seen], over: list[str]) -> AsyncIterator[Catalogs]:
    made = Catalogs(cast("Bus", None), lambda job, seq, event: seen.append((job, seq, event)), over.append)
    yield made
    await made.stop()


async def test_a_question_waits_for_its_number(log: FakeLog, catalogs: Catalogs, seen: list[Seen]) -> None:
    """And for no more than that: the earlier questions are answered earlier."""
    log.reads = [[entry(1)]]
    assert set((await catalogs.at(JOB, 0)).catalog.agents) == {"agent-1"}
    third, second = (asyncio.create_task(catalogs.at(JOB, seq, 5)) for seq in (3, 2))
    await log.add(entry(2))
    assert set((await second).catalog.agents) == {"agent-1", "agent-2"}
    assert not third.done()
    await log.add(entry(3))
    assert (await third).catalog.seq == 3
    assert [seq for _, seq, _ in seen] == [1, 2, 3]
    assert log.starts == [1], "one follower serves all questions"


async def test_the_wait_is_bounded(log: FakeLog, catalogs: Catalogs) -> None:
    """Who gave up is forgotten, and the next one is served."""
    log.reads = [[entry(1)]]
    with pytest.raises(PlannerBehind, match=r"up to 1, not to 2, after 0\.01 s"):
        await catalogs.at(JOB, 2, 0.01)
    await log.add(entry(2))
    assert (await catalogs.at(JOB, 2, 5)).catalog.seq == 2


async def test_only_so_many_wait(log: FakeLog, catalogs: Catalogs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "WAITING_MAX", 1)
    log.reads = [[]]
    first = asyncio.create_task(catalogs.at(JOB, 1, 5))
    await asyncio.sleep(0)
    with pytest.raises(PlannerBehind, match="1 questions wait"):
        await catalogs.at(JOB, 1, 5)
    await log.add(entry(1))
    await first


def snapshot(seq: int) -> Snapshot:
    """Return what a fold of so many entries comes to."""
    catalog = Catalog(JOB)
    for each in map(entry, range(1, seq + 1)):
        apply(catalog, each.seq, each.time, Join(by=Sender(f"agent-{each.seq}", 1, 1), host="node-1", site="berlin"))
    return Snapshot(seq, float(seq), catalog)


async def test_it_begins_with_a_snapshot(log: FakeLog, catalogs: Catalogs, seen: list[Seen]) -> None:
    log.snapshots = {0: snapshot(40)}
    log.reads = [[entry(41)]]
    assert set(catalog_of(await catalogs.at(JOB, 41, 5)).agents) == {f"agent-{n}" for n in range(1, 42)}
    assert log.starts == [41]
    assert [seq for _, seq, _ in seen] == [41]


async def test_a_gap_is_bridged_by_a_snapshot(log: FakeLog, catalogs: Catalogs) -> None:
    """The log was trimmed beyond what is folded here; who waits for what the snapshot holds is answered."""
    log.snapshots = {2: snapshot(5)}
    log.reads = [[entry(1), entry(2), LogGap("entry 3 is gone")], []]
    assert set(catalog_of(await catalogs.at(JOB, 4, 5)).agents) == {f"agent-{n}" for n in range(1, 6)}
    assert log.starts == [1, 6]
    assert not catalogs.broken.done()


@pytest.mark.parametrize("steps", [[entry(1), LogGap("entry 2 is gone")], [LogGap("entry 1 is gone")]])
async def test_a_gap_that_stays_stops_that_job_alone(log: FakeLog, catalogs: Catalogs, steps: list[Step]) -> None:
    """Without a snapshot to go on from. For a while every question about it is refused at once; others never notice."""
    log.reads = [steps]
    for _ in range(2):
        with pytest.raises(RegistryUnavailable, match="is gone"):
            await catalogs.at(JOB, 5, 5)
    assert len(log.starts) <= 2
    assert not catalogs.broken.done()


async def test_a_log_that_was_made_anew_is_folded_from_its_start_again(
    log: FakeLog, catalogs: Catalogs, over: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner knows nothing of its own that a new log could contradict, or is told to forget it."""
    monkeypatch.setattr(following, "STOPPED_S", 0.0)
    log.reads = [[entry(1), LogShorter("it is not the log that it was")], [entry(1)]]
    with pytest.raises(RegistryUnavailable, match="not the log that it was"):
        await catalogs.at(JOB, 5, 5)
    assert over == [JOB]
    assert (await catalogs.at(JOB, 1, 5)).catalog.seq == 1
    assert not catalogs.broken.done()


async def test_a_job_without_a_log_is_asked_for_anew(log: FakeLog, catalogs: Catalogs, over: list[str]) -> None:
    """It may be opened in the meantime; the planner goes on."""
    log.reads = [[LogMissing("no log")], [entry(1)]]
    with pytest.raises(JobUnknown, match="must open the job first"):
        await catalogs.at(JOB, 1, 5)
    assert over == [JOB]
    assert (await catalogs.at(JOB, 1, 5)).catalog.seq == 1
    assert not catalogs.broken.done()


async def test_only_so_many_jobs(log: FakeLog, catalogs: Catalogs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "JOBS_MAX", 0)
    with pytest.raises(PlannerBehind, match="its limit"):
        await catalogs.at(JOB, 1)


async def test_who_waits_is_told_of_the_end(log: FakeLog, catalogs: Catalogs) -> None:
    log.reads = [[]]
    asking = asyncio.create_task(catalogs.at(JOB, 1, 5))
    await asyncio.sleep(0)
    await catalogs.stop()
    with pytest.raises(RegistryUnavailable, match="is ending"):
        await asking
