"""Who waits for the calls of one job's cores: workers, by the number that a call has here.

Always true: each call is answered once, on the connection that it came by.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tensorhub_agent.core.effects import CompleteCall, FailCall, ReportReplicaVersion
from tensorhub_agent.core.operations.read import read_of
from tensorhub_agent.core.shard import ShardCore
from tensorhub_agent.jobs.read_counts import ReadCounts
from tensorhub_agent.jobs.worker_server import WorkerConnection
from tensorhub_agent.primitives.ids import ShardKey
from tensorhub_agent.storage.mapped_descriptors import close_all
from tensorhub_agent.storage.shard_store import JobShardStore
from tensorhub_common.errors import AgentUnavailable
from tensorhub_common.layout.layout import segment_bytes
from tensorhub_common.observability.trace_context import TraceContext
from tensorhub_common.protocol.log.commands import NO_ROOT
from tensorhub_common.protocol.worker import Done, Failed, HoldingChanged, Mapped, Progress, Registered, Spare, Swapped
from tensorhub_common.runtime.supervision import Supervisor

PROGRESS_S: Final = 0.25


@dataclass(slots=True)
class PendingCall:
    """Who waits for a call of the core's: a worker's call, or the registration of a shard."""

    worker: WorkerConnection
    call: int
    handle: int
    registers: ShardKey | None = None
    fresh: bool = False
    keeps: bool = False
    """The worker that registers keeps its memory on a GPU."""
    about: ShardKey | None = None
    """The shard of any other call, and whether that reads."""
    reads: bool = False
    told_bytes: int = -1
    """How much of its read the worker was told last."""


class PendingCalls:
    """The calls under way of one job."""

    def __init__(
        self, shards: Mapping[ShardKey, ShardCore], store: JobShardStore, work: Supervisor, reads: ReadCounts
    ) -> None:
        """Look at the core's shards, and at the memory that they stand in; count what becomes of reads."""
        self._shards, self._store, self._work = shards, store, work
        self._waiting: dict[int, PendingCall] = {}
        self._calls = 0
        self._read_counts = reads
        self._progress: asyncio.Task[None] | None = None

    def begin(self, waiting: PendingCall) -> int:
        """Number a call of the core's; `waiting` says who is told of its end."""
        self._calls += 1
        self._waiting[self._calls] = waiting
        return self._calls

    def reading(self, call: int) -> ShardKey | None:
        """Return the shard that a call reads into; None where it does not read."""
        waiting = self._waiting.get(call)
        return waiting.about if waiting is not None and waiting.reads else None

    def refuse(self, waiting: PendingCall, effect: FailCall) -> None:
        """Tell a worker that its call does not begin: it has no number here, and maybe no shard either."""
        if waiting.reads:
            self._read_counts.count(effect)
        waiting.worker.tell(Failed(call=waiting.call, error=effect.error, message=effect.message))

    def answer(self, effect: CompleteCall | FailCall, context: TraceContext | None) -> None:
        """Tell the worker what became of the call, and the span that its own belongs to."""
        waiting = self._waiting.pop(effect.call, None)
        if waiting is None:
            return
        if waiting.reads:
            self._read_counts.count(effect)
        if waiting.about is not None:
            self._tell_swapped(waiting, waiting.about)
            if isinstance(effect, CompleteCall) and effect.version is not None:
                self._hand_over(waiting, waiting.about, effect.version)
        traceparent = None if context is None else context.traceparent
        if isinstance(effect, FailCall):
            waiting.worker.tell(
                Failed(call=waiting.call, error=effect.error, message=effect.message, traceparent=traceparent)
            )
        elif waiting.registers is not None:
            try:
                self._tell_registered(waiting, waiting.registers)
            except OSError as why:
                # The shard is its worker's all the same, so that it gets the memory when it calls again.
                message = f"the memory can't be handed over just now ({why.strerror}): call again"
                waiting.worker.tell(Failed(call=waiting.call, error=AgentUnavailable.__name__, message=message))
        else:
            waiting.worker.tell(
                Done(call=waiting.call, version=effect.version, report=effect.report, traceparent=traceparent)
            )

    def under_way(self) -> tuple[int, ...]:
        """Return the numbers of the calls that are not answered yet."""
        return tuple(self._waiting)

    def _tell_swapped(self, waiting: PendingCall, key: ShardKey) -> None:
        """Tell a staged shard's worker in which of the two segments it stands now, before the call is answered."""
        stored = self._store.shards.get(key)
        if stored is not None and stored.spare is not None:
            waiting.worker.tell(Swapped(handle=waiting.handle, segment=stored.inode))

    def swapped(self, key: ShardKey) -> None:
        """Tell the worker that a staged shard swaps, before the call's answer: with that the shard may be gone."""
        for waiting in self._waiting.values():
            if waiting.about == key:
                self._tell_swapped(waiting, key)

    def _hand_over(self, waiting: PendingCall, key: ShardKey, version: int) -> None:
        """Hand the memory that a mapped shard's read has taken to its worker, before the call is answered."""
        stored = self._store.shards.get(key)
        if stored is None or stored.descriptors is None:
            return
        fds = stored.descriptors.hand_over()
        if not fds and not segment_bytes(stored.layout):
            # There is not a byte to map.
            fds = (stored.segment.open_readonly(),)
        if fds:
            waiting.worker.tell(Mapped(handle=waiting.handle, version=version, descriptors=len(fds)), *fds)

    def _tell_registered(self, waiting: PendingCall, key: ShardKey) -> None:
        """Hand a shard's segment to its worker. Raises `OSError` where there is no descriptor for it."""
        core = self._shards[key]
        stored = self._store.shards[key]
        segment = stored.segment
        fds = segment.open_writable(keeps=waiting.keeps)
        if stored.spare is not None:
            try:
                spare_fds = stored.spare.open_writable(keeps=waiting.keeps)
            except OSError:
                close_all(fds)
                raise
            spare = Spare(call=waiting.call, segment=stored.spare.told, descriptors=len(spare_fds))
            waiting.worker.tell(spare, *spare_fds)
        ready, root = str(core.contents.memory) == "ready", core.contents.root or ""
        waiting.worker.tell(
            Registered(
                call=waiting.call,
                handle=waiting.handle,
                nbytes=segment.nbytes,
                version=core.contents.version if ready else None,
                fresh=waiting.fresh,
                segment=segment.told,
                root=root if ready and root != NO_ROOT else "",
                descriptors=len(fds),
            ),
            *fds,
        )
        if core.replica_version is not None:
            waiting.worker.tell(HoldingChanged(handle=waiting.handle, version=core.replica_version))

    def session_of(self, effect: ReportReplicaVersion) -> int | None:
        """Return the connection of the worker that is to hear what its replica holds."""
        core = self._shards.get(effect.key)
        return None if core is None else core.session

    def show_progress(self) -> None:
        """Tell each reading worker how far its read is, a few times a second, while it gets on."""
        if self._progress is None or self._progress.done():
            self._progress = self._work.start(self._tell_progress(), "telling workers of progress")

    async def _tell_progress(self) -> None:
        busy = True
        while busy:
            await asyncio.sleep(PROGRESS_S)
            busy = False
            for core in self._shards.values():
                read = read_of(core)
                if read is not None and read.transfer is not None:
                    busy = True
                    waiting = self._waiting.get(read.call.call)
                    done = read.transfer.done_bytes() if waiting is not None else 0
                    if waiting is not None and done != waiting.told_bytes:
                        # A thousand reads that wait would say so four thousand times a second.
                        waiting.told_bytes = done
                        total = sum(core.spec.nbytes)
                        waiting.worker.tell(Progress(call=waiting.call, done_bytes=done, total_bytes=total))
