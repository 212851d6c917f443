"""Where workers' frames become calls of the cores: attach, register, publish, read, release.

Always true: a handle speaks for a shard only while the shard is its worker's. A worker that gave up waiting for a
release may name the shard once more when it stands here again as another worker's: that one is not touched.
"""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Final

import msgspec

from tensorhub_agent.core.effects import AnyCall, CallPublish, CallRead, CallRegister, CallRelease, CallUnpublish
from tensorhub_agent.core.shard_state import ShardSpec
from tensorhub_agent.jobs.driver import JOIN_S_MAX, JobDriver
from tensorhub_agent.jobs.early_digests import CopyName
from tensorhub_agent.jobs.pending_calls import PendingCall
from tensorhub_agent.jobs.worker_server import WorkerConnection
from tensorhub_agent.observability.read_log import NotBegun
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.runtime.troubles import TROUBLES, TroubleKind
from tensorhub_agent.storage.manifest import unpack_layout
from tensorhub_common.errors import (
    AgentUnavailable,
    BadCommand,
    LayoutMismatch,
    MemoryExhausted,
    ReplicaConflict,
    TensorHubError,
    public_code,
)
from tensorhub_common.layout.layout import Layout, difference, encoded, layout_digest
from tensorhub_common.protocol.call_deadlines import Bound, bound_of
from tensorhub_common.protocol.subjects import check_name
from tensorhub_common.protocol.worker import (
    REGISTERING_MAX,
    Attach,
    Attached,
    Copied,
    Done,
    Failed,
    FromWorker,
    HoldingChanged,
    Loaded,
    PublishCall,
    ReadCall,
    RegisterCall,
    ReleaseCall,
    ShardCall,
    Traced,
    UnpublishCall,
)
from tensorhub_common.runtime.supervision import Fault, OnFault, Supervisor
from tensorhub_common.telemetry.process_spans import store_worker_spans

TIMEOUT_S_MAX: Final = 7 * 24 * 3600.0
"""A call's bound is cut to a week."""

HANDLES_MAX: Final = 1000
"""One connection has at most this many shards."""

RECLAIM_ADVICE: Final = (
    "give the same, or take another replica name. To be rid of what stands there register it as it was, and release it"
)
"""The next step of a worker that registers other tensors than before: only the worker that had it may release it."""


class WorkerSession:
    """One worker's shards, by the handles that its frames use."""

    def __init__(self, worker: WorkerConnection, job: JobDriver) -> None:
        """Begin with no shard."""
        self.worker, self.job = worker, job
        self.handles: dict[int, ShardKey] = {}
        self.registering: set[asyncio.Task[None]] = set()
        self._numbers = count(1)

    def handle_of(self, key: ShardKey) -> int | None:
        """Return the handle of a shard, or None."""
        return next((handle for handle, mine in self.handles.items() if mine == key), None)

    def new_handle(self, key: ShardKey) -> int:
        """Return a handle for a shard, in place of the one that it had. None is used twice."""
        old = self.handle_of(key)
        if old is not None:
            del self.handles[old]
        handle = next(self._numbers)
        self.handles[handle] = key
        return handle

    def is_anothers(self, key: ShardKey) -> bool:
        """Whether the shard stands here and belongs to another worker, or to none."""
        core = self.job.core.shards.get(key)
        return core is not None and core.session != self.worker.number

    def forget_released(self) -> None:
        """Drop the handles of shards that are this worker's no longer."""
        here = self.job.core.shards
        self.handles = {n: key for n, key in self.handles.items() if key in here and not self.is_anothers(key)}


