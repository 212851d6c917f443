"""The driver of one job: what costs one call, or nothing, is no fault of the job."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tensorhub_agent.compute.pool import CopyPool
from tensorhub_agent.core.config import CoreConfig
from tensorhub_agent.core.effects import (
    AnyEffect,
    CallRead,
    CompareLayouts,
    CompleteCall,
    CopyToSpare,
    DigestMemory,
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
from tensorhub_agent.jobs.early_digests import CopyName
from tensorhub_agent.jobs.pending_calls import PendingCall
from tensorhub_agent.jobs.read_counts import ReadCounts
from tensorhub_agent.jobs.worker_session import WorkerSessions
from tensorhub_agent.leases.delta_store import DeltaStore
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
from tensorhub_common.protocol.worker import (
    Attach,
    Attached,
    Copied,
    Failed,
    Frame,
    PublishCall,
    ReadCall,
    Registered,
    Spare,
    UnpublishCall,
)
from tensorhub_common.runtime import segment_locks
from tensorhub_simulator.drivers.agent import pair

KEY = ShardKey("policy", "trainer", 0)
LAYOUT = layout_of([TensorEntry("w", "float32", 4, (8,), (8,), (0,))])
KEEP = Keep(key=KEY, number=3, version=12, root="r", digests=b"")
EMPTY = SaveManifest(key=KEY, state="empty", partial=True)


@pytest.fixture
async def job(tmp_path: Path) -> AsyncIterator[JobDriver]:
    """A job with one shard, which is staged."""
    pool, stores = CopyPool(1), ShardStores(SegmentStore(tmp_path, "test-", 1 << 30))
    around: Any = SimpleNamespace(
        agent="agent-0", bus=None, blobs=None, pool=pool, transports=None, config=CoreConfig(), measured=LinkRates(),
        stores=stores, deltas=DeltaStore(1, 1 << 20), planner=None, registry=RegistryWatch(), set_aside=lambda _:
        None, reads=ReadCounts(),
    )  # fmt: skip
    job = JobDriver("run-7", around, lambda: None)
    await job.store.make(KEY, 1, LAYOUT, layout_digest(LAYOUT), spot=False, incarnation=1, install="staged")
    yield job
    await job.stop()
    job.store.free(KEY)
    stores.close()
    pool.close()


async def ended(job: JobDriver) -> None:
    """Return once nothing is under way any more."""
    async with asyncio.timeout(10):
        while job._work.tasks:  # noqa: ASYNC110 (nothing tells of their end)
            await asyncio.sleep(0.001)


class Told:
    """A worker that keeps what it is told, and calls."""

    number = 7

    def __init__(self, job: JobDriver) -> None:
        self._job = job
        self.frames: list[Frame] = []

    def tell(self, frame: Frame, fd: int | None = None) -> None:
        self.frames.append(frame)
        if fd is not None:
            os.close(fd)

    def calls(self, call: int, **more: Any) -> int:
        worker: Any = self
        return self._job.callers.begin(PendingCall(worker, call, 1, **more))

    def failed(self) -> list[tuple[int, str]]:
        return [(frame.call, frame.error) for frame in self.frames if isinstance(frame, Failed)]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "tensorhub_agent.jobs.driver"]


def planted(*_: object) -> Any:
    raise ArithmeticError("planted")


def no_descriptor(*_: object) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


# What is carried out.


@pytest.mark.parametrize("effect", [CompareLayouts(KEY, 1, ()), DigestMemory(KEY, 1), CopyToSpare(KEY), KEEP])
async def test_a_shard_that_goes_before_the_work_on_it_begins(job: JobDriver, effect: AnyEffect) -> None:
    """An agent that was stopped for a moment takes the shard's end from the log in the turn that began the work."""
    job.carry_out([effect, FreeShard(KEY)])
    await ended(job)
    assert job.set_aside_reason is None


@pytest.mark.parametrize("failure", [None, "no room"])
async def test_the_core_is_told_whether_what_was_filled_is_kept(
    job: JobDriver, monkeypatch: pytest.MonkeyPatch, failure: str | None
) -> None:
    told: asyncio.Queue[object] = asyncio.Queue()

    def on_outcome(news: object, _: float) -> list[AnyEffect]:
        told.put_nowait(news)
        return []

    def full(*_: object) -> None:
        raise MemoryExhausted("no room")

    monkeypatch.setattr(job.core, "on_outcome", on_outcome)
    if failure:
        monkeypatch.setattr("tensorhub_agent.storage.manifest.save", full)
    job.carry_out([KEEP])
    async with asyncio.timeout(10):
        assert await told.get() == Kept(KEY, 3, failure)


