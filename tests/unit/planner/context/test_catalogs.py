"""The catalogs of all jobs, followed in logs that the test writes: waiting, and jobs that are set aside."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import cast

import pytest
from tests.kit.waiting import until

from tensorhub_common.bus.connection import Bus
from tensorhub_common.bus.errors import LogGap, LogMissing
from tensorhub_common.catalog.apply import apply
from tensorhub_common.catalog.snapshot import Snapshot
from tensorhub_common.catalog.state import Catalog
from tensorhub_common.errors import RegistryUnavailable
from tensorhub_common.jetstream.log_entry import StoredEntry
from tensorhub_common.jetstream.stream_log import LogExtent
from tensorhub_common.log_follower import job_list
from tensorhub_common.protocol import subjects
from tensorhub_common.protocol.log import codec
from tensorhub_common.protocol.log.commands import Join, Sender
from tensorhub_common.runtime import supervision
from tensorhub_common.runtime.supervision import Fault
from tensorhub_planner.catalog_view.catalog_replica import CatalogReplica
from tensorhub_planner.context import catalogs as context_catalogs
from tensorhub_planner.context.catalogs import CatalogReplicas, JobUnknown, PlannerBehind

JOB = "run-7"
FIRST_S = context_catalogs.RETRY.first_s


def joining(seq: int) -> Join:
    return Join(by=Sender(f"agent-{seq}", 1, 1), host="node-1", site="berlin")


def entries(*seqs: int) -> list[StoredEntry | Exception]:
    return [
        StoredEntry(
            seq, float(seq), subjects.command_subject(JOB, "join", f"agent-{seq}"), {}, codec.encode(joining(seq))
        )
        for seq in seqs
    ]


class FakeLog:
    """What each successive `follow` yields, ending by an error or by waiting for ever."""

    def __init__(self, *reads: list[StoredEntry | Exception]) -> None:
        self.reads = list(reads)
        self.starts: list[int] = []
        self.more = asyncio.Condition()

    async def add(self, *seqs: int) -> None:
        async with self.more:
            self.reads[-1].extend(entries(*seqs))
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


class Planner:
    """The catalogs, the logs that they follow, and all that they tell."""

    def __init__(self) -> None:
        self.logs: dict[str, FakeLog] = {}
        self.snapshots: dict[int, Snapshot] = {}
        """What there is after an entry."""
        self.seen: list[int] = []
        self.over: list[str] = []
        self.faults: list[Fault] = []
        self.now = 0.0
        self.catalogs = CatalogReplicas(
            cast("Bus", None), lambda _, seq, __: self.seen.append(seq), self.over.append, lambda: self.now
        )

    async def newest(self, bus: object, job: str, beyond: int) -> tuple[Snapshot | None, LogExtent]:
        return self.snapshots.get(beyond) if job == JOB else None, LogExtent(1, 1, "", 0, 0)

    def writes(self, *reads: list[StoredEntry | Exception], job: str = JOB) -> FakeLog:
        self.logs[job] = FakeLog(*reads)
        return self.logs[job]

    async def at(self, seq: int, job: str = JOB, timeout_s: float = 5) -> Catalog:
        """Ask as of an entry."""
        found = await self.catalogs.at(job, seq, timeout_s)
        assert isinstance(found, CatalogReplica)
        return found.catalog

    async def is_refused(self, seq: int, why: str) -> None:
        with pytest.raises(RegistryUnavailable, match=why):
            await self.at(seq)

    def is_well(self, job: str = JOB) -> bool:
        return self.catalogs.health(job).state == "well" and job not in self.catalogs.ailing


@pytest.fixture
async def planner(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Planner]:
    made = Planner()

    class JobLog:
        def __init__(self, bus: object, job: str) -> None:
            self.log = made.logs[job]

        def follow(self, seq: int, *, on_read_state: object) -> AsyncGenerator[StoredEntry, None]:
            return self.log.follow(seq)

    monkeypatch.setattr("tensorhub_common.log_follower.follower.JobLog", JobLog)
    monkeypatch.setattr("tensorhub_common.log_follower.restore.newest_snapshot", made.newest)
    supervision.set_last_resort(made.faults.append)
    yield made
    await made.catalogs.stop()
    supervision.set_last_resort(None)
    assert not made.faults, "the planner would have ended"


def agents(*numbers: int) -> set[str]:
    return {f"agent-{number}" for number in numbers}


async def test_a_question_waits_for_its_number(planner: Planner) -> None:
    """For no more than that, so the earlier questions are answered earlier, and within its bound."""
    log = planner.writes(entries(1))
    assert set((await planner.at(0)).agents) == agents(1)
    with pytest.raises(PlannerBehind, match=r"up to 1, not to 2, after 0\.01 s"):
        await planner.at(2, timeout_s=0.01)
    third, second = (asyncio.create_task(planner.at(seq)) for seq in (3, 2))
    await log.add(2)
    assert set((await second).agents) == agents(1, 2)
    assert not third.done()
    await log.add(3)
    assert (await third).seq == 3
    assert planner.seen == [1, 2, 3]
    assert log.starts == [1], "one follower serves all questions"


async def test_a_gap_is_bridged_by_a_snapshot(planner: Planner) -> None:
    """The log was trimmed beyond what is folded here; who waits for what the snapshot holds is answered."""
    catalog = Catalog(JOB)
    for seq in range(1, 6):
        apply(catalog, seq, float(seq), joining(seq))
    planner.snapshots = {2: Snapshot(5, 5.0, catalog)}
    log = planner.writes([*entries(1, 2), LogGap("entry 3 is gone")], [])
    assert set((await planner.at(4)).agents) == agents(1, 2, 3, 4, 5)
    assert log.starts == [1, 6]


async def test_a_job_without_a_log_is_asked_for_anew(planner: Planner) -> None:
    """It may be opened in the meantime; the planner goes on."""
    planner.writes([LogMissing("no log")], entries(1))
    with pytest.raises(JobUnknown, match="must open the job first"):
        await planner.at(1)
    assert planner.over == [JOB]
    assert (await planner.at(1)).seq == 1


async def test_who_waits_is_told_of_the_end(planner: Planner) -> None:
    planner.writes([])
    asking = asyncio.create_task(planner.at(1))
    await asyncio.sleep(0)
    await planner.catalogs.stop()
    with pytest.raises(RegistryUnavailable, match="is ending"):
        await asking


async def test_a_fold_that_raises_sets_its_job_aside_and_no_other(planner: Planner) -> None:
    """Whatever it raises. The planner goes on, says which job and why, and refuses the job's questions with that."""
    planner.writes(entries(1, 3))
    other = planner.writes(entries(1), job="run-8")
    await planner.at(1, "run-8")
    await planner.is_refused(3, "entry 3 can't be folded: ValueError")
    assert planner.over == [JOB]
    aside = planner.catalogs.health(JOB)
    assert (aside.state, aside.seq, planner.catalogs.ailing) == ("set-aside", 1, [JOB])
    assert "entry 3 can't be folded" in aside.why
    assert aside.again_at - aside.since == pytest.approx(FIRST_S)
    await other.add(2)
    assert (await planner.at(2, "run-8")).seq == 2
    assert (planner.is_well("run-8"), planner.catalogs.health("run-8").seq) == (True, 2)


