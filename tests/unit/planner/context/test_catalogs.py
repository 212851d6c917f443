"""The catalogs of all jobs, followed in logs that the test writes: waiting, and jobs that are set aside."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import cast

import pytest
from tests.bounds import WAIT_S

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import LogGap, LogMissing
from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.snapshot import Snapshot
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.errors import RegistryUnavailable
from tensorhub_common.jetstream.job_log import LogExtent
from tensorhub_common.jetstream.log_entry import StoredEntry
from tensorhub_common.log_follower import job_list
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.log import codec
from tensorhub_common.protocol.log.commands import Join, Sender
from tensorhub_common.protocol.log.events import Event
from tensorhub_common.runtime import supervision
from tensorhub_common.runtime.supervision import Fault
from tensorhub_planner.context import catalogs as context_catalogs
from tensorhub_planner.context.catalogs import CatalogReplicas, JobUnknown, PlannerBehind

JOB = "run-7"
Step = StoredEntry | Exception


class FakeLog:
    """What each successive `follow` yields, ending by an error or by waiting for ever."""

    def __init__(self) -> None:
        self.reads: list[list[Step]] = []
        self.starts: list[int] = []
        self.snapshots: dict[int, Snapshot | None] = {}
        """What there is after an entry."""
        self.more = asyncio.Condition()
        self.others: dict[str, FakeLog] = {}
        """The logs of other jobs."""

    async def newest(self, bus: object, job: str, beyond: int) -> tuple[Snapshot | None, LogExtent]:
        return self.snapshots.get(beyond) if job == JOB else None, LogExtent(1, 1, "", 0, 0)

    async def add(self, *steps: Step) -> None:
        async with self.more:
            self.reads[-1].extend(steps)
            self.more.notify_all()

    async def follow(self, seq: int) -> AsyncGenerator[StoredEntry, None]:
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


def entry(seq: int) -> StoredEntry:
    command = Join(by=Sender(f"agent-{seq}", 1, 1), host="node-1", site="berlin")
    return StoredEntry(
        seq, float(seq), subjects.command_subject(JOB, "join", f"agent-{seq}"), {}, codec.encode(command)
    )


Seen = tuple[str, int, Event]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> FakeLog:
    made = FakeLog()

    class JobLog:
        def __init__(self, bus: object, job: str) -> None:
            self.log = made if job == JOB else made.others[job]

        def follow(self, seq: int, *, on_read_state: object) -> AsyncGenerator[StoredEntry, None]:
            return self.log.follow(seq)

    monkeypatch.setattr("tensorhub_common.log_follower.follower.JobLog", JobLog)
    monkeypatch.setattr("tensorhub_common.log_follower.restore.newest_snapshot", made.newest)
    return made


@pytest.fixture
def seen() -> list[Seen]:
    return []


@pytest.fixture
def over() -> list[str]:
    """Return the jobs of whose end was told."""
    return []


@pytest.fixture
def ended() -> Iterator[list[Fault]]:
    """Return the faults that would have ended the planner."""
    found: list[Fault] = []
    supervision.set_last_resort(found.append)
    yield found
    supervision.set_last_resort(None)


class Clock:
    """The time that counts for when a job is tried again."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def catalogs(log: FakeLog, seen: list[Seen], over: list[str], clock: Clock) -> AsyncIterator[CatalogReplicas]:
    made = CatalogReplicas(
        cast("Bus", None), lambda job, seq, event: seen.append((job, seq, event)), over.append, clock
    )
    yield made
    await made.stop()


async def test_a_question_waits_for_its_number(log: FakeLog, catalogs: CatalogReplicas, seen: list[Seen]) -> None:
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


async def test_the_wait_is_bounded(log: FakeLog, catalogs: CatalogReplicas) -> None:
    """Who gave up is forgotten, and the next one is served."""
    log.reads = [[entry(1)]]
    with pytest.raises(PlannerBehind, match=r"up to 1, not to 2, after 0\.01 s"):
        await catalogs.at(JOB, 2, 0.01)
    await log.add(entry(2))
    assert (await catalogs.at(JOB, 2, 5)).catalog.seq == 2