async def test_a_fill_is_kept_in_the_order_of_what_was_decided(job: JobDriver) -> None:
    """An agent that was stopped for a moment takes the round's failure in the turn in which it keeps the fill."""
    job.carry_out([KEEP, EMPTY])
    await ended(job)
    assert job.store.shards[KEY].manifest.state == "empty"
    job.carry_out([EMPTY, KEEP])
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


@pytest.mark.parametrize("left", [0, 1])
async def test_memory_for_which_there_is_no_descriptor_costs_one_call(
    job: JobDriver, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """A staged shard takes two: neither stays open where one can't be had. The next call gets both."""
    job.core.adopt(ShardSpec(KEY, 1, spot=False, layout="", nbytes=(32,), staged=True), ShardContents())
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 (a folder of the kernel's)
    real, answers = Segment.open_writable, [Segment.open_writable] * left

    def scarce(segment: Segment, **how: bool) -> tuple[int, ...]:
        return answers.pop()(segment, **how) if answers else (no_descriptor(segment),)

    worker = Told(job)
    monkeypatch.setattr(Segment, "open_writable", scarce)
    job.carry_out([CompleteCall(call=worker.calls(5, registers=KEY))])
    assert job.set_aside_reason is None
    assert len(os.listdir("/proc/self/fd")) == len(before)  # noqa: PTH208 (a folder of the kernel's)
    assert worker.failed() == [(5, "AgentUnavailable")]
    monkeypatch.setattr(Segment, "open_writable", real)
    job.carry_out([CompleteCall(call=worker.calls(6, registers=KEY))])
    assert [type(each) for each in worker.frames[1:]] == [Spare, Registered]


async def test_memory_that_can_not_be_looked_at_counts_as_mapped(
    job: JobDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(job._memory, "_take_outcome", told.append)
    monkeypatch.setattr(segment_locks, "reopened", no_descriptor)
    job._memory.probe(ProbeMapping(KEY, spare=False))
    assert told == [Probed(KEY, spare=False, lent=True)]


# A job that is set aside.


def set_aside(job: JobDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Let looking for late reads fail: the agent's main loop looks at all jobs, one after another."""
    monkeypatch.setattr(job._watch, "look", planted)
    job.look()
    assert "planted" in (job.set_aside_reason or "")
    caplog.clear()


@pytest.mark.parametrize("telling_fails", [False, True])
async def test_reads_under_way_in_a_job_that_is_set_aside_are_told_and_counted(
    job: JobDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, telling_fails: bool
) -> None:
    """With as much of each as is known: one reads from a source, the other has not begun.

    They are told once nothing is written any more: who is told may write into the same memory at once. And whatever
    fails in telling, each call is answered.
    """
    _, agent, key = pair()
    worker = Told(job)
    worker.calls(4, about=KEY)
    reads = worker.calls(5, about=key, reads=True)
    assert agent.logged(agent.read(key)) == reads
    agent.plan(key)
    worker.calls(6, about=agent.key("rollout", 1), reads=True)
    job.core = agent.core
    traces = planted if telling_fails else {reads: "7ace"}.get
    monkeypatch.setattr(job._tracing, "trace_of", traces)
    told_before: list[int] = []
    stop = job.sources.stop

    async def stopping() -> None:
        await stop()
        told_before.append(len(worker.frames))

    monkeypatch.setattr(job.sources, "stop", stopping)
    set_aside(job, monkeypatch, caplog)
    await job.end_aside()
    assert told_before[0] == 0
    assert worker.failed() == [(call, "AgentUnavailable") for call in (4, 5, 6)]
    if telling_fails:
        return
    first, second = lines(caplog)
    assert first.startswith("job run-7: the read of shard 0 of policy/rollout failed: AgentUnavailable: agent ")
    assert first.endswith("; sources: elsewhere (local, 0.0 MiB) (trace 7ace)")
    assert second.startswith("job run-7: the read of shard 1 of policy/rollout failed: AgentUnavailable: ")
    assert job._around.reads.ended == {"AgentUnavailable": 2}


async def test_a_crowd_of_reads_of_a_job_that_is_set_aside_has_one_line(
    job: JobDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Told(job)
    set_aside(job, monkeypatch, caplog)
    for call in range(1000):
        number = worker.calls(call, about=KEY, reads=True)
        job.call(KEY, CallRead(call=number, session=1, deadline=1.0, want="latest", patience=1.0), 0.0)
    assert len(worker.failed()) == 1000
    assert job._around.reads.ended == {"AgentUnavailable": 1000}
    [line] = lines(caplog)
    assert "a read of shard 0 of policy/trainer is refused: AgentUnavailable: agent " in line


@pytest.mark.parametrize(
    ("handle", "session", "error", "message"),
    [
        (2, 7, "BadCommand", "no shard has handle 2 here"),
        (1, 8, "AgentUnavailable", "shard 0 of policy/trainer was released, and is not this worker's: register it"),
        (1, 7, "ReplicaConflict", "an earlier read of shard 0 of policy/trainer has just ended: call again"),
    ],
)
async def test_a_read_that_is_refused_before_it_begins_is_told_and_counted(
    job: JobDriver, caplog: pytest.LogCaptureFixture, handle: int, session: int, error: str, message: str
) -> None:
    job.core.adopt(ShardSpec(KEY, 1, spot=False, layout="", nbytes=(32,), staged=True), ShardContents())
    job.core.shards[KEY].session = session
    worker: Any = Told(job)

    async def job_of(_: str) -> JobDriver:
        return job

    desk = WorkerSessions(job_of, lambda: Attached(protocol=1, agent="agent-0", incarnation=1, nats=""))
    await desk.attach(worker, Attach(protocol=1, job="run-7"))
    desk._sessions[7].handles[1] = KEY
    for call in (5, 6):
        await desk.frame(worker, ReadCall(call=call, handle=handle, timeout_s=1.0, want="latest", segment=1))
    await desk.frame(worker, UnpublishCall(call=7, handle=2, timeout_s=1.0))
    assert worker.failed() == [(5, error), (6, error), (7, "BadCommand")]
    what = " of shard 0 of policy/trainer" if handle == 1 else ""
    [line] = lines(caplog)
    assert line.startswith(f"job run-7: a read{what} is refused: {error}: {message}")
    assert job._around.reads.ended == {error: 2}, "an unpublish is no read"


async def test_how_far_a_copy_has_come_is_taken_of_a_workers_own_shards_and_a_publication_names_the_copy(
    job: JobDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ShardKey("policy", "trainer", 1)
    for key, session in ((KEY, 7), (other, 8)):
        job.core.adopt(ShardSpec(key, 2, spot=False, layout="", nbytes=(32,)), ShardContents())
        job.core.shards[key].session = session
    told: list[object] = []
    monkeypatch.setattr(job.early_digests, "came", lambda *each: told.append(each))
    monkeypatch.setattr(job.early_digests, "called", lambda *each: told.append(each))
    monkeypatch.setattr(job, "call", lambda *_: told.append("the call"))
    worker: Any = Told(job)

    async def job_of(_: str) -> JobDriver:
        return job

    desk = WorkerSessions(job_of, lambda: Attached(protocol=1, agent="agent-0", incarnation=1, nats=""))
    await desk.attach(worker, Attach(protocol=1, job="run-7"))
    desk._sessions[7].handles |= {1: KEY, 2: other}
    for handle in (1, 2, 3):
        await desk.frame(worker, Copied(handle=handle, copy=9, nbytes=100))
    await desk.frame(worker, PublishCall(call=1, handle=1, timeout_s=1.0, version=None, copy=9))
    await desk.frame(worker, PublishCall(call=2, handle=1, timeout_s=1.0, version=None))
    await desk.frame(worker, UnpublishCall(call=3, handle=1, timeout_s=1.0))
    copy = CopyName(7, 9)
    assert told == [(KEY, copy, 100), (KEY, copy), "the call", (KEY, None), "the call", (KEY, None), "the call"]


@pytest.mark.parametrize("is_reachable", [True, False])
async def test_a_log_that_can_not_be_followed_is_told_once_and_so_is_its_end(
    job: JobDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, is_reachable: bool
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

    async def entries() -> AsyncIterator[None]:
        follows.set()
        await asyncio.Event().wait()
        yield

    monkeypatch.setattr(driver, "FOLLOW_AGAIN_S", 0.0)
    monkeypatch.setattr(job._questions, "open_job", open_job)
    monkeypatch.setattr(JobLog, "last_seq", last_seq)
    monkeypatch.setattr(JobLog, "is_reachable", is_reachable)
    monkeypatch.setattr(JobLog, "follow", lambda *_, **__: entries())
    monkeypatch.setattr(job, "rejoin", lambda _: None)
    job._around.incarnation = SimpleNamespace(number=1)  # type: ignore[assignment]
    job.start()
    async with asyncio.timeout(10):
        await follows.wait()
    if not is_reachable:
        assert caplog.records == []
        return
    lost, back = (record.getMessage() for record in caplog.records)
    assert "can't be followed, so that is tried again: nobody listens" in lost
    assert back.endswith(" s; 20 attempts failed")