async def test_a_job_that_was_set_aside_is_tried_again_after_a_while(planner: Planner) -> None:
    """From its snapshot, by the first question after 5 s, then 10 s and so on; 5 s again once it has got further."""
    log = planner.writes(entries(1, 3), entries(1, 3), entries(1, 2, 4), entries(1, 2, 3, 4))
    since = 0.0
    for seq, wait_s in ((3, FIRST_S), (3, 2 * FIRST_S), (4, FIRST_S)):
        starts, failed_at = len(log.starts), planner.now
        since = failed_at if seq == 4 else since
        for _ in range(2):
            await planner.is_refused(4, f"entry {seq} can't be folded")
            planner.now += 0.9 * wait_s / 2
        aside = planner.catalogs.health(JOB)
        assert aside.again_at - aside.since == pytest.approx(failed_at + wait_s - since)
        assert len(log.starts) == starts + 1, "between the tries nothing is read"
        planner.now += wait_s
    assert (await planner.at(4)).seq == 4
    assert planner.is_well()


async def test_a_job_that_is_tried_again_stays_set_aside_until_it_got_on(planner: Planner) -> None:
    """It is folded again up to before what it failed at, which shows nothing yet."""
    log = planner.writes(entries(1, 3), entries(1))
    await planner.is_refused(3, "entry 3 can't be folded")
    planner.now += FIRST_S
    assert (await planner.at(1)).seq == 1
    tried = planner.catalogs.health(JOB)
    assert (tried.state, planner.catalogs.ailing) == ("set-aside", [JOB])
    assert "entry 3 can't be folded" in tried.why
    await log.add(2, 3)
    assert (await planner.at(3)).seq == 3
    assert planner.is_well()


async def test_who_asks_how_a_job_is_has_it_tried_again(planner: Planner) -> None:
    """Nobody reads in it: else it would be told as set aside for ever, though what was wrong with it is mended."""
    planner.writes(entries(1, 3), entries(1, 2, 3))
    await planner.is_refused(3, "entry 3 can't be folded")
    planner.catalogs.try_due()
    assert planner.catalogs.ailing == [JOB], "its time has not come"
    planner.now += FIRST_S
    planner.catalogs.try_due()
    await until(planner.is_well)
    assert (await planner.at(3)).seq == 3


async def test_a_job_that_is_gone_is_not_set_aside(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log was deleted since, and nobody asks for it."""
    planner.writes(entries(1, 3))
    await planner.is_refused(3, "entry 3 can't be folded")

    async def no_jobs(_: object) -> list[str]:
        return []

    monkeypatch.setattr("tensorhub_common.log_follower.job_list.job_log.list_jobs", no_jobs)
    monkeypatch.setattr(job_list, "LIST_S", 0.0)
    planner.catalogs.start()
    await until(planner.is_well)


async def test_jobs_and_the_questions_of_each_are_bounded(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_catalogs, "WAITING_MAX", 1)
    monkeypatch.setattr(context_catalogs, "JOBS_MAX", 1)
    log = planner.writes([])
    first = asyncio.create_task(planner.at(1))
    await asyncio.sleep(0)
    for job, why in ((JOB, "1 questions wait"), ("run-8", "its limit")):
        with pytest.raises(PlannerBehind, match=why):
            await planner.at(1, job)
    await log.add(1)
    await first