def snapshot(seq: int) -> Snapshot:
    """Return what a fold of so many entries comes to."""
    catalog = Catalog(JOB)
    for each in map(entry, range(1, seq + 1)):
        apply(catalog, each.seq, each.time, Join(by=Sender(f"agent-{each.seq}", 1, 1), host="node-1", site="berlin"))
    return Snapshot(seq, float(seq), catalog)


async def test_a_gap_is_bridged_by_a_snapshot(log: FakeLog, catalogs: CatalogReplicas, ended: list[Fault]) -> None:
    """The log was trimmed beyond what is folded here; who waits for what the snapshot holds is answered."""
    log.snapshots = {2: snapshot(5)}
    log.reads = [[entry(1), entry(2), LogGap("entry 3 is gone")], []]
    assert set(catalog_of(await catalogs.at(JOB, 4, 5)).agents) == {f"agent-{n}" for n in range(1, 6)}
    assert log.starts == [1, 6]
    assert not ended


async def test_a_job_without_a_log_is_asked_for_anew(
    log: FakeLog, catalogs: CatalogReplicas, over: list[str], ended: list[Fault]
) -> None:
    """It may be opened in the meantime; the planner goes on."""
    log.reads = [[LogMissing("no log")], [entry(1)]]
    with pytest.raises(JobUnknown, match="must open the job first"):
        await catalogs.at(JOB, 1, 5)
    assert over == [JOB]
    assert (await catalogs.at(JOB, 1, 5)).catalog.seq == 1
    assert not ended


async def test_who_waits_is_told_of_the_end(log: FakeLog, catalogs: CatalogReplicas) -> None:
    log.reads = [[]]
    asking = asyncio.create_task(catalogs.at(JOB, 1, 5))
    await asyncio.sleep(0)
    await catalogs.stop()
    with pytest.raises(RegistryUnavailable, match="is ending"):
        await asking


async def test_a_fold_that_raises_sets_its_job_aside_and_no_other(
    log: FakeLog, catalogs: CatalogReplicas, over: list[str], ended: list[Fault]
) -> None:
    """Whatever it raises. The planner goes on, says which job and why, and refuses the job's questions with that."""
    log.reads = [[entry(1), entry(3)]]
    log.others["run-8"] = other = FakeLog()
    other.reads = [[entry(1)]]
    await catalogs.at("run-8", 1, 5)
    with pytest.raises(RegistryUnavailable, match="entry 3 can't be folded: ValueError"):
        await catalogs.at(JOB, 3, 5)
    assert over == [JOB]
    aside = catalogs.health(JOB)
    assert (aside.state, aside.seq, catalogs.ailing) == ("set-aside", 1, [JOB])
    assert "entry 3 can't be folded" in aside.why
    assert aside.again_at - aside.since == pytest.approx(context_catalogs.RETRY.first_s)
    await other.add(entry(2))
    assert (await catalogs.at("run-8", 2, 5)).catalog.seq == 2
    assert (catalogs.health("run-8").state, catalogs.health("run-8").seq) == ("well", 2)
    assert not ended


async def test_a_job_that_was_set_aside_is_tried_again_after_a_while(
    log: FakeLog, catalogs: CatalogReplicas, clock: Clock
) -> None:
    """From its snapshot, by the first question after 5 s, then 10 s and so on; 5 s again once it has got further."""
    log.reads = [[entry(1), entry(3)], [entry(1), entry(3)], [entry(1), entry(2), entry(4)]]
    log.reads.append([entry(1), entry(2), entry(3), entry(4)])
    first_s = context_catalogs.RETRY.first_s
    since = 0.0
    for seq, wait_s in ((3, first_s), (3, 2 * first_s), (4, first_s)):
        starts, failed_at = len(log.starts), clock.now
        since = failed_at if seq == 4 else since
        for _ in range(2):
            with pytest.raises(RegistryUnavailable, match=f"entry {seq} can't be folded"):
                await catalogs.at(JOB, 4, 5)
            clock.now += 0.9 * wait_s / 2
        aside = catalogs.health(JOB)
        assert aside.again_at - aside.since == pytest.approx(failed_at + wait_s - since)
        assert len(log.starts) == starts + 1, "between the tries nothing is read"
        clock.now += wait_s
    assert (await catalogs.at(JOB, 4, 5)).catalog.seq == 4
    assert (catalogs.health(JOB).state, catalogs.ailing) == ("well", [])


