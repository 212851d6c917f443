"""A worker of a job: its handles, what it is told while its call is under way, and what is counted of its reads."""

import asyncio
import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tensorhub_agent.core.effects import CallRead, CompleteCall, FailCall
from tensorhub_agent.core.operations.read import ReadOperation
from tensorhub_agent.jobs import pending_calls, read_counts, worker_server
from tensorhub_agent.jobs.pending_calls import PendingCall, PendingCalls
from tensorhub_agent.jobs.read_counts import ReadCounts
from tensorhub_agent.jobs.worker_server import WorkerServer
from tensorhub_agent.jobs.worker_session import WorkerSession
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_common.errors import MemoryExhausted
from tensorhub_common.protocol.handshake import OLDEST_PROTOCOL
from tensorhub_common.protocol.log.commands import PROTOCOL
from tensorhub_common.protocol.worker import Attach, AttachRefused, HandedBack, Progress, ReadReport, ReadStages
from tensorhub_common.runtime.framed_socket import PeerGone, connect
from tensorhub_common.runtime.release import release
from tensorhub_common.runtime.supervision import Supervisor
from tensorhub_simulator.drivers.agent import SESSION, joined

FRAME_BYTES_MAX = 1 << 20
BOUND_S = 60.0
KEY = ShardKey("policy", "engine", 0)
TOTAL = 100


async def test_a_worker_that_is_not_let_in_hears_why_and_the_log_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """However many workers try, and however often."""
    caplog.set_level("INFO")

    async def attach(*_: object) -> None:
        raise MemoryExhausted("the agent serves 100 jobs already")

    desk: Any = SimpleNamespace(attach=attach, gone=lambda _: None)
    server = WorkerServer(tmp_path / "agent.sock", desk)
    server.start()
    for _ in range(3):
        worker = await connect(tmp_path / "agent.sock", FRAME_BYTES_MAX, BOUND_S)
        attaching = Attach(protocol=OLDEST_PROTOCOL, newest=PROTOCOL, release=release(), job="run-7")
        async with asyncio.timeout(BOUND_S):
            await worker.send(msgspec.msgpack.encode(attaching))
            body = await worker.receive()
        assert msgspec.msgpack.decode(body, type=AttachRefused).message == "the agent serves 100 jobs already"
        worker.close()
    await server.stop()
    assert caplog.records == []


