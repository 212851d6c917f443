"""The driver of one job: what costs one call, or nothing, is no fault of the job."""

import asyncio
import contextlib
import errno
import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.unit.agent.core.scene import OneAgent

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.core.config import CoreConfig
from tensorhub_agent.core.effects import (
    AnyEffect,
    CallRead,
    CompareLayouts,
    CompleteCall,
    CopyToSpare,
    DigestMemory,
    FailCall,
    FreeShard,
    Keep,
    Kept,
    Probed,
    ProbeMapping,
    SaveManifest,
)
from tensorhub_agent.core.shard_state import ShardContents, ShardSpec
from tensorhub_agent.jobs import driver
from tensorhub_agent.jobs.driver import JobDriver
from tensorhub_agent.jobs.pending_calls import PendingCall
from tensorhub_agent.jobs.read_counts import ReadCounts
from tensorhub_agent.jobs.worker_session import WorkerSessions
from tensorhub_agent.leases.delta_store import DeltaStore
from tensorhub_agent.observability.read_log import REFUSED_TOLD_S, NotBegun, ReadLog
from tensorhub_agent.observability.registry_watch import RegistryWatch
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.rates.link_rates import LinkRates
from tensorhub_agent.storage.segments import Segment, SegmentStore
from tensorhub_agent.storage.shard_store import ShardStores
from tensorhub_common.bus.errors import NoBus, NoResponder
from tensorhub_common.errors import MemoryExhausted
from tensorhub_common.jetstream.job_log import JobLog
from tensorhub_common.layout.layout import TensorEntry, layout_digest, layout_of
from tensorhub_common.protocol.log.events import ShardReleased
from tensorhub_common.protocol.worker import Attach, Attached, Failed, Frame, ReadCall, Registered, Spare, UnpublishCall

KEY = ShardKey("policy", "trainer", 0)
WHERE, AGAIN = "shard 0 of policy/trainer", "register it again"
LAYOUT = layout_of([TensorEntry("w", "float32", 4, (8,), (8,), (0,))])


@pytest.fixture
async def job(tmp_path: Path) -> AsyncIterator[JobDriver]:
    pool, stores = CopyPool(1), ShardStores(SegmentStore(tmp_path, "test-", 1 << 30))
    around: Any = SimpleNamespace(
        agent="agent-0", bus=None, blobs=None, pool=pool, transports=None, config=CoreConfig(), measured=LinkRates(),
        stores=stores, deltas=DeltaStore(1, 1 << 20), planner=None, registry=RegistryWatch(), set_aside=lambda _:
        None, reads=ReadCounts(),
    )  # fmt: skip
    job = JobDriver("run-7", around, lambda: None)
    yield job
    await job.stop()
    job.store.free(KEY)
    stores.close()
    pool.close()


def descriptors() -> int:
    """Count those that this process has open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (a folder of the kernel's)


async def made(job: JobDriver) -> None:
    await job.store.make(KEY, 1, LAYOUT, layout_digest(LAYOUT), spot=False, incarnation=1, install="staged")


async def ended(job: JobDriver) -> None:
    """Return once nothing is under way any more."""
    async with asyncio.timeout(10):
        while job._work.tasks:  # noqa: ASYNC110 (nothing tells of their end)
            await asyncio.sleep(0.001)


KEEP = Keep(key=KEY, number=3, version=12, root="r", digests=b"")


@pytest.mark.parametrize("effect", [CompareLayouts(KEY, 1, ()), DigestMemory(KEY, 1), CopyToSpare(KEY), KEEP])
async def test_a_shard_that_goes_before_the_work_on_it_begins(job: JobDriver, effect: AnyEffect) -> None:
    """An agent that was stopped for a moment takes the shard's end from the log in the turn that began the work."""
    await made(job)
    job.carry_out([effect, FreeShard(KEY)])
    await ended(job)
    assert job.set_aside_reason is None