async def test_a_job_that_is_tried_again_stays_set_aside_until_it_got_on(
    log: FakeLog, catalogs: CatalogReplicas, clock: Clock
) -> None:
    """It is folded again up to before what it failed at, which shows nothing yet."""
    log.reads = [[entry(1), entry(3)], [entry(1)]]
    with pytest.raises(RegistryUnavailable, match="entry 3 can't be folded"):
        await catalogs.at(JOB, 3, 5)
    clock.now += context_catalogs.RETRY.first_s
    assert (await catalogs.at(JOB, 1, 5)).catalog.seq == 1
    tried = catalogs.health(JOB)
    assert (tried.state, catalogs.ailing) == ("set-aside", [JOB])
    assert "entry 3 can't be folded" in tried.why
    await log.add(entry(2))
    await log.add(entry(3))
    assert (await catalogs.at(JOB, 3, 5)).catalog.seq == 3
    assert (catalogs.health(JOB).state, catalogs.ailing) == ("well", [])


async def test_who_asks_how_a_job_is_has_it_tried_again(log: FakeLog, catalogs: CatalogReplicas, clock: Clock) -> None:
    """Nobody reads in it: else it would be told as set aside for ever, though what was wrong with it is mended."""
    log.reads = [[entry(1), entry(3)], [entry(1), entry(2), entry(3)]]
    with pytest.raises(RegistryUnavailable, match="entry 3 can't be folded"):
        await catalogs.at(JOB, 3, 5)
    catalogs.try_due()
    assert catalogs.ailing == [JOB], "its time has not come"
    clock.now += context_catalogs.RETRY.first_s
    catalogs.try_due()
    async with asyncio.timeout(WAIT_S):
        while catalogs.ailing:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert (await catalogs.at(JOB, 3, 5)).catalog.seq == 3


async def test_a_job_that_is_gone_is_not_set_aside(
    log: FakeLog, catalogs: CatalogReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log was deleted since, and nobody asks for it."""
    log.reads = [[entry(1), entry(3)]]
    with pytest.raises(RegistryUnavailable, match="entry 3 can't be folded"):
        await catalogs.at(JOB, 3, 5)
    listed = asyncio.Event()

    async def jobs(_: object) -> list[str]:
        if catalogs.ailing == []:
            listed.set()
        return []

    monkeypatch.setattr("tensorhub_common.log_follower.job_list.job_log.list_jobs", jobs)
    monkeypatch.setattr(job_list, "LIST_S", 0.0)
    catalogs.start()
    async with asyncio.timeout(5):
        await listed.wait()
    assert catalogs.health(JOB).state == "well"


async def test_the_jobs_and_the_questions_of_each_are_bounded(
    log: FakeLog, catalogs: CatalogReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_catalogs, "WAITING_MAX", 1)
    monkeypatch.setattr(context_catalogs, "JOBS_MAX", 1)
    log.reads = [[]]
    first = asyncio.create_task(catalogs.at(JOB, 1, 5))
    await asyncio.sleep(0)
    with pytest.raises(PlannerBehind, match="1 questions wait"):
        await catalogs.at(JOB, 1, 5)
    with pytest.raises(PlannerBehind, match="its limit"):
        await catalogs.at("run-8", 1)
    await log.add(entry(1))
    await first