async def test_descriptors_that_no_registration_takes_are_closed(tmp_path: Path) -> None:
    """A worker may hand memory back and end, or hand back more than it may; each frame's are closed."""
    attached = asyncio.Event()

    async def attach(*_: object) -> None:
        attached.set()

    gone = asyncio.Event()
    desk: Any = SimpleNamespace(attach=attach, gone=lambda _: gone.set())
    server = WorkerServer(tmp_path / "agent.sock", desk)
    server.start()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (a folder of the kernel's)
    for count in (1, worker_server.HANDED_BACK_MAX + 1):
        gone.clear()
        worker = await connect(tmp_path / "agent.sock", FRAME_BYTES_MAX, BOUND_S)
        attaching = Attach(protocol=OLDEST_PROTOCOL, newest=PROTOCOL, release=release(), job="run-7")
        fd = os.memfd_create("kept")
        with contextlib.suppress(PeerGone):
            async with asyncio.timeout(BOUND_S):
                await worker.send(msgspec.msgpack.encode(attaching))
                for call in range(count):
                    frame = HandedBack(call=call, segment=1, is_live=True, descriptors=2)
                    await worker.send(msgspec.msgpack.encode(frame), fd, fd)
                if count > 1:
                    refused = msgspec.msgpack.decode(await worker.receive(), type=AttachRefused)
                    assert f"at most {worker_server.HANDED_BACK_MAX} segments wait for 'register'" in refused.message
        worker.close()
        os.close(fd)
        async with asyncio.timeout(BOUND_S):
            await gone.wait()
            while len(os.listdir("/proc/self/fd")) > before:  # noqa: ASYNC110, PTH208 (nothing tells of it)
                await asyncio.sleep(0)
    await server.stop()


def test_handles_of_released_shards_take_up_no_room_and_none_is_given_twice() -> None:
    """A shard that stands again as another worker's is not this one's."""
    agent = joined()
    worker, job = SimpleNamespace(number=SESSION), SimpleNamespace(core=agent.core)
    session = WorkerSession(worker, job)  # type: ignore[arg-type]
    kept, left = agent.register("kept"), agent.register("left")
    handles = {key: session.new_handle(key) for key in (kept, left)}
    agent.logged(agent.release(left))
    session.forget_released()
    assert session.handles == {handles[kept]: kept}
    assert session.new_handle(left) not in handles.values()
    assert not session.is_anothers(kept)
    agent.worker_gone()
    agent.attach(kept, SESSION + 1)
    assert session.is_anothers(kept)


class Read(ReadOperation):
    """A read that is as far as it is told, look after look, and then ends."""

    def __init__(self, core: Any, call: int, far: list[int]) -> None:
        self.core = core
        self.call = CallRead(call=call, session=1, deadline=1e9, want="latest", patience=1e9)
        self._far = iter(far)
        self._last = far[-1]

    @property
    def transfer(self) -> Any:
        return SimpleNamespace(done_bytes=self.done_bytes)

    def done_bytes(self) -> int:
        done = next(self._far)
        if done == self._last:
            self.core.operation = None
        return done


async def test_progress_is_told_when_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that waits is told of once, however often it is looked at."""
    monkeypatch.setattr(pending_calls, "PROGRESS_S", 0.0)
    told: list[Any] = []
    core = SimpleNamespace(operation=None, spec=SimpleNamespace(nbytes=(TOTAL,)))
    worker: Any = SimpleNamespace(tell=told.append)
    work = Supervisor("test")
    waits = PendingCalls({KEY: core}, None, work, ReadCounts())  # type: ignore[dict-item, arg-type]
    call = waits.begin(PendingCall(worker, call=7, handle=1, about=KEY, reads=True))
    core.operation = Read(core, call, [0, 0, 0, 40, 40, 40, 40, TOTAL])
    waits.show_progress()
    assert waits._progress is not None
    async with asyncio.timeout(BOUND_S):
        await waits._progress
    await work.close()
    assert told == [Progress(call=7, done_bytes=done, total_bytes=TOTAL) for done in (0, 40, TOTAL)]


def test_reads_are_counted_by_their_end_and_a_wait_for_a_publisher_is_no_part_of_the_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Retries count whatever became of the read."""
    took, waited = list[float](), list[float]()
    monkeypatch.setattr(read_counts, "_read_took", took.append)
    monkeypatch.setattr(read_counts, "_read_waited", waited.append)

    def report(retried: int, failure: str = "", stages: ReadStages | None = None) -> ReadReport:
        return ReadReport(
            nbytes=1, wire_s=0.0, total_s=8.0, pieces=1, retried=retried, kept=0, sources=(), stages=stages,
            failure=failure,
        )  # fmt: skip

    stages = ReadStages(
        round_s=7.0, plan_s=0.125, lease_s=0.125, start_s=0.125, first_s=0.125, wire_s=0.25, verify_s=0.125,
        ready_s=0.125,
    )  # fmt: skip
    counts = ReadCounts()
    for end in (
        CompleteCall(call=1, version=1, report=report(1, stages=stages)),
        FailCall(2, "RoundTimeout", "", report(10)),
        CompleteCall(call=3, report=report(100, "not now")),
        FailCall(4, "ReplicaConflict", ""),
        CompleteCall(call=5),
        CompleteCall(call=6, version=1, report=report(0)),
    ):
        counts.count(end)
    assert counts.retried == 111
    assert counts.ended == {"done": 2, "RoundTimeout": 1, "put-off": 1, "ReplicaConflict": 1}
    assert (waited, took) == ([7.0, 0.0], [1.0, 8.0])