@pytest.mark.parametrize("room", [True, False])
async def test_the_core_is_told_whether_what_was_filled_is_kept(
    job: JobDriver,
    monkeypatch: pytest.MonkeyPatch,
    room: bool,  # noqa: FBT001
) -> None:
    await made(job)
    told: asyncio.Queue[object] = asyncio.Queue()

    def on_outcome(news: object, _: float) -> list[AnyEffect]:
        told.put_nowait(news)
        return []

    def full(*_: object) -> None:
        raise MemoryExhausted("no room")

    monkeypatch.setattr(job.core, "on_outcome", on_outcome)
    if not room:
        monkeypatch.setattr("tensorhub_agent.storage.manifest.save", full)
    job.carry_out([KEEP])
    async with asyncio.timeout(10):
        assert await told.get() == Kept(KEY, 3, None if room else "no room")


async def test_a_fill_is_kept_in_the_order_of_what_was_decided(job: JobDriver) -> None:
    """An agent that was stopped for a moment takes the round's failure in the turn in which it keeps the fill."""
    await made(job)
    job.carry_out([KEEP, SaveManifest(key=KEY, state="empty", partial=True)])
    await ended(job)
    assert job.store.shards[KEY].manifest.state == "empty"
    job.carry_out([SaveManifest(key=KEY, state="empty", partial=True), KEEP])
    assert (job.store.shards[KEY].manifest.state, job.store.shards[KEY].manifest.version) == ("ready", 12)
    await ended(job)


async def test_a_job_of_which_all_was_set_aside_states_it_when_a_worker_opens_the_job(
    job: JobDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log lets go of what an agent does not state, and a later process frees what the log knows nothing of."""
    left: Any = None
    job.store.aside[KEY] = left, job._around.stores.store

    async def follow() -> None:
        pass

    monkeypatch.setattr(job, "_follow", follow)
    job.start()
    assert job.core.aside == {KEY}
    released = ShardReleased(model=KEY.model, replica=KEY.replica, shard=KEY.shard)
    assert job._is_concerned(msgspec.json.encode(released)), "it would never hear that the log lets go of it"
    del job.store.aside[KEY]


async def test_a_fault_in_looking_for_late_reads_is_the_jobs_alone(
    job: JobDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's main loop looks at all jobs, one after another."""

    def fails(*_: object) -> list[str]:
        raise ArithmeticError("planted")

    monkeypatch.setattr(job._watch, "look", fails)
    job.look()
    assert "planted" in (job.set_aside_reason or "")


class Told:
    """A worker; `descriptors` come with what it is told."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def tell(self, frame: Frame, fd: int | None = None) -> None:
        self.frames.append(frame)
        if fd is not None:
            os.close(fd)


async def test_a_call_of_a_job_that_is_set_aside_ends_once_nothing_is_written_any_more(
    job: JobDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is told may write into the same memory at once."""
    worker: Any = Told()
    job.callers.begin(PendingCall(worker, 5, 1, about=KEY, reads=True))
    told_before: list[int] = []
    stop = job.sources.stop

    async def stopping() -> None:
        await stop()
        told_before.append(len(worker.frames))

    monkeypatch.setattr(job.sources, "stop", stopping)
    with contextlib.suppress(ZeroDivisionError), job.isolated("reading"):
        1 / 0  # noqa: B018 (a planted fault)
    await job.end_aside()
    [failed] = worker.frames
    assert isinstance(failed, Failed)
    assert (failed.call, failed.error) == (5, "AgentUnavailable")
    assert "ZeroDivisionError" in failed.message
    assert told_before[0] == 0


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "tensorhub_agent.jobs.driver"]


def fail(job: JobDriver) -> None:
    with contextlib.suppress(ZeroDivisionError), job.isolated("reading"):
        1 / 0  # noqa: B018 (a planted fault)