class WorkerSessions:
    """Serves the workers of all jobs."""

    def __init__(self, job_of: Callable[[str], Awaitable[JobDriver]], attached: Callable[[], Attached]) -> None:
        """Find or open jobs by `job_of`."""
        self._job_of, self._attached = job_of, attached
        self._sessions: dict[int, WorkerSession] = {}
        self._work = Supervisor("registrations")
        self._registering: set[tuple[str, ShardKey]] = set()

    async def attach(self, worker: WorkerConnection, attach: Attach) -> None:
        """Begin to serve a connection."""
        check_name("job", attach.job)
        job = await self._job_of(attach.job)
        self._sessions[worker.number] = WorkerSession(worker, job)
        worker.tell(self._attached())

    async def end(self, job: JobDriver) -> None:
        """End the connections of a job, once their workers have been told what there was to tell."""
        ending = [session.worker.end() for session in list(self._sessions.values()) if session.job is job]
        await asyncio.gather(*ending)

    def gone(self, worker: WorkerConnection) -> None:
        """A connection has ended."""
        session = self._sessions.pop(worker.number, None)
        if session is not None:
            for task in session.registering:
                task.cancel()
            session.job.worker_gone(worker)

    def holds(self, number: int, key: ShardKey, version: int | None, trouble: str = "") -> None:
        """Tell a worker what its replica holds now, and what is wrong with it."""
        session = self._sessions.get(number)
        handle = session.handle_of(key) if session is not None else None
        if session is not None and handle is not None:
            session.worker.tell(HoldingChanged(handle=handle, version=version, trouble=trouble))

    async def frame(self, worker: WorkerConnection, frame: FromWorker) -> None:
        """Take one frame."""
        session = self._sessions[worker.number]
        if isinstance(frame, RegisterCall):
            if len(session.registering) >= REGISTERING_MAX:
                # An error that says to call again, so that a worker which brings its shards back loses none of them.
                why = f"one connection registers at most {REGISTERING_MAX} shards at a time: call again"
                worker.drop_handed_back(frame.call)
                worker.tell(Failed(call=frame.call, error=AgentUnavailable.__name__, message=why))
                return
            task = self._work.start(self._register(session, frame), "a registration", _refusing(worker, frame))
            session.registering.add(task)
            task.add_done_callback(session.registering.discard)
            task.add_done_callback(self._work.guarded(lambda _: worker.drop_handed_back(frame.call), "closing files"))
        elif isinstance(frame, Loaded):
            key = session.handles.get(frame.handle)
            if key is not None and not session.is_anothers(key):
                session.job.loaded(key)
        elif isinstance(frame, Copied):
            key = session.handles.get(frame.handle)
            if key is not None and not session.is_anothers(key):
                session.job.copied(key, CopyName(worker.number, frame.copy), frame.nbytes)
        elif isinstance(frame, ShardCall):
            self._call(session, frame)
        elif isinstance(frame, Traced):
            store_worker_spans(frame.spans)
        else:
            raise BadCommand("'attach' may be said once only")

    def _call(self, session: WorkerSession, frame: ShardCall) -> None:
        key, job = session.handles.get(frame.handle), session.job
        reads = isinstance(frame, ReadCall)
        if isinstance(frame, ReleaseCall) and key is not None and session.is_anothers(key):
            # That it is its worker's no longer is what a release wants.
            session.worker.tell(Done(call=frame.call))
            return
        waiting = PendingCall(session.worker, frame.call, frame.handle, about=key, reads=reads)
        if key is None:
            job.refuse(waiting, NotBegun.HANDLE, BadCommand, f"no shard has handle {frame.handle} here")
            return
        where = f"shard {key.shard} of {key.model}/{key.replica}"
        if session.is_anothers(key):
            message = f"{where} was released, and is not this worker's: register it again"
            job.refuse(waiting, NotBegun.NOT_ITS_OWN, AgentUnavailable, message)
            return
        stored = job.store.shards.get(key)
        if isinstance(frame, ReadCall) and stored is not None and stored.spare and frame.segment != stored.inode:
            message = f"an earlier read of {where} has just ended: call again"
            job.refuse(waiting, NotBegun.SWAPPED, ReplicaConflict, message)
            return
        copy = frame.copy if isinstance(frame, PublishCall) else None
        job.early_digests.called(key, None if copy is None else CopyName(session.worker.number, copy))
        number = job.callers.begin(waiting)
        now = asyncio.get_running_loop().time()
        cause = frame.traceparent if isinstance(frame, PublishCall | ReadCall) else None
        job.call(key, _core_call(frame, number, session.worker.number, now), now, cause)

    async def _register(self, session: WorkerSession, frame: RegisterCall) -> None:
        try:
            async with asyncio.timeout(_bound(frame.timeout_s).gives_up_s):
                await self._do_register(session, frame)
        except TensorHubError as why:
            session.worker.tell(Failed(call=frame.call, error=public_code(why), message=str(why)))
        except TimeoutError:
            message = (
                f"registering {frame.model}/{frame.replica} took longer than {frame.timeout_s:.3g} s: allow more, or "
                "see 'tensorhub doctor'"
            )
            session.worker.tell(Failed(call=frame.call, error="RegistryUnavailable", message=message))

    async def _do_register(self, session: WorkerSession, frame: RegisterCall) -> None:
        check_name("model", frame.model)
        check_name("replica", frame.replica)
        if not 0 <= frame.shard < frame.shards:
            raise LayoutMismatch(f"shard {frame.shard} is out of range for shards={frame.shards}: count from 0")
        if len(session.handles) >= HANDLES_MAX:
            session.forget_released()
        if len(session.handles) >= HANDLES_MAX:
            raise ReplicaConflict(f"one connection registers at most {HANDLES_MAX} shards: use another connect()")
        key, job = ShardKey(frame.model, frame.replica, frame.shard), session.job
        layout, data = await asyncio.to_thread(_read_layout, frame.layout)
        await job.wait_joined(min(frame.timeout_s, JOIN_S_MAX))
        if (job.job, key) in self._registering:
            raise ReplicaConflict(
                f"shard {key.shard} of {key.model}/{key.replica} is just being registered: call again"
            )
        self._registering.add((job.job, key))
        try:
            if key in job.core.shards:
                self._attach_again(session, frame, key, layout)
            else:
                await self._bring(session, frame, key, layout, data)
        finally:
            self._registering.discard((job.job, key))

    def _attach_again(self, session: WorkerSession, frame: RegisterCall, key: ShardKey, layout: Layout) -> None:
        """A worker comes back to a shard that stands here. It gets the memory when what was begun on it has ended."""
        job = session.job
        core = job.core.shards[key]
        where = f"shard {key.shard} of {key.model}/{key.replica}"
        stored = job.store.shards[key]
        if stored.digest != layout_digest(layout):
            raise LayoutMismatch(
                f"{where} stands with other tensors: {difference(stored.layout, layout)}; {RECLAIM_ADVICE}"
            )
        if (core.spec.shards, core.spec.spot, core.spec.install) != (frame.shards, frame.spot, frame.install):
            raise LayoutMismatch(
                f"{where} was registered with shards={core.spec.shards}, spot={core.spec.spot}, "
                f"install={core.spec.install!r}; {RECLAIM_ADVICE}"
            )
        if core.spec.device != frame.device:
            raise LayoutMismatch(
                f"{where} is in the memory of {core.spec.device or 'the host'}, and was asked for in that of "
                f"{frame.device or 'the host'}; {RECLAIM_ADVICE}"
            )
        # Its own worker asks again where it gave up waiting for an answer, which then came to no call.
        if core.session not in (None, session.worker.number):
            raise ReplicaConflict(f"{where} has a live worker: release it there, or register another replica or shard")
        handle = session.new_handle(key)
        waiting = PendingCall(session.worker, frame.call, handle, registers=key, keeps=frame.keeps)
        number = job.callers.begin(waiting)
        now = asyncio.get_running_loop().time()
        bound = _bound(frame.timeout_s)
        deadline = now + bound.gives_up_s
        call = CallRegister(call=number, session=session.worker.number, deadline=deadline, outcome_s=bound.outcome_s)
        job.call(key, call, now)

    async def _bring(
        self, session: WorkerSession, frame: RegisterCall, key: ShardKey, layout: Layout, data: bytes
    ) -> None:
        """A new shard: its layout goes to where everybody finds it, its memory is made, the log is told."""
        job = session.job
        # The core decides once the memory is there; no memory is made for what it would refuse.
        job.core.check_room()
        digest = await job.keep_layout(data)
        handed_back = session.worker.handed_back(frame.call)
        staged, mapped = frame.install == "staged", frame.install == "mapped"
        incarnation = job.core.incarnation
        try:
            stored = await job.store.make(
                key,
                frame.shards,
                layout,
                digest,
                spot=frame.spot,
                incarnation=incarnation,
                install=frame.install,
                device=frame.device,
                handed_back=handed_back,
            )
        except MemoryExhausted as why:
            TROUBLES.note(TroubleKind.MEMORY, why)
            raise
        TROUBLES.over(TroubleKind.MEMORY)
        handle = session.new_handle(key)
        is_back = any(each.told == stored.inode for each in handed_back)
        waiting = PendingCall(session.worker, frame.call, handle, registers=key, fresh=not is_back, keeps=frame.keeps)
        number = job.callers.begin(waiting)
        now = asyncio.get_running_loop().time()
        bound = _bound(frame.timeout_s)
        deadline = now + bound.gives_up_s
        call = CallRegister(call=number, session=session.worker.number, deadline=deadline, outcome_s=bound.outcome_s)
        if is_back:
            call = msgspec.structs.replace(
                call,
                holds=frame.holds,
                partial=frame.partial,
                lent=stored.segment.is_lent(),
                spare_lent=stored.spare is not None and stored.spare.is_lent(),
            )
        spec = ShardSpec(key, frame.shards, frame.spot, digest, stored.table.nbytes, staged, mapped, frame.device)
        job.register(spec, call, now)
        if key not in job.core.shards:
            session.handles.pop(handle, None)