async def test_reads_under_way_in_a_job_that_is_set_aside_are_told_and_counted(
    job: JobDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With as much of each as is known: one reads from a source, the other has not begun."""
    trainer = OneAgent("elsewhere")
    trainer.join()
    trainer.publish(trainer.register("trainer"), "a")
    trainer.log()
    agent = OneAgent("agent-0", catalog=trainer.catalog)
    agent.join()
    key = agent.register("rollout")
    worker: Any = Told()
    job.callers.begin(PendingCall(worker, 4, 1, about=KEY))
    reads = job.callers.begin(PendingCall(worker, 5, 1, about=key, reads=True))
    assert agent.read(key) == reads
    agent.log()
    agent.plan(key)
    job.callers.begin(PendingCall(worker, 6, 2, about=agent.key("rollout", 1), reads=True))
    job.core = agent.core
    monkeypatch.setattr(job._tracing, "trace_of", lambda call: "7ace" if call == reads else None)
    fail(job)
    caplog.clear()
    await job.end_aside()
    assert [frame.call for frame in worker.frames if isinstance(frame, Failed)] == [4, 5, 6]
    first, second = lines(caplog)
    assert first.startswith("job run-7: the read of shard 0 of policy/rollout failed: AgentUnavailable: agent ")
    assert first.endswith("; sources: elsewhere (local, 0.0 MiB) (trace 7ace)")
    assert second.startswith("job run-7: the read of shard 1 of policy/rollout failed: AgentUnavailable: ")
    assert job._around.reads.ended == {"AgentUnavailable": 2}


async def test_whatever_fails_in_telling_each_call_of_a_job_that_is_set_aside_is_answered(
    job: JobDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker: Any = Told()
    for call in (5, 6):
        job.callers.begin(PendingCall(worker, call, 1, about=KEY, reads=True))

    def fails(_: int) -> None:
        raise ArithmeticError("planted")

    monkeypatch.setattr(job._tracing, "trace_of", fails)
    fail(job)
    await job.end_aside()
    assert [frame.call for frame in worker.frames if isinstance(frame, Failed)] == [5, 6]


async def test_a_crowd_of_reads_of_a_job_that_is_set_aside_has_one_line(
    job: JobDriver, caplog: pytest.LogCaptureFixture
) -> None:
    worker: Any = Told()
    fail(job)
    caplog.clear()
    for call in range(1000):
        number = job.callers.begin(PendingCall(worker, call, 1, about=KEY, reads=True))
        read = CallRead(call=number, session=1, deadline=1.0, want="latest", patience=1.0)
        job.call(KEY, read, 0.0)
    assert len(worker.frames) == 1000
    assert job._around.reads.ended == {"AgentUnavailable": 1000}
    [line] = lines(caplog)
    assert line.startswith(f"job run-7: a read of {WHERE} is refused: AgentUnavailable: agent ")


@pytest.mark.parametrize(
    ("handle", "session", "what", "error", "message"),
    [
        (2, 7, "", "BadCommand", "no shard has handle 2 here"),
        (
            1,
            8,
            f" of {WHERE}",
            "AgentUnavailable",
            f"{WHERE} was released, and is not this worker's: register it again",
        ),
        (1, 7, f" of {WHERE}", "ReplicaConflict", f"an earlier read of {WHERE} has just ended: call again"),
    ],
)
async def test_a_read_that_is_refused_before_it_begins_is_told_and_counted(
    job: JobDriver, caplog: pytest.LogCaptureFixture, handle: int, session: int, what: str, error: str, message: str
) -> None:
    await made(job)
    job.core.adopt(ShardSpec(KEY, 1, spot=False, layout="", nbytes=(32,), staged=True), ShardContents())
    job.core.shards[KEY].session = session
    worker: Any = Told()
    worker.number = 7

    async def job_of(_: str) -> JobDriver:
        return job

    desk = WorkerSessions(job_of, lambda: Attached(protocol=1, agent="agent-0", incarnation=1, nats=""))
    await desk.attach(worker, Attach(protocol=1, job="run-7"))
    desk._sessions[7].handles[1] = KEY
    for call in (5, 6):
        await desk.frame(worker, ReadCall(call=call, handle=handle, timeout_s=1.0, want="latest", segment=1))
    await desk.frame(worker, UnpublishCall(call=7, handle=2, timeout_s=1.0))
    failed = [(frame.call, frame.error) for frame in worker.frames if isinstance(frame, Failed)]
    assert failed == [(5, error), (6, error), (7, "BadCommand")]
    assert lines(caplog) == [f"job run-7: a read{what} is refused: {error}: {message}"]
    assert job._around.reads.ended == {error: 2}, "an unpublish is no read"


def test_of_reads_that_are_refused_one_of_each_kind_is_told_in_a_while() -> None:
    watch = ReadLog(5.0, 2.0, Counter())
    effect = FailCall(1, "BadCommand", "no")
    assert watch.refused(NotBegun.HANDLE, None, effect, 100.0) == "a read is refused: BadCommand: no"
    for _ in range(3):
        assert watch.refused(NotBegun.HANDLE, None, effect, 100.0 + REFUSED_TOLD_S - 1.0) is None
    assert watch.refused(NotBegun.ASIDE, KEY, effect, 101.0) is not None
    line = watch.refused(NotBegun.HANDLE, None, effect, 100.0 + REFUSED_TOLD_S)
    assert line == "a read is refused: BadCommand: no (and 3 more such since the last line)"
    line = watch.refused(NotBegun.HANDLE, None, effect, 100.0 + 2 * REFUSED_TOLD_S)
    assert line == "a read is refused: BadCommand: no"


@pytest.mark.parametrize("left", [0, 1])
async def test_memory_for_which_there_is_no_descriptor_costs_one_call(
    job: JobDriver, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """A staged shard takes two: neither stays open where one can't be had. The next call gets both."""
    await made(job)
    job.core.adopt(ShardSpec(KEY, 1, spot=False, layout="", nbytes=(32,), staged=True), ShardContents())
    before = descriptors()
    real, opened = Segment.open_writable, 0

    def scarce(segment: Segment) -> int:
        nonlocal opened
        opened += 1
        if opened > left:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(segment)

    worker: Any = Told()
    monkeypatch.setattr(Segment, "open_writable", scarce)
    job.carry_out([CompleteCall(call=job.callers.begin(PendingCall(worker, 5, 1, registers=KEY)))])
    assert job.set_aside_reason is None
    assert descriptors() == before
    [failed] = worker.frames
    assert isinstance(failed, Failed)
    assert (failed.call, failed.error) == (5, "AgentUnavailable")
    monkeypatch.setattr(Segment, "open_writable", real)
    job.carry_out([CompleteCall(call=job.callers.begin(PendingCall(worker, 6, 1, registers=KEY)))])
    assert [type(each) for each in worker.frames[1:]] == [Spare, Registered]


async def test_memory_that_can_not_be_looked_at_counts_as_mapped(
    job: JobDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    await made(job)

    def scarce(_: Segment) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    told: list[Any] = []
    monkeypatch.setattr(job._memory, "_take_outcome", told.append)
    monkeypatch.setattr(Segment, "open_writable", scarce)
    job._memory.probe(ProbeMapping(KEY, spare=False))
    assert told == [Probed(KEY, spare=False, lent=True)]


@pytest.mark.parametrize("is_reachable", [True, False])
async def test_a_log_that_can_not_be_followed_is_told_once_and_so_is_its_end(
    job: JobDriver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_reachable: bool,  # noqa: FBT001
) -> None:
    """However often it is tried; that NATS is away the bus has said."""
    failures = [NoResponder("nobody listens") if is_reachable else NoBus("no connection") for _ in range(20)]
    follows = asyncio.Event()

    async def open_job() -> None:
        await asyncio.sleep(0)
        if failures:
            raise failures.pop()

    async def last_seq(_: JobLog) -> int:
        return 0

    monkeypatch.setattr(driver, "FOLLOW_AGAIN_S", 0.0)
    monkeypatch.setattr(job._questions, "open_job", open_job)
    monkeypatch.setattr(JobLog, "last_seq", last_seq)
    monkeypatch.setattr(JobLog, "is_reachable", is_reachable)

    async def entries() -> AsyncIterator[None]:
        follows.set()
        await asyncio.Event().wait()
        yield

    monkeypatch.setattr(JobLog, "follow", lambda *_, **__: entries())
    monkeypatch.setattr(job, "rejoin", lambda _: None)
    job._around.incarnation = SimpleNamespace(number=1)  # type: ignore[assignment]
    job.start()
    async with asyncio.timeout(10):
        await follows.wait()
    told = [record.getMessage() for record in caplog.records]
    if is_reachable:
        lost, back = told
        assert lost == "the log of job run-7 can't be followed, so that is tried again: nobody listens"
        assert back.startswith("the log of job run-7 is followed after ")
        assert back.endswith(" s; 20 attempts failed")
    else:
        assert told == []