def _refusing(worker: WorkerConnection, frame: RegisterCall) -> OnFault:
    """Return what a fault of a registration does: the call raises."""

    def refuse(fault: Fault) -> None:
        message = f"the agent failed with {type(fault.error).__name__}; its log says where"
        worker.tell(Failed(call=frame.call, error="TensorHubError", message=message))

    return refuse


def _bound(timeout_s: float) -> Bound:
    return bound_of(min(max(timeout_s, 0.0), TIMEOUT_S_MAX))


def _core_call(frame: ShardCall, number: int, session: int, now: float) -> AnyCall:
    bound = _bound(frame.timeout_s)
    deadline = now + bound.gives_up_s
    match frame:
        case PublishCall():
            call: AnyCall = CallPublish(call=number, session=session, deadline=deadline, version=frame.version)
        case UnpublishCall():
            call = CallUnpublish(call=number, session=session, deadline=deadline)
        case ReadCall():
            wait_s = bound.gives_up_s if frame.wait_s is None else min(max(frame.wait_s, 0.0), bound.gives_up_s)
            want, patience = frame.want, now + wait_s
            call = CallRead(
                call=number,
                session=session,
                deadline=deadline,
                want=want,
                patience=patience,
                has_let_go=frame.has_let_go,
            )
        case ReleaseCall():
            call = CallRelease(call=number, session=session, deadline=deadline)
        case _:
            raise BadCommand(f"{type(frame).__name__} is no call about a shard")
    return msgspec.structs.replace(call, outcome_s=bound.outcome_s)


def _read_layout(packed: bytes) -> tuple[Layout, bytes]:
    """Unpack and check a layout as a worker sent it. Raises `LayoutMismatch`."""
    layout = unpack_layout(packed)
    return layout, encoded(layout)
